//! Describes a pipeline, and checks all of it before anything is built.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tch::{Device, Kind, Tensor};

use super::crew::Crew;
use super::device::{StageDevice, settled};
use super::error::PipelineError;
use super::layout::Layout;
use super::step::drawing;
use super::worker::Blueprint;
use super::{Pipeline, saved};
use crate::balance::{self, BalanceError, Layer, Load, Profile, Slot};
use crate::batch::Batch;
use crate::memory::{Arena, Memory};
use crate::micro::NonFinite;
use crate::plan::{self, Request, Row};
use crate::schedule::{Recompute, Schedule, StageId};
use crate::{Layers, Result, Size};

/// How the layers are cut into stages: given, or found by measuring them.
///
/// `[3, 4]` is a balance, as is a `Vec` and a [`balance::Balance`].
#[derive(Debug)]
pub struct Balance(Choice);

#[derive(Debug)]
enum Choice {
    Even,
    Given(Vec<usize>),
    ByTime(Vec<Tensor>),
    ByBytes(Vec<Tensor>),
}

impl Balance {
    /// The slowest stage as fast as can be, within the devices' limits. The layers are measured on
    /// the first device with these samples, which are a micro-batch or like one.
    pub fn by_time(sample: &impl Batch) -> Self {
        Self(Choice::ByTime(leaves(sample)))
    }

    /// The fullest stage as empty as can be: parameters, their gradients, and the activations that
    /// the schedule holds. Measured as by [`Balance::by_time`].
    pub fn by_bytes(sample: &impl Batch) -> Self {
        Self(Choice::ByBytes(leaves(sample)))
    }
}

impl<const N: usize> From<[usize; N]> for Balance {
    fn from(sizes: [usize; N]) -> Self {
        Self(Choice::Given(sizes.into()))
    }
}

impl From<Vec<usize>> for Balance {
    fn from(sizes: Vec<usize>) -> Self {
        Self(Choice::Given(sizes))
    }
}

impl From<&balance::Balance> for Balance {
    fn from(balance: &balance::Balance) -> Self {
        Self(Choice::Given(balance.sizes().to_vec()))
    }
}

impl From<balance::Balance> for Balance {
    fn from(balance: balance::Balance) -> Self {
        (&balance).into()
    }
}

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
}

impl Builder {
    pub(super) fn new(layers: Layers) -> Self {
        Self {
            layers,
            devices: vec![StageDevice::cpu()],
            balance: Balance(Choice::Even),
            size: Size::Count(1),
            schedule: Schedule::OneFOneB,
            recompute: Recompute::Never,
            kind: Kind::Float,
            non_finite: NonFinite::default(),
        }
    }

    /// The devices, in the order of the stages: one worker thread each. One that no stage needs is
    /// left out. The default is one CPU.
    pub fn devices<D: Into<StageDevice>>(self, devices: impl IntoIterator<Item = D>) -> Self {
        Self { devices: devices.into_iter().map(Into::into).collect(), ..self }
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
        let plan::Choice { schedule, micro_batches, recompute } = row.choice;
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
        self.check()?;
        let devices = settled(self.devices.clone())?;
        let balance = self.settled_balance(&devices)?;
        let workers = self.workers(balance.sizes().len(), devices.len())?;
        let one = self.schedule.actions(workers, 1, Recompute::Never)?;
        let layout = Arc::new(Layout::new(self.layers, &balance, one.placement())?);
        let devices: Vec<_> = devices.into_iter().take(workers).collect();
        let turns = turns(&devices);
        let blueprint = |number: usize, seed| Blueprint {
            layout: Arc::clone(&layout),
            number,
            device: devices[number].clone(),
            turn: turns[number].clone(),
            kind: self.kind,
            seed,
            non_finite: self.non_finite,
        };
        let hire = |seed| Crew::hire((0..workers).map(|number| blueprint(number, seed)).collect());
        let crew = drawing(&devices, hire)?;
        saved::spread(&crew)?;
        Ok(Pipeline {
            crew: Arc::new(Mutex::new(crew)),
            layout,
            devices,
            balance,
            schedule: self.schedule,
            recompute: self.recompute,
            size: self.size,
            actions: HashMap::new(),
            open: None,
            forwards: 0,
        })
    }

