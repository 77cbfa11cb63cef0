//! Interface between the training loop and its two engines, for whole models and for a pipeline, and code that both
//! share.

use anyhow::{Result, bail};
use brimful::micro::MemoryFormat;
use brimful::pipeline::OffloadPlan;
use brimful::schedule::Schedule;
use brimful::{Layers, World, device};
use brimful_report::Record;
use tch::{Device, Tensor};

use super::TrainOptions;
use super::advice::FixedBytes;
use super::offload::{self, MeasuredInputs};
use super::pipelined::Pipelined;
use super::updates::{Kept, Updates};
use super::whole_model::WholeModel;
use crate::data::Rows;
use crate::exit::ensure_use;
use crate::named::{Comparison, Named};
use crate::progress::Ticker;
use crate::setting::{MeanOver, NormStatistics};

/// A model on its devices, with its optimizer.
pub(super) trait TrainingEngine: std::fmt::Debug {
    /// Returns the updates of the model. All ranks take part when their state is read.
    fn updates(&self) -> &Updates;

    fn updates_mut(&mut self) -> &mut Updates;

    /// Trains on mini-batches of inputs and targets that make one step together; `ticker` counts samples as their
    /// losses are computed.
    fn step(
        &mut self,
        batches: Vec<(Rows, Rows)>,
        ticker: Option<Ticker>,
    ) -> brimful::Result<Record>;

    /// Returns the loss over the samples of all ranks, and which of this rank's predictions are right.
    fn test(&mut self, batch: (Rows, Rows)) -> brimful::Result<(f64, Tensor)>;

    /// Returns parameters and statistics by their layers' names; changes to them change the model. In a pipeline over
    /// ranks, the first rank gets copies of the other ranks' variables.
    fn variables(&self) -> Result<Named>;

    /// Loads the state that another run has saved. Changes nothing if it does not fit.
    fn load(&mut self, model: Named, kept: &Kept) -> Result<()>;

    /// Returns the bytes of a step that do not depend on the micro-batch size, if they are known.
    fn fixed_bytes(&self) -> Option<FixedBytes> {
        None
    }

    /// Returns the schedule of a model in stages.
    fn schedule(&self) -> Option<Schedule> {
        None
    }

    /// Returns whether any stage is offloaded.
    fn uses_host(&self) -> bool {
        false
    }

    /// Describes the devices that the model trains on.
    fn place(&self) -> String;

    /// Returns the devices whose peaks the steps report, with their memory limits.
    fn devices(&self) -> Result<Vec<brimful_report::Device>>;
}

/// Builds the engine that the options ask for; `inputs` returns a micro-batch to measure layers with.
pub(super) fn build(
    layers: Layers,
    world: &World,
    options: &TrainOptions,
    over: MeanOver,
    mut inputs: impl FnMut() -> Result<MeasuredInputs>,
) -> Result<Box<dyn TrainingEngine>> {
    let stages = &options.stages;
    ensure_use!(
        over == MeanOver::Samples || !stages.update_in_backward,
        "--update-in-backward needs a loss over all tokens; with conversations only the answers count: remove the flag"
    );
    let whole = options.ranks.whole_models(world);
    let each = options.ranks.devices_of_pipeline(world, stages);
    let offload = offload::settle(&layers, each, world, options, &mut inputs)?;
    let is_exact = options.batch_norm == Some(NormStatistics::Exact);
    // Exact BatchNorms have a barrier across micro-batches, which needs a pipeline, even on one device.
    let is_cut = is_exact || stages.stages.is_some() || !matches!(offload, OffloadPlan::Device);
    Ok(match whole.filter(|_| !is_cut) {
        Some(each) => Box::new(WholeModel::new(layers, each, world, options)?),
        None => Box::new(Pipelined::new(layers, world, options, over, offload, inputs)?),
    })
}

/// Checks that the saved tensors are exactly the model's.
pub(super) fn check_model(here: &Named, saved: &Named) -> Result<()> {
    let saved = saved.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
    match Comparison::new(here, saved.collect()).differences() {
        Some(differences) => bail!("it is of another model: {differences}"),
        None => Ok(()),
    }
}

/// Returns the memory format of images and convolutions on a device.
pub(super) fn memory_format(device: Device) -> MemoryFormat {
    if device.is_cuda() { MemoryFormat::Measured } else { MemoryFormat::AsIs }
}

/// Counts the samples of a micro-batch with these targets.
pub(super) fn count(ticker: Option<&Ticker>, targets: &Tensor) {
    if let Some(ticker) = ticker {
        ticker.advance(targets.size().first().map_or(1, |samples| *samples as usize));
    }
}

/// Joins the devices' names, without repeats.
pub(super) fn names(devices: &[Device]) -> String {
    let mut names: Vec<String> = devices.iter().map(|place| device::name(*place)).collect();
    names.dedup();
    names.join(", ")
}
