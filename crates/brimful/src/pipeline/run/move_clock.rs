//! Times the transfers between host and device, and compute's waits for them; records nothing unless asked.

use tch::Device;

use crate::Result;
use crate::moment::Moment;
use crate::schedule::{Awaited, BusUse, Move, MoveKind, MoveSpan, WaitSpan};

/// Times of one worker's transfers, by the clock on a CPU and by events on the copy streams.
#[derive(Debug)]
pub(crate) struct MoveClock {
    device: Device,
    /// None unless the caller asked for the times.
    noted: Option<NotedMoves>,
}

#[derive(Debug, Default)]
struct NotedMoves {
    /// Transfers with their start, their end and their bytes.
    moves: Vec<(Move, Moment, Moment, u64)>,
    waits: Vec<(Awaited, Moment, Moment)>,
}

impl MoveClock {
    pub(crate) fn new(device: Device, is_asked: bool) -> Self {
        Self { device, noted: is_asked.then(NotedMoves::default) }
    }

    /// Queues copies on the stream that this thread has entered, and times them.
    pub(crate) fn moving<T>(
        &mut self,
        one: Move,
        copy: impl FnOnce() -> Result<T>,
        bytes: impl FnOnce(&T) -> u64,
    ) -> Result<T> {
        let device = self.device;
        self.moving_by(one, || Moment::now(device), copy, bytes)
    }

    /// Queues copies on another stream, and times them; `now` reads that stream's clock.
    pub(crate) fn moving_by<T>(
        &mut self,
        one: Move,
        now: impl Fn() -> Result<Moment>,
        copy: impl FnOnce() -> Result<T>,
        bytes: impl FnOnce(&T) -> u64,
    ) -> Result<T> {
        let Some(noted) = &mut self.noted else { return copy() };
        let start = now()?;
        let moved = copy()?;
        noted.moves.push((one, start, now()?, bytes(&moved)));
        Ok(moved)
    }

    /// Records that a device buffer is free when this thread's work so far is done.
    pub(crate) fn release(&mut self, one: Move) -> Result<()> {
        self.moving(one, || Ok(()), |()| 0)
    }

    /// Runs a wait of this thread's work on the device, and times it.
    pub(crate) fn waiting<T>(
        &mut self,
        awaited: Awaited,
        wait: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        // A CPU waits for every copy because it makes it. Only the optimizer has a thread of its own there.
        let is_apart = self.device != Device::Cpu || awaited == Awaited::Update;
        let Some(noted) = self.noted.as_mut().filter(|_| is_apart) else { return wait() };
        let start = Moment::now(self.device)?;
        let waited = wait()?;
        noted.waits.push((awaited, start, Moment::now(self.device)?));
        Ok(waited)
    }

    /// Returns the times in seconds since `origin`. Waits for the last copy.
    pub(crate) fn read(self, origin: &Moment) -> Result<BusUse> {
        let Some(NotedMoves { moves, waits }) = self.noted else { return Ok(BusUse::default()) };
        let move_span = |(moved, start, end, bytes): (Move, Moment, Moment, u64)| {
            let (start, end) = (start.seconds_since(origin)?, end.seconds_since(origin)?);
            Ok(MoveSpan { moved, start, end, bytes })
        };
        let wait_span = |(awaited, start, end): (Awaited, Moment, Moment)| {
            let (start, end) = (start.seconds_since(origin)?, end.seconds_since(origin)?);
            Ok(WaitSpan { awaited, start, end })
        };
        let moves = one_at_a_time(moves.into_iter().map(move_span).collect::<Result<_>>()?);
        let mut waits: Vec<WaitSpan> = waits.into_iter().map(wait_span).collect::<Result<_>>()?;
        if self.device == Device::Cpu {
            waits.extend(moves.iter().map(|&MoveSpan { moved, start, end, .. }| WaitSpan {
                awaited: Awaited::of(moved.kind),
                start,
                end,
            }));
        }
        waits.retain(|wait| wait.start < wait.end);
        waits.sort_by(|a, b| a.start.total_cmp(&b.start));
        Ok(BusUse { moves, waits })
    }
}

/// Sorts the transfers by their start. Weights and boundaries have streams of their own, but each direction
/// of the host link carries one copy at a time: a queued copy starts when the one before it ends.
fn one_at_a_time(mut moves: Vec<MoveSpan>) -> Vec<MoveSpan> {
    moves.sort_by(|a, b| a.end.total_cmp(&b.end));
    let mut free = [0.0_f64; 2];
    for span in moves.iter_mut().filter(|span| span.moved.kind != MoveKind::Release) {
        let free = &mut free[usize::from(span.moved.kind.is_inward())];
        span.start = span.start.max(*free);
        *free = span.end;
    }
    moves.sort_by(|a, b| a.start.total_cmp(&b.start));
    moves
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::StageId;

    #[test]
    fn a_way_of_the_bus_carries_one_copy_at_a_time() {
        let span = |kind, stage, start, end| {
            let moved = Move { kind, stage: StageId(stage), micro_batch: None, before: 0 };
            MoveSpan { moved, start, end, bytes: 1 }
        };
        let queued = vec![
            span(MoveKind::Fetch, 0, 0.0, 4.0),
            span(MoveKind::BoundaryIn, 1, 1.0, 2.0),
            span(MoveKind::OffloadGradients, 2, 1.0, 3.0),
            span(MoveKind::Release, 3, 1.5, 1.5),
        ];
        let told = one_at_a_time(queued);
        let told: Vec<_> = told.iter().map(|s| (s.moved.stage.0, s.start, s.end)).collect();
        assert_eq!(told, [(1, 1.0, 2.0), (2, 1.0, 3.0), (3, 1.5, 1.5), (0, 2.0, 4.0)]);
    }

    #[test]
    fn nothing_is_noted_where_nobody_asked() {
        let moved = Move { kind: MoveKind::Fetch, stage: StageId(0), micro_batch: None, before: 0 };
        let times = |is_asked| {
            let mut clock = MoveClock::new(Device::Cpu, is_asked);
            let now = || {
                assert!(is_asked, "the clock was read");
                Moment::now(Device::Cpu)
            };
            let origin = Moment::now(Device::Cpu).expect("a moment");
            clock.moving_by(moved, now, || Ok(()), |()| 1).expect("a copy");
            clock.release(moved).expect("a moment");
            clock.waiting(Awaited::Update, || Ok(())).expect("no wait");
            clock.read(&origin).expect("times")
        };
        assert_eq!(times(false), BusUse::default());
        assert_eq!(times(true).moves.len(), 2);
    }
}
