//! What several commands are told in the same words: model, data, number type; and what follows
//! from them.

mod loss_model;
mod memory;
mod model;
mod number_type;
mod order;
pub mod words;

use anyhow::Result;
use brimful::{World, device};
use brimful_torch::autograd;
use tch::nn::VarStore;
use tch::{Device, Kind, Reduction, Tensor};

pub use loss_model::LossModel;
pub use memory::{accounts, within};
pub(crate) use model::DROPOUT;
pub use model::{MODELS, ModelName};
pub use number_type::NumberType;
pub use order::{recompute, schedule};

/// The device of this name; without one, the best that there is.
pub fn device(name: Option<&str>) -> Result<Device> {
    Ok(name.map_or_else(|| Ok(device::best()), device::find)?)
}

/// The name of the devices to take where none is asked for.
pub fn best_devices() -> &'static str {
    if device::best().is_cuda() { "cuda" } else { "cpu" }
}

/// A rank's own device of this name.
pub fn device_of(name: &str, world: &World) -> Result<Device> {
    let place = world.rank_on_host();
    Ok(device::spread(name, place..place + 1)?[0])
}

/// The mean loss of logits: against classes (or tokens), which are whole numbers, their
/// cross-entropy over the last dimension; against masks, which are not, that of each pixel alone.
pub fn loss(logits: &Tensor, targets: &Tensor) -> Tensor {
    if targets.is_floating_point() {
        let targets = targets.to_kind(logits.kind());
        let none = None::<&Tensor>;
        return logits.binary_cross_entropy_with_logits(&targets, none, none, Reduction::Mean);
    }
    let (logits, targets) = (logits.flatten(0, -2), targets.flatten(0, -1));
    logits.cross_entropy_loss(&targets, None::<&Tensor>, Reduction::Mean, -100, 0.0)
}

/// Which answers are right, of samples, tokens or pixels.
pub(crate) fn right(logits: &Tensor, targets: &Tensor) -> Tensor {
    if targets.is_floating_point() {
        return logits.gt(0.0).eq_tensor(&targets.gt(0.5));
    }
    logits.argmax(-1, false).eq_tensor(targets)
}

/// Leaves every parameter without a gradient.
pub fn clear_gradients(store: &VarStore) -> Result<()> {
    let mut parameters = store.trainable_variables();
    Ok(parameters.iter_mut().try_for_each(|p| autograd::set_gradient(p, None))?)
}

/// The inputs in the model's number type; token numbers stay what they are.
pub(crate) fn typed(inputs: &Tensor, kind: Kind) -> Tensor {
    if inputs.is_floating_point() { inputs.to_kind(kind) } else { inputs.shallow_clone() }
}
