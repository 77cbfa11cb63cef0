//! A model of which some or all lives on the host: the flag, and what it comes to for a model and the
//! memory that there is.

use std::fmt;

use anyhow::{Result, ensure};
use brimful::balance::{self, Profile};
use brimful::pipeline::{BalanceBy, Builder, Homes, HostSpeed};
use brimful::plan::{PlanDevice, PlanRow, Request, plan};
use brimful::schedule::{Recompute, Schedule};
use brimful::{Bytes, Layers, Size, World, batch, memory};
use clap::ValueEnum;
use tch::{Device, Tensor};

use super::TrainOptions;
use crate::exit::wrong_use;
use crate::measured;
use crate::setting::{NormStatistics, parameters_used, room, typed};

/// Where weights, gradients and the optimizer's state live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum Offload {
    /// On the device as far as they fit there, else on the host; layers are measured for it
    Auto,
    /// On the device
    #[default]
    None,
    /// On the host; a stage's weights come to the device when it is their turn
    All,
}

impl fmt::Display for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value();
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}

/// A part of a device's memory that a plan leaves alone: what a layer needs while it computes is not in it.
const SPARE: f64 = 0.1;

/// How often micro-batches of an automatic size are halved to find homes.
const HALVINGS: u32 = 3;

/// Where the stages of a model are to live.
#[derive(Debug)]
pub(super) enum StageHomes {
    /// On their devices.
    Device,
    /// On the host.
    Host,
    /// As it was planned for the memory that there is.
    Planned { row: Box<PlanRow>, why: String },
}

/// Inputs to measure layers with.
#[derive(Debug)]
pub(super) struct MeasuredInputs {
    /// Those of a micro-batch; of an automatic size a guess.
    pub(super) micro_batch: Tensor,
    /// Samples in a mini-batch.
    pub(super) batch_size: usize,
}

impl StageHomes {
    /// What the options ask for, where the model is to be on so many devices of each rank.
    pub(super) fn settle(
        layers: &Layers,
        devices: usize,
        world: &World,
        options: &TrainOptions,
        inputs: impl FnOnce() -> Result<MeasuredInputs>,
    ) -> Result<Self> {
        match options.stages.offload {
            Offload::None => Ok(Self::Device),
            Offload::All => Ok(Self::Host),
            Offload::Auto => {
                let device = options.devices(world, 1)?[0];
                let Some(room) = room(device, options.memory_limit)? else {
                    return Ok(Self::Device);
                };
                if is_all_or_nothing(world, options) {
                    let fits = resident_bytes(layers, options)? <= room.0 * devices as u64;
                    return Ok(if fits { Self::Device } else { Self::Host });
                }
                HomePlan::new(layers, device, vec![room; devices], options, &inputs()?)?.settle()
            }
        }
    }
}

impl StageHomes {
    /// How a model on so many devices is cut for it.
    pub(super) fn cut(
        self,
        layers: &Layers,
        devices: usize,
        options: &TrainOptions,
        inputs: impl FnOnce() -> Result<MeasuredInputs>,
    ) -> Result<StageCut> {
        match self {
            Self::Device => StageCut::resident(layers, devices, options, &inputs()?),
            Self::Host => StageCut::at_home(layers, devices, options.stages.schedule),
            Self::Planned { row, .. } => Ok(StageCut::Planned(row)),
        }
    }
}

impl fmt::Display for StageHomes {
    /// Behind the words for where a model is.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device => Ok(()),
            Self::Host => f.write_str(", at home on the host"),
            Self::Planned { why, .. } => write!(f, ", {why}"),
        }
    }
}

/// Whether homes cannot be planned stage by stage: ranks would measure each their own; exact BatchNorms and
/// a given order make stages of their own; and of LoRA's layers few numbers are trained.
fn is_all_or_nothing(world: &World, options: &TrainOptions) -> bool {
    world.size() * options.ranks.replicas > 1
        || options.batch_norm == Some(NormStatistics::Exact)
        || options.stages.schedule.is_some()
        || options.fine_tune.lora.is_some()
}

/// Weights, their gradients, and what the optimizer keeps of each.
fn resident_bytes(layers: &Layers, options: &TrainOptions) -> Result<u64> {
    let weights = layers.parameter_count()? * options.dtype.kind().elt_size_in_bytes() as u64;
    let each = match options.fine_tune.lora {
        // What LoRA trains is small beside the weights.
        Some(_) => 1.0,
        None => 2.0 + options.recipe.method().state_factor(),
    };
    Ok((weights as f64 * each) as u64)
}

/// A question to the planner: what stays on the devices.
struct HomePlan<'a> {
    options: &'a TrainOptions,
    profile: Profile,
    device: Device,
    rooms: Vec<Bytes>,
    batch_size: usize,
    /// Micro-batches in a mini-batch.
    micro_batches: usize,
}

impl<'a> HomePlan<'a> {
    /// Measures the layers.
    fn new(
        layers: &Layers,
        device: Device,
        rooms: Vec<Bytes>,
        options: &'a TrainOptions,
        inputs: &MeasuredInputs,
    ) -> Result<Self> {
        let sample = typed(&inputs.micro_batch, options.dtype.kind());
        let profile = measured::profile(layers, device, &sample)?;
        let batch_size = inputs.batch_size;
        let micro_batches = batch_size.div_ceil(batch::len(&sample)?.max(1));
        Ok(Self { options, profile, device, rooms, batch_size, micro_batches })
    }

