//! Why parameters cannot be optimized as asked.

use thiserror::Error;

/// Parameters that cannot be optimized as asked.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum OptimError {
    /// An option of an optimizer that makes no sense.
    #[error("{option} cannot be {value}: {remedy}")]
    BadOption {
        /// The option's name.
        option: &'static str,
        /// What it was set to.
        value: String,
        /// What it may be.
        remedy: &'static str,
    },
    /// A tensor that no optimizer can update.
    #[error("parameter '{parameter}' cannot be optimized: {reason}")]
    BadParameter {
        /// Its name.
        parameter: String,
        /// Why, and what to do.
        reason: String,
    },
    /// A parameter group without a parameter.
    #[error(
        "group '{group}' matches none of the {parameters} parameters (the first is '{first}'): \
         mend its condition or leave it out"
    )]
    EmptyGroup {
        /// The group's name.
        group: String,
        /// How many parameters there are.
        parameters: usize,
        /// The name of the first one.
        first: String,
    },
    /// A parameter group that cannot be made.
    #[error("group '{group}' cannot be made: {reason}")]
    BadGroup {
        /// The group's name.
        group: String,
        /// Why, and what to do.
        reason: String,
    },
    /// A parameter group that does not exist.
    #[error("there is no group '{group}'; there is {known}")]
    NoGroup {
        /// The name that was asked for.
        group: String,
        /// The names that there are.
        known: String,
    },
    /// A saved state that belongs to another model or optimizer.
    #[error(
        "the saved optimizer state does not fit: '{name}' is {saved} in it, but {here} here; load \
         the state that was saved with this model, optimizer and groups"
    )]
    StateMismatch {
        /// What differs: a parameter, one of its state's tensors, or a group.
        name: String,
        /// What the saved state has.
        saved: String,
        /// What the optimizer has.
        here: String,
    },
    /// Saved averages that belong to another model.
    #[error(
        "the saved averages do not fit: '{name}' is {saved} in them, but {here} here; load those that \
         were saved with this model"
    )]
    AveragesMismatch {
        /// What differs: a variable, or one of the texts.
        name: String,
        /// What the saved averages have.
        saved: String,
        /// What is here.
        here: String,
    },
    /// Averages cannot follow weights in whose place they are.
    #[error(
        "the averages are in the place of the model's own weights: put those back with `swap_out` first"
    )]
    AveragesInPlace,
    /// Gradients were needed, and there are none.
    #[error("none of the {parameters} parameters has a gradient: run backward first")]
    NoGradient {
        /// How many parameters were looked at.
        parameters: usize,
    },
}
