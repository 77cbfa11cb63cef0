//! Why layers cannot be spread over stages as asked.

use thiserror::Error;

use crate::bytes::Bytes;

/// Layers that cannot be spread over the stages.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum BalanceError {
    /// Nowhere to put a layer.
    #[error("there is no stage to put the layers on: give at least one device")]
    NoStages,
    /// A stage would stay empty.
    #[error(
        "{stages} stages need at least {stages} layers, but the model has {layers}: \
         use at most {layers} stages, or cut the layers finer"
    )]
    TooFewLayers {
        /// Stages asked for.
        stages: usize,
        /// Layers there are.
        layers: usize,
    },
    /// Numbers that do not add up.
    #[error("balance {sizes:?} sums to {sum}, but the model has {layers} layers")]
    WrongSum {
        /// The balance as given.
        sizes: Vec<usize>,
        /// What it sums to.
        sum: u128,
        /// Layers there are.
        layers: usize,
    },
    /// A stage without a layer.
    #[error("stage {stage} of balance {sizes:?} is empty: give it a layer, or use one stage less")]
    EmptyStage {
        /// The balance as given.
        sizes: Vec<usize>,
        /// The first empty stage.
        stage: usize,
    },
    /// A time that no layer can take.
    #[error("the {what} time of layer {layer} is {value}: it must be finite and not negative")]
    BadTime {
        /// Which layer.
        layer: usize,
        /// Of what.
        what: &'static str,
        /// The time as given.
        value: f64,
    },
    /// Two halves of a backward that are less than the whole.
    #[error(
        "the backward of layer {layer} takes {backward}, but its halves {input_gradient} and \
         {weight_gradient}: together they take at least as long; correct one, or leave it out"
    )]
    BadHalves {
        /// Which layer.
        layer: usize,
        /// The whole.
        backward: f64,
        /// The half that makes the gradient of the input.
        input_gradient: f64,
        /// The half that makes the gradients of the weights.
        weight_gradient: f64,
    },
    /// Times whose sum is no number.
    #[error("the layers' times add up to more than a number can hold: give them in a larger unit")]
    Overflow,
    /// A speed that no device has.
    #[error("the speed of device {device} is {value}: it must be finite and above 0 (1 is usual)")]
    BadSpeed {
        /// Which device.
        device: usize,
        /// The speed as given.
        value: f64,
    },
    /// Too little memory, wherever the model is cut.
    #[error(
        "no cut into {stages} stages fits: the layers need {} in all and the largest one {}, \
         the devices have {} in all and the largest {}; \
         use more devices, smaller micro-batches or recompute",
        Bytes(*.needed), Bytes(*.largest_layer), Bytes(*.available), Bytes(*.largest_device)
    )]
    DoesNotFit {
        /// Stages asked for.
        stages: usize,
        /// Bytes of all layers, each held as often as on the stage that holds least.
        needed: u64,
        /// Bytes of the largest layer, counted so too.
        largest_layer: u64,
        /// Bytes of all devices.
        available: u64,
        /// Bytes of the largest device.
        largest_device: u64,
    },
}
