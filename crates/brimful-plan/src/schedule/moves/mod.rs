//! What moves between a device and host memory while the device works through its list: weights that
//! live on the host, their gradients, and boundaries.
//!
//! A device has a few *slots*, each as large as its largest stage that lives on the host. A stage's
//! weights are fetched into a slot as soon as one is free and until others are needed sooner, so with
//! two slots one stage computes while the next one's weights are on their way:
//!
//! ```text
//! actions   0F0 0F1 1F0 1F1 2F0 2F1 2B1 2B0 1B1 1B0 0B1 0B0
//! slot 1    0────── 2────────────────────── 0──────────────
//! slot 2    1──────────────────────────────────────
//! ```
//!
//! The list of moves is data, as the list of actions is: the one that is executed is the one that is
//! validated, simulated and drawn.

mod ahead;
mod bus;
mod check;
mod error;
mod held;
mod make;
mod play;

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Action, Actions, DeviceId, MicroBatchId, StageId};
pub use ahead::simulate_moves_ahead;
pub use error::{MoveError, MoveRule};
pub use play::simulate_moves;

/// A memory in which something lives between its uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Home {
    /// The device's own: it is there all the time.
    #[default]
    Device,
    /// The host's: it comes when it is needed, and goes when others are.
    Host,
}

/// Where a stage's things live, and whether it is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StageHome {
    /// Of the weights, and with them of their gradients and the optimizer's state.
    pub weights: Home,
    /// Of what enters the stage, from its making until the forward and between forward and recompute, and of
    /// its gradients.
    pub boundaries: Home,
    /// Whether any parameter is trained: a frozen stage has no gradients to send home.
    pub trained: bool,
}

impl StageHome {
    /// A trained stage that has everything on its device.
    pub const DEVICE: Self =
        Self { weights: Home::Device, boundaries: Home::Device, trained: true };
    /// A trained stage whose weights live on the host; its boundaries stay on the device.
    pub const HOST: Self = Self { weights: Home::Host, ..Self::DEVICE };
}

/// What moves, and which way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MoveKind {
    /// A stage's summed gradients leave for the host; then their memory on the device is free.
    GradientsHome,
    /// A stage's slot is free again. Nothing is copied and it takes no time: the host has the weights.
    Release,
    /// What enters a stage leaves for the host: after the forward of the stage before, or, of the model's
    /// own input, after the first stage's.
    BoundaryOut,
    /// The gradient of what entered a stage leaves for the host, after the stage's backward.
    GradientOut,
    /// A stage's weights come from the host into a free slot.
    Fetch,
    /// What enters a stage comes back, for its forward or its recompute.
    BoundaryIn,
    /// The gradient of what entered a stage comes back, for the backward of the stage before.
    GradientIn,
}

impl MoveKind {
    /// All kinds, in the order of moves that are started at one time: what makes room comes before
    /// what takes it.
    pub const ALL: [Self; 7] = [
        Self::GradientsHome,
        Self::Release,
        Self::BoundaryOut,
        Self::GradientOut,
        Self::Fetch,
        Self::BoundaryIn,
        Self::GradientIn,
    ];

    /// The name in prose.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::GradientsHome => "gradients home",
            Self::Release => "release",
            Self::BoundaryOut => "boundary out",
            Self::GradientOut => "gradient out",
            Self::Fetch => "fetch",
            Self::BoundaryIn => "boundary in",
            Self::GradientIn => "gradient in",
        }
    }

    /// The letter in a run's file, where actions have capitals.
    #[must_use]
    pub const fn letter(self) -> char {
        match self {
            Self::GradientsHome => 'h',
            Self::Release => 'r',
            Self::BoundaryOut => 'o',
            Self::GradientOut => 'u',
            Self::Fetch => 'f',
            Self::BoundaryIn => 'i',
            Self::GradientIn => 'd',
        }
    }

    /// Whether it brings something onto the device; a release goes neither way.
    #[must_use]
    pub const fn is_inward(self) -> bool {
        matches!(self, Self::Fetch | Self::BoundaryIn | Self::GradientIn)
    }

    /// Whether it takes something off the device, over the bus.
    #[must_use]
    pub const fn is_outward(self) -> bool {
        matches!(self, Self::GradientsHome | Self::BoundaryOut | Self::GradientOut)
    }
}

/// One move of a device's list. It is *started* right before action number `before` is run: nobody
/// waits for it then. What it needs (the actions before it, and the release that made its room)
/// comes first on the streams, and who needs it waits for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Move {
    /// What moves.
    pub kind: MoveKind,
    /// Of which stage; a boundary is that of the stage which it enters.
    pub stage: StageId,
    /// Of which micro-batch, where it is a boundary or its gradient.
    pub micro_batch: Option<MicroBatchId>,
    /// The number of the action in its device's list; the length of the list is after the last one.
    pub before: usize,
}

