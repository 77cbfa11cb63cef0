//! Times the transfers between host and device, and compute's waits for them; records nothing unless asked.

use tch::Device;

use crate::Result;
use crate::streams::TimedEvent;
use brimful_plan::schedule::{
    Awaited, HostLinkUse, Transfer, TransferKind, TransferSpan, WaitSpan,
};

/// Times of one worker's transfers, by the clock on a CPU and by events on the copy streams.
#[derive(Debug)]
pub(crate) struct TransferClock {
    device: Device,
    /// None unless the caller asked for the times.
    noted: Option<RecordedTransfers>,
}

#[derive(Debug, Default)]
struct RecordedTransfers {
    /// Transfers with their start, their end and their bytes.
    transfers: Vec<(Transfer, TimedEvent, TimedEvent, u64)>,
    waits: Vec<(Awaited, TimedEvent, TimedEvent)>,
}

impl TransferClock {
    pub(crate) fn new(device: Device, is_asked: bool) -> Self {
        Self { device, noted: is_asked.then(RecordedTransfers::default) }
    }

    /// Queues copies on the stream that this thread has entered, and times them.
    pub(crate) fn transfer<T>(
        &mut self,
        one: Transfer,
        copy: impl FnOnce() -> Result<T>,
        bytes: impl FnOnce(&T) -> u64,
    ) -> Result<T> {
        let device = self.device;
        self.transfer_by(one, || TimedEvent::now(device), copy, bytes)
    }

    /// Queues copies on another stream, and times them; `now` reads that stream's clock.
    pub(crate) fn transfer_by<T>(
        &mut self,
        one: Transfer,
        now: impl Fn() -> Result<TimedEvent>,
        copy: impl FnOnce() -> Result<T>,
        bytes: impl FnOnce(&T) -> u64,
    ) -> Result<T> {
        let Some(noted) = &mut self.noted else { return copy() };
        let start = now()?;
        let transfer = copy()?;
        noted.transfers.push((one, start, now()?, bytes(&transfer)));
        Ok(transfer)
    }

    /// Records that a device buffer is free when this thread's work so far is done.
    pub(crate) fn release(&mut self, one: Transfer) -> Result<()> {
        self.transfer(one, || Ok(()), |()| 0)
    }

    /// Runs `wait`, which makes this thread's work on the device wait, and times the wait.
    pub(crate) fn waiting<T>(
        &mut self,
        awaited: Awaited,
        wait: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        // A CPU makes every copy itself, so `read` reports the copies as waits.
        let is_apart = self.device != Device::Cpu;
        let Some(noted) = self.noted.as_mut().filter(|_| is_apart) else { return wait() };
        let start = TimedEvent::now(self.device)?;
        let waited = wait()?;
        noted.waits.push((awaited, start, TimedEvent::now(self.device)?));
        Ok(waited)
    }

    /// Returns the times in seconds since `origin`. Waits for the last copy.
    pub(crate) fn read(self, origin: &TimedEvent) -> Result<HostLinkUse> {
        let Some(RecordedTransfers { transfers, waits }) = self.noted else {
            return Ok(HostLinkUse::default());
        };
        let transfer_span =
            |(transfer, start, end, bytes): (Transfer, TimedEvent, TimedEvent, u64)| {
                let (start, end) = (start.seconds_since(origin)?, end.seconds_since(origin)?);
                Ok(TransferSpan { transfer, start, end, bytes })
            };
        let wait_span = |(awaited, start, end): (Awaited, TimedEvent, TimedEvent)| {
            let (start, end) = (start.seconds_since(origin)?, end.seconds_since(origin)?);
            Ok(WaitSpan { awaited, start, end })
        };
        let transfers =
            one_at_a_time(transfers.into_iter().map(transfer_span).collect::<Result<_>>()?);
        let mut waits: Vec<WaitSpan> = waits.into_iter().map(wait_span).collect::<Result<_>>()?;
        if self.device == Device::Cpu {
            waits.extend(transfers.iter().map(|&TransferSpan { transfer, start, end, .. }| {
                WaitSpan { awaited: Awaited::of(transfer.kind), start, end }
            }));
        }
        waits.retain(|wait| wait.start < wait.end);
        waits.sort_by(|a, b| a.start.total_cmp(&b.start));
        Ok(HostLinkUse { transfers, waits })
    }
}

/// Corrects the transfers' starts, and sorts by them. Weights and boundaries have streams of their own, but each
/// direction of the host link carries one copy at a time: a queued copy starts when the previous copy ends.
fn one_at_a_time(mut transfers: Vec<TransferSpan>) -> Vec<TransferSpan> {
    transfers.sort_by(|a, b| a.end.total_cmp(&b.end));
    let mut free = [0.0_f64; 2];
    for span in transfers.iter_mut().filter(|span| span.transfer.kind != TransferKind::Release) {
        let free = &mut free[usize::from(span.transfer.kind.is_inward())];
        span.start = span.start.max(*free);
        *free = span.end;
    }
    transfers.sort_by(|a, b| a.start.total_cmp(&b.start));
    transfers
}

#[cfg(test)]
mod tests {
    use super::*;
    use brimful_plan::schedule::StageId;

    #[test]
    fn a_direction_of_the_host_link_carries_one_copy_at_a_time() {
        let span = |kind, stage, start, end| {
            let transfer = Transfer { kind, stage: StageId(stage), micro_batch: None, before: 0 };
            TransferSpan { transfer, start, end, bytes: 1 }
        };
        let queued = vec![
            span(TransferKind::Fetch, 0, 0.0, 4.0),
            span(TransferKind::BoundaryIn, 1, 1.0, 2.0),
            span(TransferKind::OffloadGradients, 2, 1.0, 3.0),
            span(TransferKind::Release, 3, 1.5, 1.5),
        ];
        let reported = one_at_a_time(queued);
        let reported: Vec<_> =
            reported.iter().map(|s| (s.transfer.stage.0, s.start, s.end)).collect();
        assert_eq!(reported, [(1, 1.0, 2.0), (2, 1.0, 3.0), (3, 1.5, 1.5), (0, 2.0, 4.0)]);
    }

    #[test]
    fn nothing_is_noted_where_nobody_asked() {
        let transfer =
            Transfer { kind: TransferKind::Fetch, stage: StageId(0), micro_batch: None, before: 0 };
        let times = |is_asked| {
            let mut clock = TransferClock::new(Device::Cpu, is_asked);
            let now = || {
                assert!(is_asked, "the clock was read");
                TimedEvent::now(Device::Cpu)
            };
            let origin = TimedEvent::now(Device::Cpu).expect("a moment");
            clock.transfer_by(transfer, now, || Ok(()), |()| 1).expect("a copy");
            clock.release(transfer).expect("a moment");
            clock.waiting(Awaited::Update, || Ok(())).expect("no wait");
            clock.read(&origin).expect("times")
        };
        assert_eq!(times(false), HostLinkUse::default());
        assert_eq!(times(true).transfers.len(), 2);
    }
}
