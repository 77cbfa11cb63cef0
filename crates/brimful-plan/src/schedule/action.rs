//! Actions of a schedule: `2F0` is stage 2, forward, micro-batch 0.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Defines an index type, so that a stage is never taken for a micro-batch.
macro_rules! index {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// Returns the index into a list.
            #[must_use]
            pub const fn index(self) -> usize {
                self.0 as usize
            }

            /// Returns the id of element `index` of a list; no list here is as long as `u32::MAX`.
            #[must_use]
            pub const fn at(index: usize) -> Self {
                Self(index as u32)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

index! {
    /// Stage: consecutive layers on one device, counted along the model (letter j).
    StageId
}
index! {
    /// Micro-batch, counted along the mini-batch (letter i).
    MicroBatchId
}
index! {
    /// Device: one worker that runs one action at a time.
    DeviceId
}

/// Kind of an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ActionKind {
    /// `F`: runs the stage's layers.
    Forward,
    /// `B`: the whole backward, the gradients of both input and weights.
    Backward,
    /// `I`: the input gradient of a split backward. The previous stage waits for it.
    InputGradient,
    /// `W`: the weight gradient of a split backward. No other stage waits for it, so it can fill a bubble.
    WeightGradient,
    /// `R`: recomputes the forward, because its activations were not kept.
    Recompute,
}

impl ActionKind {
    /// All kinds, in the order in which a micro-batch goes through them.
    pub const ALL: [Self; 5] =
        [Self::Forward, Self::Recompute, Self::Backward, Self::InputGradient, Self::WeightGradient];

    /// Returns the letter in an action's text.
    #[must_use]
    pub const fn letter(self) -> char {
        match self {
            Self::Forward => 'F',
            Self::Backward => 'B',
            Self::InputGradient => 'I',
            Self::WeightGradient => 'W',
            Self::Recompute => 'R',
        }
    }

    /// Returns the name in prose.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::InputGradient => "input gradient",
            Self::WeightGradient => "weight gradient",
            Self::Recompute => "recompute",
        }
    }

    /// Returns whether this action needs the gradient from the next stage, and makes the gradient for the previous
    /// one.
    #[must_use]
    pub const fn passes_gradient(self) -> bool {
        matches!(self, Self::Backward | Self::InputGradient)
    }

    /// Returns whether this is the last action that needs the micro-batch's activations.
    #[must_use]
    pub const fn releases(self) -> bool {
        matches!(self, Self::Backward | Self::WeightGradient)
    }

    /// Returns whether this action keeps a micro-batch's activations. A forward that is recomputed keeps only its
    /// input; the recompute keeps the activations.
    pub(super) fn keeps(self, is_recomputed: bool) -> bool {
        match self {
            Self::Forward => !is_recomputed,
            kind => kind == Self::Recompute,
        }
    }
}

/// Unit of work: one kind of action of a stage on a micro-batch.
///
/// ```
/// use brimful_plan::schedule::{Action, ActionKind};
/// let action: Action = "2F0".parse()?;
/// assert_eq!(action.kind, ActionKind::Forward);
/// assert_eq!(action.to_string(), "2F0");
/// # Ok::<(), brimful_plan::schedule::ScheduleError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Action {
    /// Stage that acts.
    pub stage: StageId,
    /// Kind of the action.
    pub kind: ActionKind,
    /// Micro-batch that it acts on.
    pub micro_batch: MicroBatchId,
}

impl Action {
    /// Creates an action.
    #[must_use]
    pub const fn new(stage: StageId, kind: ActionKind, micro_batch: MicroBatchId) -> Self {
        Self { stage, kind, micro_batch }
    }

    /// Returns the stage whose output this action takes: forwards take boundaries, backwards take gradients.
    pub(crate) fn source(self, last: StageId) -> Option<StageId> {
        match self.kind {
            ActionKind::Forward => self.stage.before(),
            kind if kind.passes_gradient() => self.stage.after(last),
            _ => None,
        }
    }

    /// Returns the stage that takes this action's output.
    pub(crate) fn target(self, last: StageId) -> Option<StageId> {
        match self.kind {
            ActionKind::Forward => self.stage.after(last),
            kind if kind.passes_gradient() => self.stage.before(),
            _ => None,
        }
    }

    /// Returns the index of the channel that this action uses: 0 for boundaries, 1 for gradients.
    pub(crate) fn channel(self) -> usize {
        usize::from(self.kind.passes_gradient())
    }
}

impl StageId {
    pub(super) fn before(self) -> Option<Self> {
        self.0.checked_sub(1).map(Self)
    }

    fn after(self, last: Self) -> Option<Self> {
        (self < last).then_some(Self(self.0 + 1))
    }
}