    fn settle(&self) -> Result<StageHomes> {
        let mut request = self.request();
        request.micro_batches = vec![match self.is_automatic() {
            // A size that adapts goes as far down as a sample.
            true => self.batch_size,
            false => self.micro_batches,
        }];
        let resident = plan(&request)?.rows.swap_remove(0);
        if resident.fits {
            return Ok(StageHomes::Device);
        }
        let kind = self.options.dtype.kind();
        let speed = HostSpeed::measure(self.device, self.options.recipe.method())?;
        request.bus = speed.bus;
        request.home_update = speed.update / kind.elt_size_in_bytes() as f64;
        request.host_memory = Some(memory::host()?.available.0);
        let halvings = if self.is_automatic() { HALVINGS } else { 0 };
        for micro_batches in (0..=halvings).map(|halving| self.micro_batches << halving) {
            request.micro_batches = vec![micro_batches.min(self.batch_size)];
            if let Some(row) = plan(&request)?.best() {
                let why = self.why(resident.largest_peak(), row);
                return Ok(StageHomes::Planned { row: Box::new(row.clone()), why });
            }
        }
        // The leanest there is; where not even that fits, the step says what it lacks.
        Ok(StageHomes::Host)
    }

    fn is_automatic(&self) -> bool {
        !matches!(self.options.size(), Size::Fixed(_) | Size::Count(_))
    }

    fn request(&self) -> Request<'_> {
        // A micro-batch's gradients of a layer are made beside the sums that they are added to.
        let gradients = self.profile.layers.iter().map(|layer| layer.parameter_bytes).max();
        let spared = |room: &Bytes| (room.0 as f64 * (1.0 - SPARE)) as u64;
        let memory = |room| Some(spared(room).saturating_sub(gradients.unwrap_or(0)));
        let device = |room| PlanDevice { memory: memory(room), ..PlanDevice::default() };
        let devices = self.rooms.iter().map(device).collect();
        Request {
            optimizer_bytes: self.options.recipe.method().state_factor(),
            schedules: vec![Schedule::OneFOneB],
            recompute: Some(self.options.stages.recompute.unwrap_or(Recompute::Never)),
            ..Request::new(&self.profile, devices, self.batch_size)
        }
    }

    /// One line: what stays, what lives on the host, and why.
    fn why(&self, needed: u64, row: &PlanRow) -> String {
        let (at_host, stages) = (row.at_host(), row.stages.len());
        let again = row.stages.iter().filter(|stage| stage.recompute != Recompute::Never).count();
        let room = self.rooms[0];
        format!(
            "{at_host} of {stages} stages at home on the host ({}), {again} computed again: all on the \
             device would take {} of its {room}",
            Bytes(row.host_bytes),
            Bytes(needed),
        )
    }
}

/// How a model is cut into stages, in which order they run, and where they live.
#[derive(Debug)]
pub(super) enum StageCut {
    Given { balance: BalanceBy, schedule: Schedule, homes: Homes },
    Planned(Box<PlanRow>),
}

impl StageCut {
    pub(super) fn described_to(self, builder: Builder) -> Builder {
        match self {
            Self::Given { balance, schedule, homes } => {
                builder.balance(balance).schedule(schedule).homes(homes)
            }
            Self::Planned(row) => builder.plan(&row),
        }
    }

    /// By the time that layers take for these inputs, all on their devices.
    fn resident(
        layers: &Layers,
        devices: usize,
        options: &TrainOptions,
        inputs: &MeasuredInputs,
    ) -> Result<Self> {
        let schedule = options.stages.schedule.unwrap_or(Schedule::OneFOneB);
        let count = devices * schedule.stages_per_device();
        check_stages(count, layers.len(), "")?;
        if count == 1 {
            // It has every layer, whatever they cost.
            let balance = [layers.len()].into();
            return Ok(Self::Given { balance, schedule, homes: Homes::Device });
        }
        let sample = typed(&inputs.micro_batch, options.dtype.kind());
        let balance = BalanceBy::by_time(&sample).optimizer(options.recipe.method());
        Ok(Self::Given { balance, schedule, homes: Homes::Device })
    }

    /// As fine as it can be, unless the schedule says how many stages there are: slots on the device are
    /// as large as the largest stage.
    fn at_home(layers: &Layers, devices: usize, schedule: Option<Schedule>) -> Result<Self> {
        let counts = parameters_used(layers)?;
        let finest = balance::finest(&counts, counts.len())?.sizes().len();
        let stages_per_device = match schedule {
            Some(schedule) => schedule.stages_per_device(),
            None => (finest / devices).max(1),
        };
        let stages = devices * stages_per_device;
        check_stages(stages, finest, " with parameters")?;
        Ok(Self::Given {
            balance: balance::finest(&counts, stages)?.into(),
            schedule: schedule.unwrap_or(Schedule::BreadthFirst { stages_per_device }),
            homes: Homes::Host,
        })
    }
}

/// Every stage needs a layer.
fn check_stages(stages: usize, layers: usize, of_a_kind: &str) -> Result<()> {
    ensure!(
        stages <= layers,
        wrong_use(format!(
            "{stages} stages need as many layers{of_a_kind}, but the model has {layers}: lower --stages"
        ))
    );
    Ok(())
}
