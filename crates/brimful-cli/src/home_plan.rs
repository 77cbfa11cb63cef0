//! Where the stages of a model are to live, planned from its measured layers and the memory that there is.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use anyhow::Result;
use brimful::balance::Profile;
use brimful::optim::Method;
use brimful::pipeline::HostSpeed;
use brimful::plan::{PlanDevice, PlanRow, Request, plan};
use brimful::schedule::{Recompute, Schedule};
use brimful::{Bytes, Layers, batch, gradient_factor, memory, sums_apart};
use tch::{Device, Kind, Tensor};

use crate::measured;
use crate::setting::typed;

/// A part of a device's memory that a plan leaves alone: what an allocator rounds up and cannot join.
const SPARE: f64 = 0.05;

/// The name that the loss is measured under, after the layers.
const LOSS: &str = "loss of the outputs";

/// How often micro-batches of an automatic size are halved to find homes.
const HALVINGS: u32 = 3;

/// Where the stages of a model are to live.
#[derive(Debug)]
pub enum StageHomes {
    /// On their devices.
    Device,
    /// On the host.
    Host,
    /// As it was planned for the memory that there is.
    Planned { row: Box<PlanRow>, why: String },
}

/// What a plan of homes goes by, beside the layers.
#[derive(Debug, Clone)]
pub struct HomeQuestion {
    pub device: Device,
    /// What the model may take of each device.
    pub rooms: Vec<Bytes>,
    /// The number type of the parameters.
    pub kind: Kind,
    pub method: Method,
    /// The loss of outputs and targets.
    pub loss: fn(&Tensor, &Tensor) -> Tensor,
    /// Samples in a mini-batch.
    pub batch_size: usize,
    /// The share of the parameters that is trained, and has gradients and an optimizer's state.
    pub trained: f64,
    /// How many numbers are kept of each parameter beside the optimizer's state, in the type of the sums: averages
    /// of weights, and gradients of mini-batches that make a step together.
    pub kept_beside: usize,
    /// Whether gradients stay what they are as they come home, and are a step's, so that updates can be computed ahead.
    pub looks_ahead: bool,
    /// Whether micro-batches get smaller where they do not fit.
    pub adapts: bool,
    /// How the model is run where all of it stays on its devices.
    pub schedule: Schedule,
    pub recompute: Recompute,
}

impl StageHomes {
    /// Measures the layers with this micro-batch's inputs and targets, and plans: what fits stays on its device.
    pub fn plan(
        layers: &Layers,
        (inputs, targets): (&Tensor, &Tensor),
        question: HomeQuestion,
    ) -> Result<Self> {
        let inputs = typed(inputs, question.kind);
        let profile = measured_with_loss(layers, (&inputs, targets), &question)?;
        let micro_batches = question.batch_size.div_ceil(batch::len(&inputs)?.max(1));
        HomePlan { question, profile, micro_batches }.settle()
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

/// The layers, measured with this micro-batch; the loss is a part of the last.
fn measured_with_loss(
    layers: &Layers,
    (inputs, targets): (&Tensor, &Tensor),
    question: &HomeQuestion,
) -> Result<Profile> {
    let (loss, targets) = (question.loss, Mutex::new(targets.to_device(question.device)));
    let layers = layers.clone().add_fn(LOSS, move |outputs| {
        let targets = targets.lock().unwrap_or_else(PoisonError::into_inner);
        // Layers are measured with a part of the micro-batch too.
        loss(outputs, &targets.narrow(0, 0, outputs.size()[0]))
    });
    let mut profile = measured::profile(&layers, question.device, inputs, question.kind)?;
    let loss = profile.layers.pop();
    if let Some((last, loss)) = profile.layers.pop().zip(loss) {
        profile.layers.push(last.with_loss(&loss));
    }
    Ok(profile)
}

/// A question to the planner: what stays on the devices.
struct HomePlan {
    question: HomeQuestion,
    profile: Profile,
    /// Micro-batches in a mini-batch.
    micro_batches: usize,
}

impl HomePlan {
    fn settle(&self) -> Result<StageHomes> {
        let HomeQuestion { device, kind, method, batch_size, adapts, .. } = self.question;
        let mut request = self.request();
        // A size that adapts goes as far down as a sample.
        request.micro_batches = vec![if adapts { batch_size } else { self.micro_batches }];
        let resident = plan(&request)?.rows.swap_remove(0);
        if resident.fits {
            return Ok(StageHomes::Device);
        }
        let speed = HostSpeed::measure(device, method)?;
        request.bus = speed.bus;
        request.home_update = speed.update / kind.elt_size_in_bytes() as f64;
        request.host_memory = Some(memory::host()?.available.0);
        if self.question.looks_ahead {
            request.look_ahead = method.ahead_needs(kind)?;
        }
        let halvings = if adapts { HALVINGS } else { 0 };
        for micro_batches in (0..=halvings).map(|halving| self.micro_batches << halving) {
            request.micro_batches = vec![micro_batches.min(batch_size)];
            if let Some(row) = plan(&request)?.best() {
                let why = self.why(resident.largest_peak(), row);
                return Ok(StageHomes::Planned { row: Box::new(row.clone()), why });
            }
        }
        // The leanest there is; where not even that fits, the step says what it lacks.
        Ok(StageHomes::Host)
    }

    fn request(&self) -> Request<'_> {
        let HomeQuestion { device, kind, method, schedule, recompute, .. } = self.question;
        let spared = |room: &Bytes| (room.0 as f64 * (1.0 - SPARE)) as u64;
        let limited = |room| PlanDevice { memory: Some(spared(room)), ..PlanDevice::default() };
        let devices = self.question.rooms.iter().map(limited).collect();
        let (trained, gradient) = (self.question.trained, gradient_factor(kind));
        let beside = self.question.kept_beside as f64 * gradient;
        Request {
            gradient_bytes: trained * gradient,
            sums_apart: sums_apart(device, kind),
            optimizer_bytes: trained * method.state_factor_in(kind) + beside,
            schedules: vec![schedule],
            recompute: Some(recompute),
            ..Request::new(&self.profile, devices, self.question.batch_size)
        }
    }

    /// One line: what stays, what lives on the host, and why.
    fn why(&self, needed: u64, row: &PlanRow) -> String {
        let (at_host, stages) = (row.at_host(), row.stages.len());
        let again = row.stages.iter().filter(|stage| stage.recompute != Recompute::Never).count();
        let room = self.question.rooms[0];
        format!(
            "{at_host} of {stages} stages at home on the host ({}), {again} computed again: all on the \
             device would take {} of its {room}",
            Bytes(row.host_bytes + row.ahead_bytes),
            Bytes(needed),
        )
    }
}