    fn check(&self) -> Result<()> {
        self.layers.check()?;
        if self.layers.is_empty() {
            return Err(PipelineError::NoLayers.into());
        }
        if self.devices.is_empty() {
            return Err(BalanceError::NoStages.into());
        }
        match self.schedule {
            Schedule::GPipe | Schedule::OneFOneB | Schedule::Interleaved { .. } => {}
            schedule => return Err(PipelineError::NotExecuted { schedule }.into()),
        }
        // A size or count of 0 is refused before anything is built.
        super::ranges(self.size, 1).map(drop)
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

    fn settled_balance(&self, devices: &[StageDevice]) -> Result<balance::Balance> {
        let layers = self.layers.len();
        let stages = devices.len() * self.schedule.stages_per_device();
        Ok(match &self.balance.0 {
            Choice::Given(sizes) => balance::Balance::new(sizes.clone(), layers)?,
            Choice::Even => {
                let load = Load { time: 1.0, ..Load::default() };
                balance::by_time(&vec![load; layers], &vec![Slot::default(); stages])?
            }
            Choice::ByTime(sample) => self.by_time(sample, devices)?,
            Choice::ByBytes(sample) => self.by_bytes(sample, devices)?,
        })
    }

    /// The planner's balance for this schedule, with the sample as a micro-batch.
    fn by_time(&self, sample: &Vec<Tensor>, devices: &[StageDevice]) -> Result<balance::Balance> {
        let profile = self.profile(sample, devices)?;
        let m = self.usual_micro_batches();
        let device = |device: &StageDevice| plan::Device { memory: limit(device), speed: 1.0 };
        let samples = crate::batch::len(sample)? * m;
        let mut request = Request::new(&profile, devices.iter().map(device).collect(), samples);
        request.schedules = vec![self.schedule];
        request.micro_batches = vec![m];
        request.recompute = vec![self.recompute];
        let mut plan = plan::plan(&request)?;
        Ok(plan.rows.swap_remove(0).balance)
    }

    fn by_bytes(&self, sample: &Vec<Tensor>, devices: &[StageDevice]) -> Result<balance::Balance> {
        let profile = self.profile(sample, devices)?;
        let samples = crate::batch::len(sample)? as u64;
        let load = |layer: &Layer| Load {
            time: 0.0,
            bytes: layer.parameter_bytes * 2,
            activation_bytes: layer.activation_bytes * samples,
            output_bytes: layer.output_bytes * samples,
        };
        let m = self.usual_micro_batches();
        let actions = self.schedule.actions(devices.len(), m, self.recompute)?;
        let slot = |(j, device): (usize, &crate::schedule::DeviceId)| Slot {
            speed: 1.0,
            memory: limit(&devices[device.index()]),
            held: actions.held(StageId::at(j)) as u64,
        };
        let loads: Vec<_> = profile.layers.iter().map(load).collect();
        let slots: Vec<_> = actions.placement().iter().enumerate().map(slot).collect();
        Ok(balance::by_bytes(&loads, &slots)?)
    }

    /// What the layers cost on the first device.
    fn profile(&self, sample: &Vec<Tensor>, devices: &[StageDevice]) -> Result<Profile> {
        let first = &devices[0];
        let _threads = first.threads.map(brimful_torch::threads::limit_threads);
        Profile::measure(&self.layers, first.device, sample)
    }

    /// The number of micro-batches, where it does not depend on the mini-batch; else one a stage.
    fn usual_micro_batches(&self) -> usize {
        match self.size {
            Size::Count(count) => count,
            _ => self.devices.len() * self.schedule.stages_per_device(),
        }
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

fn leaves(sample: &impl Batch) -> Vec<Tensor> {
    let mut leaves = Vec::new();
    sample.visit(&mut |leaf| leaves.push(leaf.tensor().shallow_clone()));
    leaves
}

/// Where the device's memory ends, if that is known.
fn limit(device: &StageDevice) -> Option<u64> {
    match device.memory() {
        Some(Memory::Arena(arena)) => Arena::limit(&arena),
        Some(accelerator) => accelerator.usage().ok()?.available.map(|bytes| bytes.0),
        None => None,
    }
}
