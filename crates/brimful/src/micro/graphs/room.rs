//! Memory of CUDA graphs. The allocator's counters do not show it during a replay, because a replay allocates no
//! tensor.

use brimful_torch::memory::{device_memory, empty_cache, reset_peak};
use tch::{Device, Kind, Tensor};

use crate::Result;
use brimful_plan::bytes::Bytes;

/// If this multiple of the need is free, the cache is kept: after emptying it, eager work would have to allocate
/// from the device again.
const PLENTY_FACTOR: u64 = 2;

/// Needs of CUDA graphs. They never replay at the same time, so they share one pool.
#[derive(Debug, Default)]
pub(in crate::micro) struct CaptureRoom {
    /// Largest need of any graph.
    needed: u64,
    /// Peak memory of a step before a capture interrupted its account.
    interrupted: u64,
}

/// Reading of the device's memory before a micro-batch is captured.
#[derive(Debug)]
pub(super) struct Watch {
    device: Device,
    /// Bytes in use at the start.
    current: u64,
    /// Peak memory of the step so far.
    before: u64,
}

impl Watch {
    pub(super) fn begin(device: Device) -> Result<Self> {
        let now = device_memory(device)?;
        reset_peak(device)?;
        Ok(Self { device, current: now.current, before: now.peak })
    }

    /// Returns the need of the eager run, which is the expected need of the capture. The measurement of the
    /// capture begins here.
    pub(super) fn eager_need(&mut self) -> Result<u64> {
        let now = device_memory(self.device)?;
        self.before = self.before.max(now.peak);
        reset_peak(self.device)?;
        Ok(now.peak.saturating_sub(self.current))
    }
}

/// Returns the bytes that are free for eager work, on the device and in the cache, beside graphs that keep `kept`
/// bytes.
pub(super) fn free_beside(device: Device, kept: u64) -> Result<u64> {
    let now = device_memory(device)?;
    Ok(now.free + now.reserved.saturating_sub(now.current + kept))
}

/// Makes room for a graph of this need. A graph cannot use the cache of eager runs, so the cache is emptied unless
/// enough memory is free outside the cache. Returns the free bytes.
pub(super) fn free_memory(device: Device, need: u64) -> Result<u64> {
    let free = device_memory(device)?.free;
    if free >= need.saturating_mul(PLENTY_FACTOR) {
        return Ok(free);
    }
    empty_cache(device)?;
    Ok(device_memory(device)?.free)
}

/// Allocates this much from the device in one piece and leaves it in the cache of this thread's stream:
/// allocating it in hundreds of pieces would take longer than the work itself.
pub(super) fn stock_up(device: Device, bytes: u64) -> Result<()> {
    let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
    // A failure is ignored, because the memory may still be free in smaller pieces.
    drop(Tensor::f_empty([bytes], (Kind::Uint8, device)));
    Ok(reset_peak(device)?)
}

impl CaptureRoom {
    /// Counts the bytes that a capture has allocated, which its replays will use. A failed capture has freed them.
    /// Bytes that stay allocated after the capture are not counted, because they are in use already. Returns the
    /// need of a replay.
    pub(super) fn add(&mut self, watch: &Watch, succeeded: bool) -> Result<Bytes> {
        let now = device_memory(watch.device)?;
        let need = if succeeded { now.peak.saturating_sub(now.current) } else { 0 };
        self.needed = self.needed.max(need);
        self.interrupted = self.interrupted.max(watch.before).max(now.peak);
        // Counted here, so the step must not count it again.
        reset_peak(watch.device)?;
        Ok(Bytes(need))
    }

    /// Counts an eager run by itself: no graph ran at the same time, so the memory of the run and of a graph do
    /// not add up.
    pub(super) fn pause(&mut self, watch: &Watch) -> Result<()> {
        let peak = device_memory(watch.device)?.peak;
        self.interrupted = self.interrupted.max(watch.before + self.needed).max(peak);
        Ok(reset_peak(watch.device)?)
    }

    /// Returns the account of a step whose graphs are about to be dropped. The account keeps the graphs' part of
    /// the step's peak.
    pub(super) fn interrupted(&self, device: Device) -> Result<Self> {
        let peak = device_memory(device)?.peak + self.needed;
        Ok(Self { needed: 0, interrupted: self.interrupted.max(peak) })
    }

    /// Returns the peak memory since the last call; `usage` is the peak besides CUDA graphs.
    pub(in crate::micro) fn take_peak(&mut self, usage: Bytes) -> Bytes {
        Bytes(std::mem::take(&mut self.interrupted).max(usage.0 + self.needed))
    }
}
