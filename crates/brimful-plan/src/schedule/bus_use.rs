//! What crossed a device's bus in a step, and what its compute waited for.

use serde::{Deserialize, Serialize};

use super::{Move, MoveKind};

/// A move and its time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MoveSpan {
    /// What moved.
    pub moved: Move,
    /// From when.
    pub start: f64,
    /// Until when.
    pub end: f64,
    /// The bytes that crossed.
    pub bytes: u64,
}

/// What compute waits for where something lives on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Awaited {
    /// A stage's weights, which are on their way.
    Weights,
    /// What enters a stage, or its gradient, on its way from the host or to it.
    Boundaries,
    /// The memory of gradients that have not left yet.
    GradientsRoom,
    /// The optimizer at home, which has not come to a stage's weights yet.
    Update,
}

impl Awaited {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Weights, Self::Boundaries, Self::GradientsRoom, Self::Update];

    /// What compute waits for while this moves, and nothing else runs.
    #[must_use]
    pub const fn of(kind: MoveKind) -> Self {
        match kind {
            MoveKind::Fetch | MoveKind::Release => Self::Weights,
            MoveKind::GradientsHome => Self::GradientsRoom,
            MoveKind::BoundaryOut
            | MoveKind::BoundaryIn
            | MoveKind::GradientOut
            | MoveKind::GradientIn => Self::Boundaries,
        }
    }

    /// The name in prose.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Boundaries => "boundaries",
            Self::GradientsRoom => "gradients' room",
            Self::Update => "the optimizer at home",
        }
    }

    /// The letter in a run's file, which no action or move has.
    #[must_use]
    pub const fn letter(self) -> char {
        match self {
            Self::Weights => 'w',
            Self::Boundaries => 'b',
            Self::GradientsRoom => 'g',
            Self::Update => 'p',
        }
    }
}

/// A time in which compute had to wait.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct WaitSpan {
    /// What for.
    pub awaited: Awaited,
    /// From when.
    pub start: f64,
    /// Until when.
    pub end: f64,
}

/// The use of a device's bus in one step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BusUse {
    /// What moved, by its beginning, one at a time each way. Releases are among it, which cross nothing and
    /// take no time. What a skip brings to a boundary crosses by itself, as a move of the same name.
    pub moves: Vec<MoveSpan>,
    /// What compute waited for, in order.
    pub waits: Vec<WaitSpan>,
}

impl BusUse {
    /// When each move began and ended, and each wait.
    pub(super) fn times(&self) -> impl Iterator<Item = (f64, f64)> + Clone {
        let moves = self.moves.iter().map(|span| (span.start, span.end));
        moves.chain(self.waits.iter().map(|span| (span.start, span.end)))
    }

    /// What crossed the bus, and the waits, with times from this moment on.
    pub(super) fn crossed_since(&self, moment: f64) -> Self {
        let Self { mut moves, mut waits } = self.clone();
        moves.retain(|span| span.moved.kind != MoveKind::Release);
        let of_moves = moves.iter_mut().map(|span| [&mut span.start, &mut span.end]);
        let of_waits = waits.iter_mut().map(|span| [&mut span.start, &mut span.end]);
        of_moves.chain(of_waits).flatten().for_each(|time| *time -= moment);
        Self { moves, waits }
    }
}
