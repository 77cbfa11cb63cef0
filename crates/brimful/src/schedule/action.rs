//! One action of a schedule: `2F0` is stage 2, forward, micro-batch 0.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::ScheduleError;

/// Makes an index type, so that a stage is never taken for a micro-batch.
macro_rules! index {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// The index of a list's element.
            #[must_use]
            pub const fn index(self) -> usize {
                self.0 as usize
            }

            /// The id of element `index` of a list; no list here is as long as `u32::MAX`.
            pub(crate) const fn at(index: usize) -> Self {
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
    /// A stage: consecutive layers on one device, counted along the model (letter j).
    StageId
}
index! {
    /// A micro-batch, counted along the mini-batch (letter i).
    MicroBatchId
}
index! {
    /// A device: one worker that runs one action at a time.
    DeviceId
}

/// What an action does to its micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// `F`: runs the stage's layers.
    Forward,
    /// `B`: the whole backward, the gradients of both the input and the weights.
    Backward,
    /// `I`: the half of the backward that the stage before waits for.
    InputGradient,
    /// `W`: the half of the backward that nobody waits for, so that it can fill a bubble.
    WeightGradient,
    /// `R`: runs the forward again, because its activations were not kept.
    Recompute,
}

impl Kind {
    /// All kinds, in the order of a micro-batch's life.
    pub const ALL: [Self; 5] =
        [Self::Forward, Self::Recompute, Self::Backward, Self::InputGradient, Self::WeightGradient];

    /// The letter in an action's text.
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

    /// The name in prose.
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

    /// Whether it needs the gradient of the stage after, and makes that of the stage before.
    #[must_use]
    pub const fn passes_gradient(self) -> bool {
        matches!(self, Self::Backward | Self::InputGradient)
    }

    /// Whether it is the last that needs the micro-batch's activations.
    #[must_use]
    pub const fn releases(self) -> bool {
        matches!(self, Self::Backward | Self::WeightGradient)
    }

    fn from_letter(letter: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.letter() == letter as char)
    }
}

/// One piece of work: a stage does something with a micro-batch.
///
/// ```
/// use brimful::schedule::{Action, Kind};
/// let action: Action = "2F0".parse()?;
/// assert_eq!(action.kind, Kind::Forward);
/// assert_eq!(action.to_string(), "2F0");
/// # Ok::<(), brimful::schedule::ScheduleError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Action {
    /// Who.
    pub stage: StageId,
    /// What.
    pub kind: Kind,
    /// With which micro-batch.
    pub micro_batch: MicroBatchId,
}

impl Action {
    /// Puts the three together.
    #[must_use]
    pub const fn new(stage: StageId, kind: Kind, micro_batch: MicroBatchId) -> Self {
        Self { stage, kind, micro_batch }
    }

    /// The stage whose output it takes: forwards take boundaries, backwards gradients.
    pub(crate) fn source(self, last: StageId) -> Option<StageId> {
        match self.kind {
            Kind::Forward => self.stage.before(),
            kind if kind.passes_gradient() => self.stage.after(last),
            _ => None,
        }
    }

    /// The stage that takes its output.
    pub(crate) fn target(self, last: StageId) -> Option<StageId> {
        match self.kind {
            Kind::Forward => self.stage.after(last),
            kind if kind.passes_gradient() => self.stage.before(),
            _ => None,
        }
    }

    /// Which of the two channels into a stage it uses: 0 for boundaries, 1 for gradients.
    pub(crate) fn channel(self) -> usize {
        usize::from(self.kind.passes_gradient())
    }
}

impl StageId {
    fn before(self) -> Option<Self> {
        self.0.checked_sub(1).map(Self)
    }

    fn after(self, last: Self) -> Option<Self> {
        (self < last).then_some(Self(self.0 + 1))
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.stage, self.kind.letter(), self.micro_batch)
    }
}

impl FromStr for Action {
    type Err = ScheduleError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).ok_or_else(|| ScheduleError::NotAnAction { text: excerpt(text) })
    }
}

fn parse(text: &str) -> Option<Action> {
    let at = text.find(|c: char| !c.is_ascii_digit())?;
    let kind = Kind::from_letter(text.as_bytes()[at])?;
    let stage = number(&text[..at])?;
    let micro_batch = number(&text[at + 1..])?;
    Some(Action::new(StageId(stage), kind, MicroBatchId(micro_batch)))
}

/// Digits alone: `u32::from_str` would take a sign too.
fn number(digits: &str) -> Option<u32> {
    let all_digits = digits.bytes().all(|b| b.is_ascii_digit());
    digits.parse().ok().filter(|_| all_digits)
}

/// The start of a text from outside, short enough for an error message.
fn excerpt(text: &str) -> String {
    const LONGEST: usize = 24;
    let mut short: String = text.chars().take(LONGEST).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trip() {
        for kind in Kind::ALL {
            let action = Action::new(StageId(12), kind, MicroBatchId(u32::MAX));
            assert_eq!(action.to_string().parse(), Ok(action));
        }
    }

    #[test]
    fn refuses_what_is_no_action() {
        for text in [
            "",
            "F",
            "2F",
            "F0",
            "2X0",
            "2f0",
            "+2F0",
            "2F+0",
            "2F-1",
            "2F0 ",
            "4294967296F0",
            "1é2",
        ] {
            assert!(text.parse::<Action>().is_err(), "{text}");
        }
        let error = "2X0".parse::<Action>().expect_err("no kind");
        assert_eq!(
            error.to_string(),
            "'2X0' is not an action: write stage, one of F B I W R, micro-batch, as in 2F0"
        );
    }
}
