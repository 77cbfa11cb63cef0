//! What the training loop asks of whoever runs the steps: whole models, or a pipeline; and
//! what those have in common.

use anyhow::{Result, bail};
use brimful::micro::Layout;
use brimful::report::{self, Record};
use brimful::save::Metadata;
use brimful::schedule::Schedule;
use brimful::{Layers, World, device};
use tch::{Device, Tensor};

use super::TrainOptions;
use super::advice::FixedBytes;
use super::offload::MeasuredInputs;
use super::pipelined::Pipelined;
use super::whole_model::WholeModel;
use crate::data::Rows;
use crate::exit::ensure_use;
use crate::home_plan::StageHomes;
use crate::named::{Comparison, Named};
use crate::progress::Ticker;
use crate::setting::{MeanOver, NormStatistics};

/// What is kept beside a model: what its optimizer knows, and the averages of its weights, if there
/// are any.
#[derive(Debug, Default)]
pub(super) struct Kept {
    pub(super) optimizer: (Named, Metadata),
    pub(super) averages: Option<(Named, Metadata)>,
}

/// A model, its optimizer, and where they are.
pub(super) trait TrainingEngine: std::fmt::Debug {
    /// How far the next steps go.
    fn set_learning_rate(&mut self, rate: f64) -> brimful::Result<()>;

    /// Trains on mini-batches of inputs and targets, which make one step together; `ticker` counts
    /// samples as their loss is known.
    fn step(
        &mut self,
        batches: Vec<(Rows, Rows)>,
        ticker: Option<Ticker>,
    ) -> brimful::Result<Record>;

    /// The loss of these samples and of all other ranks', and which of this rank's answers are right.
    fn test(&mut self, batch: (Rows, Rows)) -> brimful::Result<(f64, Tensor)>;

    /// Parameters and statistics under the layers' names: what is done to them is done to the model. In a
    /// pipeline over ranks, the first one gets copies of what others have.
    fn variables(&self) -> Result<Named>;

    /// What it keeps beside the model. Of several ranks, all take part.
    fn kept(&self) -> Result<Kept>;

    /// Takes over what another run has saved. Nothing is changed if it does not fit.
    fn load(&mut self, model: Named, kept: &Kept) -> Result<()>;

    /// What a step needs whatever the size of its micro-batches, where that is known.
    fn fixed_bytes(&self) -> Option<FixedBytes> {
        None
    }

    /// The order of the actions of a model in stages.
    fn schedule(&self) -> Option<Schedule> {
        None
    }

    /// Whether stages are on the host between their uses.
    fn uses_host(&self) -> bool {
        false
    }

    /// Where it trains, in words.
    fn place(&self) -> String;

    /// The devices whose peaks the steps tell, and where their memory ends.
    fn devices(&self) -> Result<Vec<report::Device>>;
}

/// The model's engine, as the options ask for it; `inputs` gives those to measure layers with.
pub(super) fn build(
    layers: Layers,
    world: &World,
    options: &TrainOptions,
    over: MeanOver,
    mut inputs: impl FnMut() -> Result<MeasuredInputs>,
) -> Result<Box<dyn TrainingEngine>> {
    let stages = &options.stages;
    ensure_use!(
        over == MeanOver::Samples || !stages.follow_backward,
        "--follow-backward needs a loss of all tokens, but of messages the answers alone count: leave it \
             out"
    );
    let whole = options.ranks.whole_models(world);
    let each = options.ranks.devices_of_pipeline(world, stages);
    let homes = StageHomes::settle(&layers, each, world, options, over, &mut inputs)?;
    let is_exact = options.batch_norm == Some(NormStatistics::Exact);
    // All micro-batches meet at exact BatchNorms, which a pipeline of one device lets them.
    let is_cut = is_exact || stages.stages.is_some() || !matches!(homes, StageHomes::Device);
    Ok(match whole.filter(|_| !is_cut) {
        Some(each) => Box::new(WholeModel::new(layers, each, world, options)?),
        None => Box::new(Pipelined::new(layers, world, options, over, homes, inputs)?),
    })
}

/// The saved tensors must be the model's, all of them.
pub(super) fn check_model(here: &Named, saved: &Named) -> Result<()> {
    let saved = saved.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
    match Comparison::new(here, saved.collect()).differences() {
        Some(differences) => bail!("it is of another model: {differences}"),
        None => Ok(()),
    }
}

/// The order of images and convolutions in memory on such a device.
pub(super) fn layout(device: Device) -> Layout {
    if device.is_cuda() { Layout::Measured } else { Layout::AsIs }
}

/// A micro-batch with these targets was run.
pub(super) fn count(ticker: Option<&Ticker>, targets: &Tensor) {
    if let Some(ticker) = ticker {
        ticker.advance(targets.size().first().map_or(1, |samples| *samples as usize));
    }
}

/// The devices' names, each once.
pub(super) fn names(devices: &[Device]) -> String {
    let mut names: Vec<String> = devices.iter().map(|place| device::name(*place)).collect();
    names.dedup();
    names.join(", ")
}
