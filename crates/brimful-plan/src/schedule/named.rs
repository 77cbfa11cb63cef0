//! Named schedules, and the functions that make their lists.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{Action, Actions, DeviceId, Recompute, ScheduleError, ScheduleRecipe, StageId};
use super::{breadth_first, interleaved, one_f_one_b, recompute, zero_bubble, zero_bubble_v};

/// Named order of actions.
///
/// With p devices, m micro-batches, v stages a device, and A the activations of one micro-batch on one
/// device:
///
/// | schedule | overhead over m(F + I + W) | holds at most |
/// | --- | --- | --- |
/// | [`GPipe`](Self::GPipe) | (p − 1)(F + I + W) | m A |
/// | [`OneFOneB`](Self::OneFOneB) | (p − 1)(F + I + W) | p A, on device d (p − d) A |
/// | [`Interleaved`](Self::Interleaved) | (p − 1)(F + I + W) / v | p A (1 + (p − 1) / (p v)) |
/// | [`BreadthFirst`](Self::BreadthFirst) | (p − 1)(F + I + W) / v, from m = p on | m A |
/// | [`ZeroBubbleH1`](Self::ZeroBubbleH1) | (p − 1)(F + I − W) | p A |
/// | [`InterleavedZeroBubble`](Self::InterleavedZeroBubble) | (p − 1)(F + I − W) / v | p A |
/// | [`ZeroBubbleV`](Self::ZeroBubbleV) | (p − 1) F / 2 where F = I = W | p A |
/// | [`Auto`](Self::Auto), [`AutoInterleaved`](Self::AutoInterleaved), [`AutoV`](Self::AutoV) | by the stages' times | as the memory allows |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[non_exhaustive]
pub enum Schedule {
    /// Every forward, then every backward.
    GPipe,
    /// 1F1B: after a warm-up, one forward and one backward alternately.
    OneFOneB,
    /// 1F1B with several stages on each device.
    Interleaved {
        /// Number of stages on each device (letter v).
        stages_per_device: usize,
    },
    /// All micro-batches through one stage, then all through the next, and back again. Offloaded weights
    /// need the fewest transfers.
    BreadthFirst {
        /// Number of stages on each device (letter v).
        stages_per_device: usize,
    },
    /// 1F1B with split backwards, whose weight gradients fill the bubble.
    ZeroBubbleH1,
    /// Zero-bubble H1 with several stages on each device.
    InterleavedZeroBubble {
        /// Number of stages on each device (letter v).
        stages_per_device: usize,
    },
    /// Two stages on each device, placed down and up again, with split backwards.
    ZeroBubbleV,
    /// One stage on each device, in an order made for the stages' times by a [`ScheduleRecipe`], with split
    /// backwards where they pay. Without a recipe, all stages count as equal.
    Auto,
    /// Automatic order with several stages on each device, placed as by [`Interleaved`](Self::Interleaved).
    AutoInterleaved {
        /// Number of stages on each device (letter v).
        stages_per_device: usize,
    },
    /// Automatic order with two stages on each device, placed as by [`ZeroBubbleV`](Self::ZeroBubbleV).
    AutoV,
}

/// Largest number of pairs of a stage and a micro-batch; eight times that of the benchmarks.
const LARGEST: u128 = 1 << 25;

impl Schedule {
    /// Returns every schedule. If the number of stages per device is variable, it is `v`.
    #[must_use]
    pub const fn all(v: usize) -> [Self; 10] {
        [
            Self::GPipe,
            Self::OneFOneB,
            Self::Interleaved { stages_per_device: v },
            Self::BreadthFirst { stages_per_device: v },
            Self::ZeroBubbleH1,
            Self::InterleavedZeroBubble { stages_per_device: v },
            Self::ZeroBubbleV,
            Self::Auto,
            Self::AutoInterleaved { stages_per_device: v },
            Self::AutoV,
        ]
    }

    /// Returns whether its lists are made from the stages' times.
    #[must_use]
    pub const fn is_automatic(self) -> bool {
        matches!(self, Self::Auto | Self::AutoInterleaved { .. } | Self::AutoV)
    }

    /// Returns the named schedules that place stages as this automatic schedule does, the one that holds the fewest
    /// activations first. For a named schedule, returns only this schedule.
    pub(crate) fn alike(self) -> Vec<Self> {
        match self {
            // Interleaved with one stage per device is 1F1B with twice as many forwards before the first backward.
            Self::Auto => vec![
                Self::OneFOneB,
                Self::GPipe,
                Self::ZeroBubbleH1,
                Self::Interleaved { stages_per_device: 1 },
            ],
            Self::AutoInterleaved { stages_per_device } => vec![
                Self::InterleavedZeroBubble { stages_per_device },
                Self::Interleaved { stages_per_device },
                Self::BreadthFirst { stages_per_device },
            ],
            Self::AutoV => vec![Self::ZeroBubbleV],
            named => vec![named],
        }
    }

    /// Returns whether all backwards are split. False for an automatic schedule, which splits some of them.
    #[must_use]
    pub const fn splits_backward(self) -> bool {
        matches!(self, Self::ZeroBubbleH1 | Self::InterleavedZeroBubble { .. } | Self::ZeroBubbleV)
    }

    /// Returns the number of stages on each device.
    #[must_use]
    pub const fn stages_per_device(self) -> usize {
        match self {
            Self::Interleaved { stages_per_device }
            | Self::BreadthFirst { stages_per_device }
            | Self::InterleavedZeroBubble { stages_per_device }
            | Self::AutoInterleaved { stages_per_device } => stages_per_device,
            Self::ZeroBubbleV | Self::AutoV => 2,
            Self::GPipe | Self::OneFOneB | Self::ZeroBubbleH1 | Self::Auto => 1,
        }
    }

