//! A collective of the ranks, and its channels.

use std::sync::Arc;

use brimful_torch::stream::Event;
use tch::Tensor;

use super::link::{Link, Look};
use super::message::{Channel, Tensors};
use super::outbox::OutgoingMessage;
use super::ring::Ring;
use super::waits::Wait;
use crate::Result;
use crate::memory::Memory;

/// Collective of the ranks. All ranks begin the same collectives in the same order. Dropping the last clone ends
/// the collective, with all pending transfers. The collective of a world of one rank has no channel.
#[derive(Debug, Clone)]
pub(crate) struct Collective(pub(super) Option<Arc<Open>>);

#[derive(Debug)]
pub(super) struct Open {
    link: Arc<Link>,
    rank: usize,
    number: u64,
}

/// Sending end of a channel.
#[derive(Debug)]
pub(crate) struct Outlet {
    open: Arc<Open>,
    to: usize,
    channel: Channel,
    places: usize,
}

/// Receiving end of a channel.
#[derive(Debug)]
pub(crate) struct Inlet {
    open: Arc<Open>,
    from: usize,
    channel: Channel,
}

/// Sum over ranks in progress.
#[derive(Debug)]
pub(crate) struct Summing {
    open: Arc<Open>,
    channel: Channel,
}

/// Reason why a transfer was not sent or taken.
#[derive(Debug)]
pub(crate) enum Stopped {
    /// The collective has failed on a rank.
    Collective,
    Error(crate::Error),
}

impl Collective {
    pub(super) fn begin(link: &Arc<Link>, rank: usize) -> Result<Self> {
        let number = link.with(|engine| engine.begin())?;
        Ok(Self(Some(Arc::new(Open { link: Arc::clone(link), rank, number }))))
    }

    fn open(&self) -> &Arc<Open> {
        self.0.as_ref().expect("a rank without others has no channel")
    }

    fn channel(&self, number: u32) -> Channel {
        Channel { collective: self.open().number, number }
    }

    /// Returns the sending end of a channel to another rank, with at most `places` transfers in flight.
    pub(crate) fn outlet(&self, to: usize, number: u32, places: usize) -> Outlet {
        Outlet { open: Arc::clone(self.open()), to, channel: self.channel(number), places }
    }

    /// Returns the receiving end of a channel from another rank. Received tensors are charged to `memory` if it is
    /// an arena. If it is an accelerator's, they are in pinned host memory, which can be copied to the accelerator
    /// without blocking the host.
    pub(crate) fn inlet(
        &self,
        from: usize,
        number: u32,
        places: usize,
        memory: Option<Memory>,
    ) -> Result<Inlet> {
        let channel = self.channel(number);
        let open = Arc::clone(self.open());
        open.link.with(|engine| engine.inbox(from, channel).open(places, memory))?;
        Ok(Inlet { open, from, channel })
    }

    /// Begins to sum a tensor over these ranks, which all ranks list in the same order. The tensor is
    /// contiguous host memory, and belongs to the sum from now on; its data are complete when the event is
    /// reached.
    pub(crate) fn sum(
        &self,
        ranks: &Arc<[usize]>,
        number: u32,
        tensor: &Tensor,
        ready: Option<Event>,
    ) -> Result<Summing> {
        let channel = self.channel(number);
        let flat = tensor.f_detach()?.f_view([-1_i64])?;
        let open = Arc::clone(self.open());
        let ring = Ring::new(Arc::clone(ranks), open.rank, flat, ready)?;
        open.link.begin_sum(channel, ring);
        Ok(Summing { open, channel })
    }

    /// Returns the number of this rank.
    pub(crate) fn rank(&self) -> usize {
        self.open().rank
    }

    /// Reports to all ranks that the collective has failed here, which ends every wait for it.
    pub(crate) fn stop(&self) {
        let Some(open) = &self.0 else { return };
        // Ignores the error: after the end of the world, there is no wait to end.
        let _ = open.link.with(|engine| engine.stop(open.number));
    }

    /// Returns a guard that stops the collective unless all went well.
    pub(crate) fn stopping(&self) -> Stopping {
        Stopping(self.0.is_some().then(|| self.clone()))
    }
}

/// Guard that stops a collective when the guard is dropped, even by a panic.
#[derive(Debug)]
pub(crate) struct Stopping(Option<Collective>);

impl Stopping {
    pub(crate) fn all_went_well(mut self) {
        self.0 = None;
    }
}

impl Drop for Stopping {
    fn drop(&mut self) {
        if let Some(collective) = &self.0 {
            collective.stop();
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        // Other ranks may still need data that this rank's device is computing, so the data are sent before the
        // channels are closed. After the end of the world, no rank needs them.
        let _ = self.link.wait(|engine| match engine.is_computing_for(self.number) {
            true => Ok(Look::WaitFor(Wait::Nobody)),
            false => Ok(Look::Found(())),
        });
        let _ = self.link.with(|engine| engine.close(self.number));
    }
}

impl Outlet {
    /// Sends tensors, once there is a free place.
    pub(crate) fn send(&self, tensors: Tensors) -> Result<(), Stopped> {
        self.send_when(tensors, None)
    }

