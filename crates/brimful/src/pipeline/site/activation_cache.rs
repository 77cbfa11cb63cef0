//! Caches activations that wait for a later action: on the device while it has free bytes, else on the
//! host.
//!
//! At a barrier, all micro-batches pass a stage before the first micro-batch passes the next stage, so waiting
//! activations grow with the mini-batch. The first step with a new micro-batch size keeps no activations on the
//! device; its peak shows what the computation itself needs. Later steps keep that much free and cache activations
//! in the rest. Inputs of the next stage have priority, because on the host they would have to come straight back.
//! Tensors that a backward needs come second, because they are needed much later.
//!
//! A tensor's device memory stays in use until its copy to the host is done, so computation waits for the copy.
//! Otherwise, the allocator of a full device would have to search for free memory. Memory may still run out,
//! because an allocator cannot join its free blocks. A step of a given size is then retried with all activations
//! offloaded, and later steps keep more memory free.

use std::collections::VecDeque;
use std::sync::Arc;

use brimful_torch::stream::Event;

use super::stage::Boundary;
use crate::Result;
use crate::batch::tensor_bytes;
use crate::memory::Memory;
use crate::pipeline::transfers::TransferClock;
use brimful_plan::bytes::Bytes;
use brimful_plan::schedule::Awaited;

/// Largest number of sixteenths of all memory that stay free for fragmentation. At 16, nothing is cached on
/// the device.
const ALL_APART: u64 = 16;

/// Transfers to the host in flight, the earliest first. Their memory cannot be used again before they
/// arrive, though the allocator counts it as free once the tensor is dropped.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    queue: VecDeque<(Arc<Event>, u64)>,
}

impl InFlight {
    /// Adds a transfer of this many bytes that is done at this event.
    pub(crate) fn add(&mut self, there: Arc<Event>, bytes: u64) -> Result<()> {
        self.forget_arrived()?;
        self.queue.push_back((there, bytes));
        Ok(())
    }

    /// Returns the bytes still in flight.
    fn bytes(&mut self) -> Result<u64> {
        self.forget_arrived()?;
        Ok(self.queue.iter().map(|(_, bytes)| bytes).sum())
    }

    fn forget_arrived(&mut self) -> Result<()> {
        while let Some((there, _)) = self.queue.front()
            && there.is_reached()?
        {
            self.queue.pop_front();
        }
        Ok(())
    }

    /// Waits for the earliest transfer; returns its bytes.
    fn wait(&mut self) -> Result<Option<u64>> {
        let Some((there, bytes)) = self.queue.pop_front() else { return Ok(None) };
        there.synchronize()?;
        Ok(Some(bytes))
    }
}

/// Activation cache in a device's memory.
#[derive(Debug)]
pub(crate) struct ActivationCache {
    memory: Memory,
    /// Whether to cache activations too, and recompute only when the device has too few free bytes.
    keeps_activations: bool,
    known: Option<WorkNeed>,
    /// Largest step that was cached completely.
    fitted: Option<StepExtent>,
    /// Sixteenths of all memory that stay free for fragmentation.
    apart: u64,
    /// Step under way.
    step: Option<CachedStep>,
    space: Space,
}

/// Size of a step, in samples.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepExtent {
    pub(crate) largest_micro_batch: u64,
    pub(crate) mini_batch: u64,
}

/// Memory that computation needs with micro-batches of at most this many samples.
#[derive(Debug, Clone, Copy)]
struct WorkNeed {
    samples: u64,
    bytes: u64,
    /// Largest input of a stage, in bytes.
    boundary: u64,
}

#[derive(Debug)]
struct CachedStep {
    trains: bool,
    extent: StepExtent,
    /// Bytes in use at the step's start.
    start: u64,
    /// Bytes that the step's computation needs, if known.
    work: Option<u64>,
    /// Upper bound on the bytes that all micro-batches bring to one stage.
    frontier: u64,
    /// Largest input of a stage so far, in bytes.
    boundary: u64,
    /// Whether the device may have cached something that the host could have held.
    uses_free_memory: bool,
    /// Whether everything fitted at every action so far.
    fits: bool,
}

/// Tensors that the cache has free bytes for, at the action under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Space {
    None,
    /// Tensors that travel from stage to stage.
    ForTransfers,
    /// Stages' inputs too, until their backward.
    ForInputs,
    /// Their activations too.
    ForAll,
}

impl ActivationCache {
    pub(crate) fn new(memory: Memory, keeps_activations: bool) -> Self {
        let apart = u64::from(matches!(memory, Memory::Accelerator(_)));
        let (known, fitted, step) = (None, None, None);
        Self { memory, keeps_activations, known, fitted, apart, step, space: Space::None }
    }

