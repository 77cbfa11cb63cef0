//! Inserts activation recomputation into a device's list.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{Action, ActionKind, ScheduleError, StageId};

/// Activation recomputation: activations that are not kept, but recomputed for the backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Recompute {
    /// All activations are kept: the fastest mode, which needs the most memory.
    #[default]
    Never,
    /// Activations are kept only if the backward is the next action after the forward, as for GPipe's last
    /// micro-batch and on 1F1B's last stage. Needs as little memory as `Always`, because one micro-batch's
    /// activations are in use during a backward in any case.
    ExceptLast,
    /// No activations are kept.
    Always,
}

impl Recompute {
    /// All modes, from the fastest to the one that needs the least memory.
    pub const ALL: [Self; 3] = [Self::Never, Self::ExceptLast, Self::Always];

    /// Returns the name, as it is shown and parsed.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::ExceptLast => "except-last",
            Self::Always => "always",
        }
    }

    /// Returns whether a backward needs a recompute if it comes after `previous`.
    pub(super) fn applies(self, previous: Option<&Action>, backward: Action) -> bool {
        let forward = Action { kind: ActionKind::Forward, ..backward };
        self == Self::Always || self == Self::ExceptLast && previous != Some(&forward)
    }
}

/// Inserts each recompute directly before its backward, by the mode of its stage.
///
/// This position is early enough: a recompute needs nothing from the next stage, so it runs while the device would
/// otherwise wait for the gradient. Any earlier position would hold the activations for longer and gain nothing.
pub(super) fn weave(list: Vec<Action>, mode: impl Fn(StageId) -> Recompute) -> Vec<Action> {
    let mut woven = Vec::with_capacity(list.len() * 2);
    for action in list {
        if action.kind.passes_gradient() && mode(action.stage).applies(woven.last(), action) {
            woven.push(Action { kind: ActionKind::Recompute, ..action });
        }
        woven.push(action);
    }
    woven
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Recompute {
    type Err = ScheduleError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let mode = Self::ALL.into_iter().find(|mode| mode.name() == name);
        mode.ok_or_else(|| ScheduleError::UnknownRecompute { name: name.to_owned() })
    }
}
