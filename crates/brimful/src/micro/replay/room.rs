//! The memory that captured work runs in, which no tensor's account shows while it is replayed.

use brimful_torch::memory::{device_memory, empty_cache, reset_peak};
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::bytes::Bytes;

/// Where twice the need is free, the cache need not be emptied, which makes eager work ask the device
/// for its memory again.
const PLENTY_FACTOR: u64 = 2;

/// What captured work needs. Its parts are never replayed at the same time, so they share one pool.
#[derive(Debug, Default)]
pub(in crate::micro) struct CaptureRoom {
    /// The most that any of it has in use.
    needed: u64,
    /// The peak of a step that a capture interrupted.
    interrupted: u64,
}

/// A look at the device before a micro-batch that is to be captured.
#[derive(Debug)]
pub(super) struct Watch {
    device: Device,
    /// In use when it began.
    current: u64,
    /// The step's peak so far.
    before: u64,
}

impl Watch {
    pub(super) fn begin(device: Device) -> Result<Self> {
        let now = device_memory(device)?;
        reset_peak(device)?;
        Ok(Self { device, current: now.current, before: now.peak })
    }

    /// What the eager run needed, which the capture is expected to need again. From here on the
    /// capture is watched.
    pub(super) fn eager_need(&mut self) -> Result<u64> {
        let now = device_memory(self.device)?;
        self.before = self.before.max(now.peak);
        reset_peak(self.device)?;
        Ok(now.peak.saturating_sub(self.current))
    }
}

/// What is free for eager work, in the device and in the cache, beside captured work that keeps so much.
pub(super) fn free_beside(device: Device, kept: u64) -> Result<u64> {
    let now = device_memory(device)?;
    Ok(now.free + now.reserved.saturating_sub(now.current + kept))
}

/// Makes room for captured work of this need. What eager runs have left in the cache is of no use to
/// it, so where there is little else, that is given back. Gives what is free.
pub(super) fn make_room(device: Device, need: u64) -> Result<u64> {
    let free = device_memory(device)?.free;
    if free >= need.saturating_mul(PLENTY_FACTOR) {
        return Ok(free);
    }
    empty_cache(device)?;
    Ok(device_memory(device)?.free)
}

/// Takes so much from the device in one piece and leaves it in the cache of this thread's stream:
/// asking for it in hundreds of pieces would take longer than the work itself.
pub(super) fn stock_up(device: Device, bytes: u64) -> Result<()> {
    let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
    // In pieces it may be there all the same.
    drop(Tensor::f_empty([bytes], (Kind::Uint8, device)));
    Ok(reset_peak(device)?)
}

impl CaptureRoom {
    /// Counts what a capture has allocated, which is what its replays will use; of one that failed,
    /// nothing remains. What it keeps is among what is in use.
    pub(super) fn add(&mut self, watch: &Watch, succeeded: bool) -> Result<Bytes> {
        let now = device_memory(watch.device)?;
        let need = if succeeded { now.peak.saturating_sub(now.current) } else { 0 };
        self.needed = self.needed.max(need);
        self.interrupted = self.interrupted.max(watch.before).max(now.peak);
        // What was counted here is not to be counted again as the step's.
        reset_peak(watch.device)?;
        Ok(Bytes(need))
    }

    /// Counts an eager run during which captured work lay idle: the two did not need their memory at
    /// one time.
    pub(super) fn pause(&mut self, watch: &Watch) -> Result<()> {
        let peak = device_memory(watch.device)?.peak;
        self.interrupted = self.interrupted.max(watch.before + self.needed).max(peak);
        Ok(reset_peak(watch.device)?)
    }

    /// What remains of it in a step's peak when captured work is given up.
    pub(super) fn interrupted(&self, device: Device) -> Result<Self> {
        let peak = device_memory(device)?.peak + self.needed;
        Ok(Self { needed: 0, interrupted: self.interrupted.max(peak) })
    }

    /// The most memory in use since the last call, where `usage` is what was in use besides captured
    /// work.
    pub(in crate::micro) fn take_peak(&mut self, usage: Bytes) -> Bytes {
        Bytes(std::mem::take(&mut self.interrupted).max(usage.0 + self.needed))
    }
}