    /// Begins a step.
    pub(crate) fn begin(&mut self, trains: bool, extent: StepExtent) -> Result<()> {
        // A step that did not finish may have run out of memory because of the cached activations.
        if self.step.take().is_some() {
            (self.known, self.fitted) = (None, None);
        }
        let known = self.known.filter(|known| extent.largest_micro_batch <= known.samples);
        let usage = self.memory.usage()?;
        // The space stays fixed for the whole step if memory has no limit, if a step of at least this size has
        // fitted, or if nothing is known yet.
        self.space = match (usage.limit, self.fitted) {
            (None, _) => Space::ForAll,
            (_, Some(fitted)) if extent.is_within(fitted) => Space::ForAll,
            _ => Space::None,
        };
        let work = known.map(|known| known.bytes).filter(|_| self.space == Space::None);
        let uses_free_memory = usage.limit.is_some() && self.space == Space::ForAll;
        self.step = Some(CachedStep {
            trains,
            extent,
            start: usage.current.0,
            work,
            frontier: known.map_or(0, |known| known.boundary * extent.micro_batches()),
            boundary: 0,
            uses_free_memory,
            fits: work.is_some(),
        });
        Ok(())
    }

    /// Keeps more memory free after a step that ran out of memory, if the device had cached activations. Returns
    /// whether it had cached any: then a retry may succeed.
    pub(crate) fn free_memory(&mut self) -> bool {
        let used_free_memory = self.step.as_ref().is_some_and(|step| step.uses_free_memory);
        if used_free_memory {
            self.apart = (2 * self.apart).clamp(1, ALL_APART);
        }
        used_free_memory
    }

    /// Records the size of a stage's input.
    pub(crate) fn note(&mut self, entered: &Boundary) {
        if let Some(step) = &mut self.step {
            step.boundary = step.boundary.max(entered.all().map(tensor_bytes).sum());
        }
    }

    /// Measures the free bytes for the next action; waits for transfers in flight if the free bytes are too few
    /// for the next stage's inputs.
    pub(crate) fn look(
        &mut self,
        in_flight: &mut InFlight,
        clock: &mut TransferClock,
    ) -> Result<()> {
        let Some((step, work)) = self.step.as_mut().and_then(|step| step.work.map(|w| (step, w)))
        else {
            return Ok(());
        };
        let usage = self.memory.usage()?;
        let [available, limit] =
            [usage.available, usage.limit].map(|b| b.map_or(u64::MAX, |b| b.0));
        // Adds an eighth, because micro-batches differ, and a share for fragmentation.
        let left_free = work + work / 8 + limit / ALL_APART * self.apart;
        // If the device could never hold all micro-batches, free bytes for the computation are enough.
        let all = left_free.saturating_add(step.frontier);
        let wanted = if all <= available { all } else { left_free };
        let mut free = available.saturating_sub(in_flight.bytes()?);
        if free < wanted {
            clock.waiting(Awaited::Boundaries, || {
                while free < wanted
                    && let Some(gone) = in_flight.wait()?
                {
                    free += gone;
                }
                Ok(())
            })?;
        }
        self.space = match free.checked_sub(left_free) {
            None => Space::None,
            Some(spare) if spare < step.frontier => Space::ForTransfers,
            // Activations take at most what the whole computation takes.
            Some(spare) if spare < step.frontier + left_free => Space::ForInputs,
            Some(_) => Space::ForAll,
        };
        step.fits &= self.space == Space::ForAll;
        step.uses_free_memory |= self.space > Space::None;
        Ok(())
    }

    /// Returns whether activations are cached, so that stages skip recomputation.
    pub(crate) fn keeps_activations(&self) -> bool {
        self.keeps_activations && self.space == Space::ForAll
    }

    /// Returns whether stages' inputs stay on the device until their backward.
    pub(crate) fn keeps_inputs(&self) -> bool {
        self.space >= Space::ForInputs
    }

    /// Returns whether transfers between stages must wait on the host.
    pub(crate) fn is_full(&self) -> bool {
        self.space == Space::None
    }

    /// Ends the step with this peak; returns the bytes that the step needs at least.
    pub(crate) fn end(&mut self, peak: Bytes) -> Bytes {
        let Some(step) = self.step.take() else { return peak };
        let CachedStep { trains, extent, start, work, boundary, fits, .. } = step;
        if trains && fits {
            self.fitted = Some(extent);
        }
        if trains && work.is_none() && self.space == Space::None {
            let samples = extent.largest_micro_batch;
            self.known = Some(WorkNeed { samples, bytes: peak.0.saturating_sub(start), boundary });
        }
        match self.known {
            Some(known) => peak.min(Bytes(start + known.bytes)),
            None => peak,
        }
    }
}

impl StepExtent {
    fn micro_batches(self) -> u64 {
        self.mini_batch.div_ceil(self.largest_micro_batch.max(1))
    }

    fn is_within(self, other: Self) -> bool {
        self.largest_micro_batch <= other.largest_micro_batch && self.mini_batch <= other.mini_batch
    }
}
