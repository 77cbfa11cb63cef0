//! Where models are tried: two real steps, in arenas or on cards, and the memory that they took.

use std::time::Instant;

use anyhow::{Result, ensure};
use brimful::NonFinite;
use brimful::memory::{self, Memory};
use brimful::{Bytes, DeviceSpec, Loss, Pipeline};
use brimful_cli::exit;
use brimful_cli::setting::{accounts, loss};
use tch::{Device, Tensor};

use super::MemoryOptions;
use super::family::Family;
use super::search::FoundModel;

/// An arena's size on a CPU where nothing else is asked for.
const ARENA: Bytes = Bytes(80 << 20);

/// Where models are tried, and the memory that they are to fit.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    pub(super) device: Device,
    /// Of each device.
    pub(super) limit: Bytes,
    /// Of the host, for stages at home.
    pub(super) host: Bytes,
}

/// What two steps took, in bytes for each device.
#[derive(Debug)]
pub(super) struct StepMemory {
    /// Parameters, gradients, statistics and the optimizer's state: there between steps too.
    pub(super) resident: Vec<Bytes>,
    pub(super) peaks: Vec<Bytes>,
    /// Of the second step.
    pub(super) seconds: f64,
}

impl Room {
    /// On devices of the size that is asked for, of which there are as many as the most stages need.
    pub(super) fn new(options: &MemoryOptions, device: Device) -> Result<Self> {
        let limit = match (options.memory_limit, device) {
            (Some(memory), _) => memory,
            (None, Device::Cpu) => ARENA,
            (None, card) => Memory::of(card)?.usage()?.available.unwrap_or_default(),
        };
        let cards = memory::devices()?.iter().filter(|info| info.device != Device::Cpu).count();
        let most = options.stages.iter().copied().max().unwrap_or(1);
        ensure!(
            device == Device::Cpu || most <= cards,
            "{most} stages need a card each, but there are {cards}: give --stages fewer"
        );
        let host = match (options.host_memory, device) {
            (Some(memory), _) => memory,
            // Beside arenas as much as eight of them have.
            (None, Device::Cpu) => Bytes(8 * limit.0),
            _ => memory::host()?.available,
        };
        Ok(Self { device, limit, host })
    }

    /// How long the two steps will take, by plan: on a CPU all stages share its cores.
    pub(super) fn seconds(&self, found: &FoundModel) -> f64 {
        let stages = found.row.peak_bytes.len();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let parallel = if self.device == Device::Cpu { stages.min(cores) } else { stages };
        let busy = found.row.makespan * stages as f64 * (1.0 - found.row.bubble);
        2.0 * f64::max(busy / parallel as f64, found.row.makespan)
    }

    /// Takes the steps; nothing where memory runs out.
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
            // Hundreds of normalisations in a row diverge in a step, which costs no memory.
            .non_finite(NonFinite::Allow)
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
        // The first one makes the optimizer's state, which the second finds there.
        step()?;
        memories.iter().try_for_each(Memory::reset_peak)?;
        let start = Instant::now();
        let resident = step()?;
        let seconds = start.elapsed().as_secs_f64();
        Ok(StepMemory { resident, peaks: figures(&memories, |usage| usage.peak)?, seconds })
    }

    /// A memory of the wanted size for each device.
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
