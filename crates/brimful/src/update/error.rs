//! Errors of optimizers and weight averages.

use thiserror::Error;

/// Error of an optimizer or of weight averages.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum OptimError {
    /// Option of an optimizer with an invalid value.
    #[error("{option} cannot be {value}: {remedy}")]
    BadOption {
        /// The option's name.
        option: &'static str,
        /// The option's value.
        value: String,
        /// Values that the option may have.
        remedy: &'static str,
    },
    /// Tensor that no optimizer can update.
    #[error("parameter '{parameter}' cannot be optimized: {reason}")]
    BadParameter {
        /// The parameter's name.
        parameter: String,
        /// Reason and remedy.
        reason: String,
    },
    /// Parameter group without a parameter.
    #[error(
        "group '{group}' matches none of the {parameters} parameters (the first is '{first}'): correct the \
         group's condition, or remove the group"
    )]
    EmptyGroup {
        /// The group's name.
        group: String,
        /// Number of parameters.
        parameters: usize,
        /// Name of the first one.
        first: String,
    },
    /// Parameter group that cannot be created.
    #[error("group '{group}' cannot be made: {reason}")]
    BadGroup {
        /// The group's name.
        group: String,
        /// Reason and remedy.
        reason: String,
    },
    /// Parameter group that does not exist.
    #[error("there is no group '{group}'; there is {known}")]
    NoGroup {
        /// Requested name.
        group: String,
        /// Names of the existing groups.
        known: String,
    },
    /// Saved state that belongs to another model or optimizer.
    #[error(
        "the saved optimizer state does not fit: '{name}' is {saved} in it, but {here} here; load \
         the state that was saved with this model, optimizer and groups"
    )]
    StateMismatch {
        /// Name of the first difference: a parameter, one of its state's tensors, or a group.
        name: String,
        /// Value in the saved state.
        saved: String,
        /// Value in the optimizer.
        here: String,
    },
    /// Saved averages that belong to another model.
    #[error(
        "the saved averages do not fit: '{name}' is {saved} in them, but {here} here; load those that \
         were saved with this model"
    )]
    AveragesMismatch {
        /// Name of the first difference: a variable, or one of the texts.
        name: String,
        /// Value in the saved averages.
        saved: String,
        /// Value in the model.
        here: String,
    },
    /// Update of averages that are swapped in.
    #[error("the averages are swapped in: put the model's own weights back with `swap_out` first")]
    AveragesInPlace,
    /// Clipping without any gradient.
    #[error("none of the {parameters} parameters has a gradient: run backward first")]
    NoGradient {
        /// Number of parameters searched.
        parameters: usize,
    },
}