    /// Returns the device of each stage: in rounds over the devices, or down and up again.
    #[must_use]
    pub fn placement(self, devices: usize) -> Vec<DeviceId> {
        let stages = devices.saturating_mul(self.stages_per_device());
        let device = |j: usize| match self {
            Self::ZeroBubbleV | Self::AutoV if j >= devices => stages - 1 - j,
            _ => j % devices,
        };
        (0..stages).map(|j| DeviceId::at(device(j))).collect()
    }

    /// Returns the schedule with `v` stages on each device, if that number is variable.
    #[must_use]
    pub fn with_stages_per_device(self, v: usize) -> Self {
        Self::named(self.name(), v).unwrap_or(self)
    }

    fn named(name: &str, v: usize) -> Option<Self> {
        Self::all(v).into_iter().find(|schedule| schedule.name() == name)
    }

    /// Makes the list of actions of each device, for any number of devices and micro-batches from 1.
    ///
    /// # Errors
    /// If one of the numbers is 0, or their product is beyond any real step.
    pub fn actions(
        self,
        devices: usize,
        micro_batches: usize,
        recompute: Recompute,
    ) -> Result<Actions, ScheduleError> {
        self.actions_by_stage(devices, micro_batches, |_| recompute)
    }

    /// Makes the actions with the recomputation of each stage.
    ///
    /// # Errors
    /// As for [`actions`](Self::actions).
    pub fn actions_by_stage(
        self,
        devices: usize,
        micro_batches: usize,
        recompute: impl Fn(StageId) -> Recompute,
    ) -> Result<Actions, ScheduleError> {
        self.check(devices, micro_batches)?;
        if self.is_automatic() {
            return ScheduleRecipe::equal(self, devices).actions_by_stage(micro_batches, recompute);
        }
        let lists = self.lists(devices, micro_batches);
        Actions::new(lists.into_iter().map(|list| recompute::weave(list, &recompute)).collect())
    }

    /// Makes the lists without recomputes. For an automatic schedule, which needs a recipe, makes those of a
    /// similar named schedule.
    pub(super) fn lists(self, p: usize, m: usize) -> Vec<Vec<Action>> {
        match self {
            Self::GPipe => breadth_first::lists(p, 1, m),
            Self::OneFOneB | Self::Auto => one_f_one_b::lists(p, m),
            Self::Interleaved { stages_per_device: v } => interleaved::lists(p, v, m),
            Self::BreadthFirst { stages_per_device: v } => breadth_first::lists(p, v, m),
            Self::ZeroBubbleH1 => zero_bubble::lists(p, 1, m),
            Self::InterleavedZeroBubble { stages_per_device: v }
            | Self::AutoInterleaved { stages_per_device: v } => zero_bubble::lists(p, v, m),
            Self::ZeroBubbleV | Self::AutoV => zero_bubble_v::lists(p, m),
        }
    }

    pub(super) fn check(self, devices: usize, micro_batches: usize) -> Result<(), ScheduleError> {
        let numbers = [
            ("devices", devices),
            ("micro-batches", micro_batches),
            ("stages per device", self.stages_per_device()),
        ];
        if let Some((what, _)) = numbers.into_iter().find(|&(_, number)| number == 0) {
            return Err(ScheduleError::Zero { what });
        }
        let stages = (devices as u128).saturating_mul(self.stages_per_device() as u128);
        // Zero-bubble V makes 2p − 1 micro-batches even if fewer are kept.
        let is_v = matches!(self, Self::ZeroBubbleV | Self::AutoV);
        let made = (micro_batches as u128).max(if is_v { stages } else { 1 });
        if stages.saturating_mul(made) > LARGEST {
            let micro_batches = micro_batches as u128;
            return Err(ScheduleError::TooLarge { stages, micro_batches, limit: LARGEST });
        }
        Ok(())
    }

    const fn name(self) -> &'static str {
        match self {
            Self::GPipe => "gpipe",
            Self::OneFOneB => "1f1b",
            Self::Interleaved { .. } => "interleaved",
            Self::BreadthFirst { .. } => "breadth-first",
            Self::ZeroBubbleH1 => "zero-bubble-h1",
            Self::InterleavedZeroBubble { .. } => "interleaved-zero-bubble",
            Self::ZeroBubbleV => "zero-bubble-v",
            Self::Auto => "auto",
            Self::AutoInterleaved { .. } => "auto-interleaved",
            Self::AutoV => "auto-v",
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Interleaved { stages_per_device: v }
            | Self::BreadthFirst { stages_per_device: v }
            | Self::InterleavedZeroBubble { stages_per_device: v }
            | Self::AutoInterleaved { stages_per_device: v } => {
                f.pad(&format!("{}-{v}", self.name()))
            }
            _ => f.pad(self.name()),
        }
    }
}

impl FromStr for Schedule {
    type Err = ScheduleError;

    /// Parses the output of `Display`; `interleaved` without a number has 2 stages on each device.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let numbered = || {
            let (name, v) = text.rsplit_once('-')?;
            let schedule = Self::named(name, v.parse().ok()?)?;
            // Compared with its own text, so that `gpipe-2` and `interleaved-02` are refused.
            (schedule.to_string() == text).then_some(schedule)
        };
        let schedule = Self::named(text, 2).or_else(numbered);
        schedule.ok_or_else(|| ScheduleError::UnknownName { name: text.to_owned() })
    }
}

impl TryFrom<String> for Schedule {
    type Error = ScheduleError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Schedule> for String {
    fn from(schedule: Schedule) -> Self {
        schedule.to_string()
    }
}
