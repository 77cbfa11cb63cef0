//! Describes a pipeline, and checks all of it before anything is built.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tch::{Device, Kind};

use super::balance::{Balance, Question};
use super::company::Company;
use super::error::PipelineError;
use super::layout::Layout;
use super::ranks::Ranks;
use super::sized::PipelineSizes;
use super::worker::{Blueprint, Worker};
use super::{Pipeline, ties};
use crate::balance::BalanceError;
use crate::crew::{Crew, StageDevice, drawing, settled};
use crate::micro::NonFinite;
use crate::plan::{Choice, Row};
use crate::schedule::{Recompute, Schedule};
use crate::{Layers, Result, Size, World};

/// A pipeline that is not built yet.
#[derive(Debug)]
#[must_use]
pub struct Builder {
    layers: Layers,
    devices: Vec<StageDevice>,
    balance: Balance,
    size: Size,
    schedule: Schedule,
    recompute: Recompute,
    kind: Kind,
    non_finite: NonFinite,
    world: World,
    replicas: usize,
}

impl Builder {
    pub(super) fn new(layers: Layers) -> Self {
        Self {
            layers,
            devices: vec![StageDevice::cpu()],
            balance: Balance::default(),
            size: Size::Count(1),
            schedule: Schedule::OneFOneB,
            recompute: Recompute::Never,
            kind: Kind::Float,
            non_finite: NonFinite::default(),
            world: World::alone(),
            replicas: 1,
        }
    }

    /// The devices, in the order of the stages: one worker thread each. One that no stage needs is
    /// left out. The default is one CPU.
    pub fn devices<D: Into<StageDevice>>(self, devices: impl IntoIterator<Item = D>) -> Self {
        Self { devices: devices.into_iter().map(Into::into).collect(), ..self }
    }

    /// Spreads the stages over the ranks of a world: those of rank 0's devices come first. Every rank
    /// builds the same pipeline, names its own devices, and makes the same calls with the same
    /// mini-batches.
    pub fn world(self, world: &World) -> Self {
        Self { world: world.clone(), ..self }
    }

    /// Trains so many pipelines, each in as many ranks of the world as the others, and each with its
    /// part of every mini-batch. A number of micro-batches is then that of each pipeline. The default
    /// is one.
    pub fn replicas(self, replicas: usize) -> Self {
        Self { replicas, ..self }
    }

    /// How many layers each stage gets. By default, as many as the others.
    pub fn balance(self, balance: impl Into<Balance>) -> Self {
        Self { balance: balance.into(), ..self }
    }

    /// How a mini-batch is cut: into so many micro-batches, or by a [`Size`]. The default is one.
    pub fn micro_batches(self, size: impl Into<Size>) -> Self {
        Self { size: size.into(), ..self }
    }

    /// The order of the actions. The default is 1F1B.
    pub fn schedule(self, schedule: Schedule) -> Self {
        Self { schedule, ..self }
    }

    /// Which activations are computed again. The default is none.
    pub fn recompute(self, recompute: Recompute) -> Self {
        Self { recompute, ..self }
    }

    /// Balance, schedule, number of micro-batches and recompute of a planner's answer.
    pub fn plan(self, row: &Row) -> Self {
        let Choice { schedule, micro_batches, recompute } = row.choice;
        let balance = (&row.balance).into();
        Self { balance, schedule, size: Size::Count(micro_batches), recompute, ..self }
    }

    /// The number type of the parameters. The default is f32.
    pub fn kind(self, kind: Kind) -> Self {
        Self { kind, ..self }
    }

    /// What is refused because it is not finite: by default a loss.
    pub fn non_finite(self, policy: NonFinite) -> Self {
        Self { non_finite: policy, ..self }
    }

