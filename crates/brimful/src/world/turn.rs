//! One thing that ranks do together, with channels of its own; nothing of it outlasts it.

use std::sync::Arc;

use brimful_torch::stream::Event;
use tch::Tensor;

use super::link::{Link, Look};
use super::message::{Channel, Tensors};
use super::ring::Ring;
use crate::Result;
use crate::memory::Memory;

/// A turn. All ranks begin the same turns in the same order. Dropped, it is over: what is still on
/// its way is dropped too.
#[derive(Debug, Clone)]
pub(crate) struct Turn(Arc<Open>);

#[derive(Debug)]
struct Open {
    link: Arc<Link>,
    rank: usize,
    number: u64,
}

/// This rank's end of a channel to another.
#[derive(Debug)]
pub(crate) struct Outlet {
    turn: Turn,
    to: usize,
    channel: Channel,
    places: usize,
}

/// This rank's end of a channel from another.
#[derive(Debug)]
pub(crate) struct Inlet {
    turn: Turn,
    from: usize,
    channel: Channel,
}

/// A sum over ranks under way.
#[derive(Debug)]
pub(crate) struct Summing {
    turn: Turn,
    channel: Channel,
}

/// Why a parcel was not sent or taken.
#[derive(Debug)]
pub(crate) enum Stopped {
    /// The turn has failed on a rank.
    Turn,
    Error(crate::Error),
}

impl Turn {
    pub(super) fn begin(link: &Arc<Link>, rank: usize) -> Result<Self> {
        let number = link.with(|engine| engine.begin())?;
        Ok(Self(Arc::new(Open { link: Arc::clone(link), rank, number })))
    }

    fn channel(&self, number: u32) -> Channel {
        Channel { turn: self.0.number, number }
    }

    /// The way to another rank, on which at most so many parcels are under way.
    pub(crate) fn outlet(&self, to: usize, number: u32, places: usize) -> Outlet {
        Outlet { turn: self.clone(), to, channel: self.channel(number), places }
    }

    /// The way from another rank. What arrives is charged to the memory, or can be copied to it
    /// without making the host wait.
    pub(crate) fn inlet(
        &self,
        from: usize,
        number: u32,
        places: usize,
        memory: Option<Memory>,
    ) -> Result<Inlet> {
        let channel = self.channel(number);
        self.0.link.with(|engine| engine.inbox(from, channel).open(places, memory))?;
        Ok(Inlet { turn: self.clone(), from, channel })
    }

    /// Begins to sum a tensor over these ranks, which all name them in the same order. It is
    /// contiguous, in the host's memory, and the sum's from now on; its numbers are there when the
    /// event is reached.
    pub(crate) fn sum(
        &self,
        ranks: &Arc<[usize]>,
        number: u32,
        tensor: &Tensor,
        ready: Option<Event>,
    ) -> Result<Summing> {
        let (channel, flat) = (self.channel(number), tensor.f_detach()?.f_view([-1_i64])?);
        let ring = Ring::new(Arc::clone(ranks), self.0.rank, flat, ready)?;
        self.0.link.begin_sum(channel, ring);
        Ok(Summing { turn: self.clone(), channel })
    }

    /// Tells all ranks that it has failed here: whoever waits for something of it waits no more.
    pub(crate) fn stop(&self) {
        // Where there is no world any more, nobody waits.
        let _ = self.0.link.with(|engine| engine.stop(self.0.number));
    }

    /// Stops the turn unless it is told that all went well.
    pub(crate) fn stopping(&self) -> Stopping {
        Stopping(Some(self.clone()))
    }
}

/// Stops a turn when it is dropped, be it by a panic.
#[derive(Debug)]
pub(crate) struct Stopping(Option<Turn>);

impl Stopping {
    pub(crate) fn all_went_well(mut self) {
        self.0 = None;
    }
}

impl Drop for Stopping {
    fn drop(&mut self) {
        if let Some(turn) = &self.0 {
            turn.stop();
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let _ = self.link.with(|engine| engine.close(self.number));
    }
}

impl Outlet {
    /// Lets tensors set out, once there is a place.
    pub(crate) fn send(&self, tensors: Tensors) -> Result<(), Stopped> {
        self.send_when(tensors, None)
    }

    /// The same of tensors whose numbers are in the host's memory when the event is reached.
    pub(crate) fn send_when(&self, tensors: Tensors, ready: Option<Event>) -> Result<(), Stopped> {
        let Open { link, number, .. } = &*self.turn.0;
        let mut parcel = Some((tensors, ready));
        let sent = link.wait(|engine| {
            if engine.is_stopped(*number) {
                return Ok(Look::Found(false));
            }
            if engine.outstanding(self.to, self.channel) >= self.places {
                let own = engine.is_computing(self.to, self.channel);
                return Ok(Look::WaitFor((!own).then_some(self.to)));
            }
            let (tensors, ready) = parcel.take().unwrap_or_default();
            engine.send(self.to, self.channel, tensors, ready).map(|()| Look::Found(true))
        });
        stopped_unless(sent)
    }
}

impl Inlet {
    /// The next tensors.
    pub(crate) fn take(&self) -> Result<Tensors, Stopped> {
        let Open { link, number, .. } = &*self.turn.0;
        let taken = link.wait(|engine| {
            let inbox = engine.inbox(self.from, self.channel);
            let expecting = inbox.is_expecting();
            match inbox.take() {
                Some(tensors) => tensors.map(|tensors| Look::Found(Some(tensors))),
                None if engine.is_stopped(*number) => Ok(Look::Found(None)),
                None => Ok(Look::WaitFor((!expecting).then_some(self.from))),
            }
        });
        taken.map_err(Stopped::Error)?.ok_or(Stopped::Turn)
    }
}

impl Summing {
    /// Waits until the sum is in the tensor.
    pub(crate) fn wait(self) -> Result<(), Stopped> {
        let Open { link, number, .. } = &*self.turn.0;
        let done = link.wait(|engine| match engine.take_ring(self.channel) {
            Some(_) => Ok(Look::Found(true)),
            None if engine.is_stopped(*number) => Ok(Look::Found(false)),
            None => Ok(Look::WaitFor(engine.ring_waits_for(self.channel))),
        });
        stopped_unless(done)
    }
}

impl From<Stopped> for crate::Error {
    fn from(stopped: Stopped) -> Self {
        match stopped {
            Stopped::Turn => super::WorldError::Message("another rank has stopped".into()).into(),
            Stopped::Error(error) => error,
        }
    }
}

fn stopped_unless(done: Result<bool>) -> Result<(), Stopped> {
    match done {
        Ok(true) => Ok(()),
        Ok(false) => Err(Stopped::Turn),
        Err(error) => Err(Stopped::Error(error)),
    }
}