    /// Sends tensors whose data are in host memory when the event is reached.
    pub(crate) fn send_when(&self, tensors: Tensors, ready: Option<Event>) -> Result<(), Stopped> {
        let Open { link, number, .. } = &*self.open;
        // Packed without the lock, because packing may copy from a device. The originals are dropped before the
        // wait for a place, so that they take no memory during the wait.
        let mut message = Some(OutgoingMessage::pack(&tensors, ready).map_err(Stopped::Error)?);
        drop(tensors);
        link.wait(|engine| {
            if engine.is_stopped(*number) {
                return Ok(Look::Found(Err(Stopped::Collective)));
            }
            if engine.outstanding(self.to, self.channel) >= self.places {
                // The receiver is not to blame while this rank's own device still computes.
                let own = engine.is_computing(self.to, self.channel);
                return Ok(Look::WaitFor(if own { Wait::Nobody } else { Wait::Rank(self.to) }));
            }
            let sent = message.take().map(|message| engine.send(self.to, self.channel, message));
            sent.unwrap_or(Ok(())).map(|()| Look::Found(Ok(())))
        })
        .map_err(Stopped::Error)?
    }
}

impl Inlet {
    /// Takes the next tensors.
    pub(crate) fn take(&self) -> Result<Tensors, Stopped> {
        let Open { link, number, .. } = &*self.open;
        link.wait(|engine| {
            let inbox = engine.inbox(self.from, self.channel);
            let wait = inbox.waits_for(self.from);
            // Received tensors are returned even after the collective has stopped; only a wait fails.
            match inbox.take() {
                Some(tensors) => tensors.map(|tensors| Look::Found(Ok(tensors))),
                None if engine.is_stopped(*number) => Ok(Look::Found(Err(Stopped::Collective))),
                None => Ok(Look::WaitFor(wait)),
            }
        })
        .map_err(Stopped::Error)?
    }
}

impl Summing {
    /// Waits until the sum is in the tensor.
    pub(crate) fn wait(self) -> Result<(), Stopped> {
        let Open { link, number, .. } = &*self.open;
        link.wait(|engine| match engine.take_ring(self.channel) {
            Some(_) => Ok(Look::Found(Ok(()))),
            None if engine.is_stopped(*number) => Ok(Look::Found(Err(Stopped::Collective))),
            None => Ok(Look::WaitFor(engine.ring_waits_for(self.channel))),
        })
        .map_err(Stopped::Error)?
    }
}

impl From<Stopped> for crate::Error {
    fn from(stopped: Stopped) -> Self {
        match stopped {
            Stopped::Collective => {
                super::WorldError::Message("another rank has stopped".into()).into()
            }
            Stopped::Error(error) => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use tch::{Device, Kind};

    use super::*;
    use crate::memory::Arena;
    use crate::world::WorldError;
    use crate::world::messenger::Messenger;
    use crate::world::test_wire::{Observer, wires};

    const LONG: Duration = Duration::from_secs(60);

    /// Returns two ranks on a wire with this many tags, both in their first collective.
    fn two_ranks(tags: u64) -> ([Arc<Link>; 2], [Collective; 2], Observer) {
        let (wires, observer) = wires(2, tags);
        let links = wires.into_iter().map(|wire| Link::new(Messenger::new(wire, LONG, LONG)));
        let links: [Arc<Link>; 2] = links.collect::<Vec<_>>().try_into().expect("two");
        let collectives =
            [0, 1].map(|rank| Collective::begin(&links[rank], rank).expect("a collective"));
        (links, collectives, observer)
    }

    fn number(value: f64) -> Tensor {
        Tensor::from_slice(&[value])
    }

    fn message(tensor: Tensor) -> Tensors {
        vec![vec![Some(tensor)]]
    }

    fn only(tensors: &Tensors) -> &Tensor {
        tensors[0][0].as_ref().expect("one tensor")
    }

    /// More tensors than tags are in flight, and the last channel is received first.
    #[test]
    fn tensors_are_not_swapped_where_tags_repeat() {
        for tags in [1, 2, 3, 5, 64] {
            let (_, [sender, receiver], _) = two_ranks(tags);
            for channel in 0..20 {
                for value in [0.0, 0.5] {
                    let outlet = sender.outlet(1, channel, usize::MAX);
                    outlet.send(message(number(f64::from(channel) + value))).expect("sent");
                }
            }
            for channel in (0..20).rev() {
                let inlet = receiver.inlet(0, channel, 1, None).expect("an inlet");
                for value in [0.0, 0.5] {
                    let came = inlet.take().expect("it comes");
                    let expected = number(f64::from(channel) + value);
                    assert_eq!(*only(&came), expected, "channel {channel}, {tags} tags");
                }
            }
        }
    }

    /// A late rank begins its sums in another order than the first rank.
    #[test]
    fn sums_are_not_swapped_where_tags_repeat() {
        for tags in [1, 2, 3, 5, 64] {
            let (links, collectives, _) = two_ranks(tags);
            let all: Arc<[usize]> = Arc::new([0, 1]);
            let values: Vec<[Tensor; 2]> = (1..=10)
                .map(|n| [1.0, 100.0].map(|rank| Tensor::from_slice(&[rank, 2.0, 3.0, rank]) * n))
                .collect();
            let begin = |rank: usize, at: usize| {
                let sum = collectives[rank].sum(&all, at as u32, &values[at][rank], None);
                links.iter().for_each(|link| link.with(Messenger::progress).expect("a world"));
                sum.expect("begun")
            };
            let early: Vec<Summing> = (0..10).map(|at| begin(0, at)).collect();
            let late: Vec<Summing> = (0..10).rev().map(|at| begin(1, at)).collect();
            for _ in 0..10 {
                links.iter().for_each(|link| link.with(Messenger::progress).expect("a world"));
            }
            early.into_iter().chain(late).for_each(|sum| sum.wait().expect("a sum"));
            for (at, (n, values)) in (1..=10).zip(&values).enumerate() {
                let expected = Tensor::from_slice(&[101.0, 4.0, 6.0, 101.0]) * n;
                assert_eq!(*values, [expected.shallow_clone(), expected], "{at}, {tags} tags");
            }
        }
    }

    /// Another thread holds the lock while a tensor to be sent is copied.
    #[test]
    fn tensors_are_copied_to_the_host_without_the_lock() {
        let (links, [sender, _receiver], _) = two_ranks(64);
        let (arena, bytes) = (Arena::new("copies"), 1 << 20);
        let device = if tch::Cuda::is_available() { Device::Cuda(0) } else { Device::Cpu };
        // Not contiguous, so that it is copied on a CPU too.
        let tensor = Tensor::zeros([512, 256], (Kind::Double, device)).tr();
        let copies = || arena.peak() >= bytes;
        thread::scope(|scope| {
            let copied_meanwhile = links[0].with(|_| {
                scope.spawn(|| {
                    let _inside = arena.enter();
                    sender.outlet(1, 0, 1).send(message(tensor)).expect("sent");
                });
                let start = Instant::now();
                while !copies() && start.elapsed() < LONG / 6 {
                    thread::yield_now();
                }
                copies()
            });
            assert_eq!(copied_meanwhile, Ok(true), "the copy waits for the lock");
        });
    }

    /// The thread that makes progress on messages has entered a full arena.
    #[test]
    fn what_nobody_needs_is_not_charged_to_who_drops_it() {
        let (links, [sender, receiver], _) = two_ranks(64);
        drop(receiver);
        sender.outlet(1, 0, 1).send(message(number(1.0))).expect("sent");
        let arena = Arena::new("full");
        arena.fail_from_nth_allocation(1);
        let _inside = arena.enter();
        let broken = links[1].with(|engine| {
            engine.progress();
            engine.is_broken()
        });
        assert_eq!((broken, arena.refusals()), (Ok(false), 0));
    }

    #[test]
    fn what_comes_is_not_charged_to_who_moves_it_on() {
        let (links, [sender, receiver], _) = two_ranks(64);
        sender.outlet(1, 0, 1).send(message(number(1.0))).expect("sent");
        let inlet = receiver.inlet(0, 0, 1, None).expect("an inlet");
        let arena = Arena::new("full");
        arena.fail_from_nth_allocation(1);
        let inside = arena.enter();
        links[1].with(Messenger::progress).expect("a world");
        drop(inside);
        let came = inlet.take().expect("it comes");
        assert_eq!((only(&came), arena.refusals()), (&number(1.0), 0));
    }

    /// A sender whose heartbeat continues, but whose data never arrive.
    #[test]
    fn data_that_never_come_are_not_waited_for_for_ever() {
        let (links, [sender, receiver], observer) = two_ranks(64);
        observer.lose_numbers();
        links[1].with(|engine| engine.waits.longest = Duration::from_millis(1)).expect("set");
        sender.outlet(1, 0, 1).send(message(number(1.0))).expect("announced");
        let came = thread::scope(|scope| {
            let taking = scope.spawn(|| receiver.inlet(0, 0, 1, None).expect("an inlet").take());
            let start = Instant::now();
            while !taking.is_finished() && start.elapsed() < LONG / 6 {
                thread::yield_now();
            }
            // Ends the wait if it hangs nevertheless.
            receiver.stop();
            taking.join().expect("no panic")
        });
        let Err(Stopped::Error(crate::Error::World(error))) = came else {
            panic!("{came:?}");
        };
        assert!(matches!(error, WorldError::RankHangs { rank: 0, .. }), "{error}");
    }
}