    /// Starts the devices' threads and builds each stage on its own.
    ///
    /// The parameters' first values are ruled by `tch::manual_seed`, and do not depend on the
    /// balance.
    ///
    /// # Errors
    /// When the layers, balance, devices, schedule and number of micro-batches do not go together,
    /// a device is not here, or a layer cannot be built.
    pub fn build(self) -> Result<Pipeline> {
        let brought = self.bring();
        let (devices, company) = Company::meet(&self.world, self.replicas, brought)?;
        let question = Question {
            layers: &self.layers,
            first: &devices[0],
            limits: &company.limits,
            schedule: self.schedule,
            recompute: self.recompute,
            micro_batches: self.usual_micro_batches(company.limits.len()),
        };
        let balance = company.settle_balance(&question, &self.balance)?;
        let workers = self.workers(balance.sizes().len(), company.limits.len())?;
        let mut ranks = Ranks::new(self.world.clone(), self.replicas, &company.devices, workers)?;
        let one = self.schedule.actions(workers, 1, Recompute::Never)?;
        let layout = Arc::new(Layout::new(self.layers, &balance, one.placement())?);
        let devices: Vec<_> = devices.into_iter().take(ranks.here().len()).collect();
        let staff = Staff { layout: &layout, devices: &devices, ranks: &ranks };
        let crew = drawing(&devices, |seed| staff.hire(seed, self.kind, self.non_finite))?;
        ranks.tie(&crew)?;
        ties::spread(&crew, &ranks)?;
        Ok(Pipeline {
            crew: Arc::new(Mutex::new(crew)),
            layout,
            ranks,
            devices,
            balance,
            schedule: self.schedule,
            recompute: self.recompute,
            non_finite: self.non_finite,
            size: self.size,
            actions: HashMap::new(),
            open: None,
            forwards: 0,
            sizes: PipelineSizes::default(),
        })
    }

    /// This rank's devices, and what all ranks must have in common.
    fn bring(&self) -> Result<(Vec<StageDevice>, String)> {
        self.check()?;
        let mut devices = settled(self.devices.clone())?;
        if self.size.cut(1)?.is_none() {
            devices = devices.into_iter().map(StageDevice::counted).collect();
        }
        let Self { schedule, recompute, kind, size, replicas, .. } = self;
        let layers = self.layers.names().collect::<Vec<_>>().join(", ");
        let common = format!(
            "{schedule} of {size:?}, recomputing {recompute}, in {kind:?}, {replicas} replicas, with \
             the layers {layers}"
        );
        Ok((devices, common))
    }

    fn check(&self) -> Result<()> {
        self.layers.check()?;
        if self.layers.is_empty() {
            return Err(PipelineError::NoLayers.into());
        }
        if self.devices.is_empty() {
            return Err(BalanceError::NoStages.into());
        }
        if !self.schedule.is_executed() {
            return Err(PipelineError::NotExecuted { schedule: self.schedule }.into());
        }
        // A size or count of 0 is refused before anything is built.
        self.size.cut(1).map(drop)
    }

    /// How many workers so many stages need.
    fn workers(&self, stages: usize, devices: usize) -> Result<usize> {
        let per_device = self.schedule.stages_per_device();
        if per_device == 0 || !stages.is_multiple_of(per_device) {
            return Err(PipelineError::UnevenStages { stages, per_device }.into());
        }
        if stages / per_device > devices {
            return Err(PipelineError::TooFewDevices { stages, per_device, devices }.into());
        }
        Ok(stages / per_device)
    }

    /// The number of micro-batches, where it does not depend on the mini-batch; else one a stage.
    fn usual_micro_batches(&self, devices: usize) -> usize {
        match self.size {
            Size::Count(count) => count,
            _ => devices * self.schedule.stages_per_device(),
        }
    }
}

/// What this rank's workers are made for.
struct Staff<'a> {
    layout: &'a Arc<Layout>,
    devices: &'a [StageDevice],
    ranks: &'a Ranks,
}

impl Staff<'_> {
    /// Starts the workers, and lets each build its stages.
    fn hire(&self, seed: u64, kind: Kind, non_finite: NonFinite) -> Result<Crew<Worker>> {
        let Self { layout, devices, ranks } = self;
        let (seed, _) = ranks.open("seed", &[], seed, false)?;
        let blueprint = |(number, (device, turn)): (usize, (&StageDevice, _))| Blueprint {
            layout: Arc::clone(layout),
            number,
            device: device.clone(),
            turn,
            kind,
            seed,
            non_finite,
        };
        let build = |blueprint: Blueprint| move || Worker::build(&blueprint);
        let own = ranks.here().zip(devices.iter().zip(turns(devices)));
        let hired = Crew::hire(devices, own.map(blueprint).map(build).collect());
        let told = hired.as_ref().map(drop).map_err(Clone::clone);
        ranks.world.settle("building the layers", told, Duration::ZERO)?;
        hired
    }
}

/// A lock for each accelerator that several workers share.
fn turns(devices: &[StageDevice]) -> Vec<Option<Arc<Mutex<()>>>> {
    let mut locks: HashMap<String, Arc<Mutex<()>>> = HashMap::new();
    let shared = |device: &StageDevice| {
        let others = devices.iter().filter(|other| other.device == device.device).count();
        (device.device != Device::Cpu && others > 1)
            .then(|| Arc::clone(locks.entry(crate::device::name(device.device)).or_default()))
    };
    devices.iter().map(shared).collect()
}
