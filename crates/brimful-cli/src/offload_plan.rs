//! Planning of offloaded stages, from the measured layers and the available memory.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use anyhow::Result;
use brimful::balance::Profile;
use brimful::internal::{gradient_factor, measure_host_link, sums_apart};
use brimful::optim::Method;
use brimful::plan::{PlanDevice, PlanRow, Request, plan};
use brimful::schedule::{Recompute, Schedule};
use brimful::{Bytes, Layers, batch, memory};
use tch::{Device, Kind, Tensor};

use crate::measured;
use crate::setting::typed;

/// Share of a device's memory that a plan leaves free for the allocator's rounding and fragmentation.
const SPARE: f64 = 0.05;

/// Share of the free host memory that a plan leaves to other processes.
const HOST_SPARE: f64 = 0.1;

/// Name of the measured loss, after the layers.
const LOSS: &str = "loss of the outputs";

/// Number of times that an automatic micro-batch size is halved in search of a plan that fits.
const HALVINGS: u32 = 3;

/// Place of the stages' weights.
#[derive(Debug)]
pub enum OffloadPlan {
    /// On their devices.
    Device,
    /// Fully offloaded to the host.
    Host,
    /// Stage by stage, as planned for the available memory.
    Planned { row: Box<PlanRow>, why: String },
}

/// Parameters of a plan, besides the layers.
#[derive(Debug, Clone)]
pub struct OffloadQuestion {
    pub device: Device,
    /// Memory of each device that the model may use.
    pub capacities: Vec<Bytes>,
    /// Dtype of the parameters.
    pub kind: Kind,
    pub method: Method,
    /// Loss of outputs and targets.
    pub loss: fn(&Tensor, &Tensor) -> Tensor,
    /// Samples in a mini-batch.
    pub batch_size: usize,
    /// Share of the parameters that is trained, and has gradients and optimizer state.
    pub trained: f64,
    /// Copies kept of each parameter besides the optimizer's state, in the dtype of accumulated gradients: averages
    /// of weights, and the gradients of mini-batches that make a step together.
    pub kept_beside: usize,
    /// True if gradients of offloaded stages are rounded to bf16.
    pub bf16_gradients: bool,
    /// True if stages are updated in the backward.
    pub updates_in_backward: bool,
    /// True if micro-batches shrink when they do not fit.
    pub adapts: bool,
    /// Schedule of the model if all of it stays on its devices.
    pub schedule: Schedule,
    pub recompute: Recompute,
}

impl OffloadPlan {
    /// Measures the layers with the inputs and targets of a micro-batch, and plans. Stages that fit stay on their
    /// device.
    pub fn plan(
        layers: &Layers,
        (inputs, targets): (&Tensor, &Tensor),
        question: OffloadQuestion,
    ) -> Result<Self> {
        let inputs = typed(inputs, question.kind);
        let profile = measured_with_loss(layers, (&inputs, targets), &question)?;
        let micro_batches = question.batch_size.div_ceil(batch::len(&inputs)?.max(1));
        OffloadPlanner { question, profile, micro_batches }.settle()
    }
}

impl fmt::Display for OffloadPlan {
    /// Writes a text that follows the description of the model's devices.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device => Ok(()),
            Self::Host => f.write_str(", offloaded to the host"),
            Self::Planned { why, .. } => write!(f, ", {why}"),
        }
    }
}

/// Returns the bytes of host memory that a plan may use.
pub(crate) fn free_host_bytes() -> Result<u64> {
    Ok((memory::host_available()?.0 as f64 * (1.0 - HOST_SPARE)) as u64)
}

/// Measures the layers with this micro-batch; the loss counts as part of the last layer.
fn measured_with_loss(
    layers: &Layers,
    (inputs, targets): (&Tensor, &Tensor),
    question: &OffloadQuestion,
) -> Result<Profile> {
    let (loss, targets) = (question.loss, Mutex::new(targets.to_device(question.device)));
    let layers = layers.clone().add_fn(LOSS, move |outputs| {
        let targets = targets.lock().unwrap_or_else(PoisonError::into_inner);
        // Some measurements use only part of the micro-batch.
        loss(outputs, &targets.narrow(0, 0, outputs.size()[0]))
    });
    let mut profile = measured::profile(&layers, question.device, inputs, question.kind)?;
    let loss = profile.layers.pop();
    if let Some((last, loss)) = profile.layers.pop().zip(loss) {
        profile.layers.push(last.with_loss(&loss));
    }
    Ok(profile)
}

/// Planner, with the question and the measured layers.
struct OffloadPlanner {
    question: OffloadQuestion,
    profile: Profile,
    /// Micro-batches in a mini-batch.
    micro_batches: usize,
}

impl OffloadPlanner {
    fn settle(&self) -> Result<OffloadPlan> {
        let OffloadQuestion { device, batch_size, adapts, .. } = self.question;
        let mut request = self.request();
        // An automatic size may go down to one sample.
        request.micro_batches = vec![if adapts { batch_size } else { self.micro_batches }];
        let resident = plan(&request)?.rows.swap_remove(0);
        if resident.fits {
            return Ok(OffloadPlan::Device);
        }
        request.host_link = measure_host_link(device)?;
        request.host_memory = Some(free_host_bytes()?);
        let halvings = if adapts { HALVINGS } else { 0 };
        for micro_batches in (0..=halvings).map(|halving| self.micro_batches << halving) {
            request.micro_batches = vec![micro_batches.min(batch_size)];
            if let Some(row) = plan(&request)?.best() {
                let why = self.why(resident.largest_peak(), row);
                return Ok(OffloadPlan::Planned { row: Box::new(row.clone()), why });
            }
        }
        // Offloads all stages, which takes the least memory. If even that does not fit, the step reports the missing
        // bytes.
        Ok(OffloadPlan::Host)
    }

    fn request(&self) -> Request<'_> {
        let OffloadQuestion { device, kind, method, schedule, recompute, .. } = self.question;
        let spared = |capacity: &Bytes| (capacity.0 as f64 * (1.0 - SPARE)) as u64;
        let limited =
            |capacity| PlanDevice { memory: Some(spared(capacity)), ..PlanDevice::default() };
        let devices = self.question.capacities.iter().map(limited).collect();
        let gradient = gradient_factor(kind);
        Request {
            trained: self.question.trained,
            gradient_bytes: gradient,
            sent_gradient_bytes: self.question.bf16_gradients.then_some(1.0),
            sums_apart: sums_apart(device, kind),
            optimizer_bytes: method.state_factor_in(kind),
            kept_bytes: self.question.kept_beside as f64 * gradient,
            update_in_backward: self.question.updates_in_backward,
            schedules: vec![schedule],
            recompute: Some(recompute),
            ..Request::new(&self.profile, devices, self.question.batch_size)
        }
    }

    /// Explains in one line which stages are offloaded, and why.
    fn why(&self, needed: u64, row: &PlanRow) -> String {
        let (at_host, stages) = (row.at_host(), row.stages.len());
        let again = row.stages.iter().filter(|stage| stage.recompute != Recompute::Never).count();
        let capacity = self.question.capacities[0];
        format!(
            "{at_host} of {stages} stages offloaded to the host ({}), {again} recomputed: all of it on the \
             device would take {} of its {capacity}",
            Bytes(row.host_bytes),
            Bytes(needed),
        )
    }
}