impl fmt::Display for Move {
    /// `fetch 2`, `boundary out 2.5`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.name(), self.stage)?;
        self.micro_batch.map_or(Ok(()), |micro_batch| write!(f, ".{micro_batch}"))
    }
}

/// What a move brings or takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Moved {
    Weights(StageId),
    Boundary(StageId, MicroBatchId),
    Gradient(StageId, MicroBatchId),
}

impl Moved {
    fn of(one: Move) -> Self {
        match (one.kind, one.micro_batch) {
            (MoveKind::GradientOut | MoveKind::GradientIn, Some(i)) => Self::Gradient(one.stage, i),
            (_, Some(i)) => Self::Boundary(one.stage, i),
            (_, None) => Self::Weights(one.stage),
        }
    }
}

/// The moves of every device, in the order in which they are started. Whoever holds them may run them
/// with their actions: they were validated when they were made.
///
/// ```
/// # use brimful_plan as brimful;
/// use brimful::schedule::{MoveKind, Moves, Recompute, Schedule, StageHome};
///
/// let schedule = Schedule::BreadthFirst { stages_per_device: 8 };
/// let actions = schedule.actions(1, 4, Recompute::Always)?;
/// let moves = Moves::new(&actions, &[StageHome::HOST; 8], 2)?;
/// // Once forward and once back, but for the two that are there at the turn.
/// let fetches = moves.of(0).iter().filter(|one| one.kind == MoveKind::Fetch);
/// assert_eq!(fetches.count(), 8 + 6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moves {
    lists: Vec<Vec<Move>>,
    homes: Vec<StageHome>,
    slots: usize,
}

impl Moves {
    /// The moves of a training step. `homes` has one for each stage; every device has `slots` slots:
    /// with one nothing overlaps, more than two help where fetches are uneven.
    ///
    /// # Errors
    /// Where the homes are not those of the schedule's stages, or there is no slot.
    pub fn new(actions: &Actions, homes: &[StageHome], slots: usize) -> Result<Self, MoveError> {
        Self::of_lists(actions.lists(), homes, slots)
    }

    /// The moves of the lists that are really run, where those are a part of a schedule's: of an evaluation the
    /// forwards alone, for which weights cross once.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_lists(
        lists: &[Vec<Action>],
        homes: &[StageHome],
        slots: usize,
    ) -> Result<Self, MoveError> {
        check::numbers(lists, homes, slots)?;
        let moves = lists.iter().map(|list| make::moves(list, homes, slots)).collect();
        Self::given(lists, homes, slots, moves)
    }

    /// Takes moves of one's own, a list for each device in the order in which they are started, and
    /// checks them:
    ///
    /// 1. a stage that lives on the host is used only between its fetch and its release, and every
    ///    stage that was fetched is released;
    /// 2. there are never more stages in slots than slots;
    /// 3. gradients go home once, after their stage's last backward, where a stage that lives on the
    ///    host is trained;
    /// 4. a boundary that lives on the host leaves after the forward that makes it, and its gradient after the
    ///    backward; they are back before what needs them.
    ///
    /// # Errors
    /// With the broken rule.
    pub fn given(
        lists: &[Vec<Action>],
        homes: &[StageHome],
        slots: usize,
        moves: Vec<Vec<Move>>,
    ) -> Result<Self, MoveError> {
        check::numbers(lists, homes, slots)?;
        if moves.len() != lists.len() {
            return Err(MoveError::WrongDevices { given: moves.len(), needed: lists.len() });
        }
        for (d, (list, moves)) in lists.iter().zip(&moves).enumerate() {
            check::list(list, moves, homes, slots)
                .map_err(|rule| MoveError::Broken { device: DeviceId::at(d), rule })?;
        }
        Ok(Self { lists: moves, homes: homes.to_vec(), slots })
    }

    /// The moves of a device, in the order in which they are started; none of one that is not there.
    #[must_use]
    pub fn of(&self, device: usize) -> &[Move] {
        self.lists.get(device).map_or(&[], Vec::as_slice)
    }

    /// The list of each device.
    #[must_use]
    pub fn lists(&self) -> &[Vec<Move>] {
        &self.lists
    }

    /// Where each stage lives.
    #[must_use]
    pub fn homes(&self) -> &[StageHome] {
        &self.homes
    }

    /// How many stages that live on the host a device can have at one time.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Whether nothing moves.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lists.iter().all(Vec::is_empty)
    }
}
