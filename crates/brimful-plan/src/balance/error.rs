//! Errors of balances.

use thiserror::Error;

use crate::bytes::Bytes;

/// Error for layers that cannot be divided into the stages.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum BalanceError {
    /// No stages.
    #[error("there is no stage to put the layers on: give at least one device")]
    NoStages,
    /// More stages than layers.
    #[error(
        "{stages} stages need at least {stages} layers, but the model has {layers}: \
         use at most {layers} stages, or cut the layers finer"
    )]
    TooFewLayers {
        /// Number of stages asked for.
        stages: usize,
        /// Number of layers.
        layers: usize,
    },
    /// Balance whose sizes do not sum to the number of layers.
    #[error("balance {sizes:?} sums to {sum}, but the model has {layers} layers")]
    WrongSum {
        /// Balance as given.
        sizes: Vec<usize>,
        /// Sum of its sizes.
        sum: u128,
        /// Number of layers.
        layers: usize,
    },
    /// Stage without a layer.
    #[error("stage {stage} of balance {sizes:?} is empty: give it a layer, or use one stage fewer")]
    EmptyStage {
        /// Balance as given.
        sizes: Vec<usize>,
        /// Number of the first empty stage.
        stage: usize,
    },
    /// Invalid time.
    #[error("the {what} time of layer {layer} is {value}: it must be finite and not negative")]
    BadTime {
        /// Number of the layer.
        layer: usize,
        /// Name of the time.
        what: &'static str,
        /// Time as given.
        value: f64,
    },
    /// Split backward that is shorter than the whole backward.
    #[error(
        "layer {layer}: dX ({input_gradient}) plus dW ({weight_gradient}) is shorter than the whole \
         backward ({backward}), which cannot be: correct one of the times, or leave dX and dW out"
    )]
    BadSplit {
        /// Number of the layer.
        layer: usize,
        /// Time of the whole backward.
        backward: f64,
        /// Time of the input gradient.
        input_gradient: f64,
        /// Time of the weight gradient.
        weight_gradient: f64,
    },
    /// Times whose sum is infinite.
    #[error("the layers' times add up to more than a number can hold: give them in a larger unit")]
    Overflow,
    /// Invalid speed of a device.
    #[error("the speed of device {device} is {value}: it must be finite and above 0 (1 is usual)")]
    BadSpeed {
        /// Number of the device.
        device: usize,
        /// Speed as given.
        value: f64,
    },
    /// Too little memory, wherever the model is cut.
    #[error(
        "no cut into {stages} stages fits: the layers need {} in all, and the largest layer {}; the \
         devices have {} in all, and the largest device {}; use more devices, smaller micro-batches or \
         activation recomputation",
        Bytes(*.needed), Bytes(*.largest_layer), Bytes(*.available), Bytes(*.largest_device)
    )]
    DoesNotFit {
        /// Number of stages asked for.
        stages: usize,
        /// Bytes of all layers, if each holds as many micro-batches as the stage that holds the fewest.
        needed: u64,
        /// Bytes of the largest layer, with that number of micro-batches.
        largest_layer: u64,
        /// Bytes of all devices.
        available: u64,
        /// Bytes of the largest device.
        largest_device: u64,
    },
}
