//! Trial of a model: two real steps, in arenas or on GPUs, and their memory.

use std::time::Instant;

use anyhow::{Result, ensure};
use brimful::NonFinitePolicy;
use brimful::internal::devices;
use brimful::memory::{self, Memory};
use brimful::{Bytes, DeviceSpec, Loss, Pipeline};
use brimful_cli::exit;
use brimful_cli::setting::{accounts, loss};
use tch::{Device, Tensor};

use super::MemoryOptions;
use super::family::Family;
use super::search::FoundModel;

/// Default size of an arena on a CPU.
const ARENA: Bytes = Bytes(80 << 20);

/// Device kind and memory limits of trials.
#[derive(Debug, Clone, Copy)]
pub(super) struct MemoryCapacity {
    pub(super) device: Device,
    /// Memory of each device.
    pub(super) limit: Bytes,
    /// Host memory, for offloaded stages.
    pub(super) host: Bytes,
}

/// Memory of two steps, in bytes for each device.
#[derive(Debug)]
pub(super) struct StepMemory {
    /// Parameters, gradients, statistics and the optimizer's state, which stay between steps.
    pub(super) resident: Vec<Bytes>,
    pub(super) peaks: Vec<Bytes>,
    /// Seconds of the second step.
    pub(super) seconds: f64,
}

impl MemoryCapacity {
    /// Determines the limits, requested or default, and checks that there are enough GPUs.
    pub(super) fn new(options: &MemoryOptions, device: Device) -> Result<Self> {
        let limit = match (options.memory_limit, device) {
            (Some(memory), _) => memory,
            (None, Device::Cpu) => ARENA,
            (None, gpu) => Memory::of(gpu)?.usage()?.available.unwrap_or_default(),
        };
        let gpus = devices()?.iter().filter(|info| info.device != Device::Cpu).count();
        let most = options.stages.iter().copied().max().unwrap_or(1);
        ensure!(
            device == Device::Cpu || most <= gpus,
            "{most} stages need a GPU each, but there are {gpus}: give --stages fewer"
        );
        let host = match (options.host_memory, device) {
            (Some(memory), _) => memory,
            // Eight times an arena.
            (None, Device::Cpu) => Bytes(8 * limit.0),
            _ => memory::host_available()?,
        };
        Ok(Self { device, limit, host })
    }

    /// Returns the planned seconds of the two steps: on a CPU all stages share its cores.
    pub(super) fn seconds(&self, found: &FoundModel) -> f64 {
        let stages = found.row.peak_bytes.len();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let parallel = if self.device == Device::Cpu { stages.min(cores) } else { stages };
        let busy = found.row.makespan * stages as f64 * (1.0 - found.row.bubble);
        2.0 * f64::max(busy / parallel as f64, found.row.makespan)
    }

    /// Runs the steps; returns none if memory runs out.
    pub(super) fn run(&self, found: &FoundModel, family: Family) -> Result<Option<StepMemory>> {
        match self.steps(found, family) {
            Err(error) if exit::ran_out(&error) => Ok(None),
            other => other.map(Some),
        }
    }

    fn steps(&self, found: &FoundModel, family: Family) -> Result<StepMemory> {
        let work = &found.work;
        let memories = self.memories(found.row.peak_bytes.len())?;
        let mut pipeline = Pipeline::builder(work.layers()?)
            .devices(memories.iter().cloned().map(DeviceSpec::from))
            .plan(&found.row)
            // Hundreds of normalisations in a row diverge within a step; this does not change its memory.
            .non_finite(NonFinitePolicy::Allow)
            .build()?;
        let mut optimizer = pipeline.optimizer(family.method())?;
        let (x, y) = work.samples(work.batch);
        let mut step = || -> Result<Vec<Bytes>> {
            pipeline.backward(&x, &y, |out: Tensor, y| Loss::mean(loss(&out, y)))?;
            optimizer.step()?;
            let resident = figures(&memories, |usage| usage.current)?;
            optimizer.zero_grad()?;
            Ok(resident)
        };
        // The first step creates the optimizer's state, which the second step includes.
        step()?;
        memories.iter().try_for_each(Memory::reset_peak)?;
        let start = Instant::now();
        let resident = step()?;
        let seconds = start.elapsed().as_secs_f64();
        Ok(StepMemory { resident, peaks: figures(&memories, |usage| usage.peak)?, seconds })
    }

    /// Returns the memory of each device, limited to the capacity.
    fn memories(&self, devices: usize) -> Result<Vec<Memory>> {
        let device = |number| match self.device {
            Device::Cpu => Device::Cpu,
            _ => Device::Cuda(number),
        };
        accounts(&(0..devices).map(device).collect::<Vec<_>>(), Some(self.limit))
    }
}

fn figures(memories: &[Memory], of: impl Fn(memory::Usage) -> Bytes) -> Result<Vec<Bytes>> {
    memories.iter().map(|memory| Ok(of(memory.usage()?))).collect()
}
