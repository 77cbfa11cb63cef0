//! Validated actions of every device, in execution order.

use super::recompute;
use super::validate::{self, Facts};
use super::{Action, ActionKind, DeviceId, MicroBatchId, Recompute, ScheduleError, StageId};

/// Lists of actions, one for each device. They are validated on creation, so they can always be run.
///
/// Created by [`Schedule::actions`](super::Schedule::actions), or parsed from a text with one line for each
/// device:
///
/// ```
/// use brimful_plan::schedule::Actions;
/// let mine: Actions = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n".parse()?;
/// assert_eq!((mine.stages(), mine.micro_batches()), (2, 2));
///
/// let error = "0F0,0F1,0B0\n1F0,1B0,1F1,1B1".parse::<Actions>().unwrap_err();
/// assert!(error.to_string().starts_with("0B1 is missing"));
/// # Ok::<(), brimful_plan::schedule::ScheduleError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Actions {
    lists: Vec<Vec<Action>>,
    facts: Facts,
}

impl Actions {
    /// Creates actions from one list for each device, and checks that:
    ///
    /// 1. each stage is on one device and runs each micro-batch forward once and backward once, whole (B)
    ///    or split (I before W), after its forward; a recompute, if any, in between;
    /// 2. neighbouring stages run the micro-batches in one order, so that plain channels can connect them;
    /// 3. no device waits for ever when a full channel blocks its sender (see
    ///    [`channel_capacity`](Self::channel_capacity)).
    ///
    /// # Errors
    /// With the broken rule and a grid in which the offending cells are marked.
    pub fn new(lists: Vec<Vec<Action>>) -> Result<Self, ScheduleError> {
        match validate::facts(&lists) {
            Ok(facts) => Ok(Self { lists, facts }),
            Err(violation) => Err(violation.show(&lists)),
        }
    }

    /// Returns the same work in two phases: all forwards, then all backwards, each in their present order,
    /// with the recomputation of each stage.
    ///
    /// # Errors
    /// When the result would be too large.
    pub fn in_two_phases(
        &self,
        recompute: impl Fn(StageId) -> Recompute,
    ) -> Result<Self, ScheduleError> {
        let phases = |list: &Vec<Action>| {
            let of = |wanted: fn(ActionKind) -> bool| list.iter().filter(move |a| wanted(a.kind));
            // Recomputes are left out and inserted anew: with all forwards first, other micro-batches need a
            // recompute.
            let forwards = of(|kind| kind == ActionKind::Forward);
            let backwards = of(|kind| !matches!(kind, ActionKind::Forward | ActionKind::Recompute));
            recompute::weave(forwards.chain(backwards).copied().collect(), &recompute)
        };
        Self::new(self.lists.iter().map(phases).collect())
    }

    /// Returns the list of each device.
    #[must_use]
    pub fn lists(&self) -> &[Vec<Action>] {
        &self.lists
    }

    /// Returns the number of devices.
    #[must_use]
    pub fn devices(&self) -> usize {
        self.lists.len()
    }

    /// Returns the number of stages (letter s).
    #[must_use]
    pub fn stages(&self) -> usize {
        self.facts.order.device_of.len()
    }

    pub(crate) fn last_stage(&self) -> StageId {
        StageId::at(self.stages() - 1)
    }

    /// Returns the number of micro-batches (letter m).
    #[must_use]
    pub fn micro_batches(&self) -> usize {
        self.facts.order.micro_batches
    }

    /// Returns the device of each stage, in the order of the stages.
    #[must_use]
    pub fn placement(&self) -> &[DeviceId] {
        &self.facts.order.device_of
    }

    /// Returns whether the stage recomputes the micro-batch's forward, so that the first forward need not
    /// keep activations. False for stages and micro-batches that do not exist.
    #[must_use]
    pub fn is_recomputed(&self, stage: StageId, micro_batch: MicroBatchId) -> bool {
        stage.index() < self.stages()
            && micro_batch.index() < self.micro_batches()
            && self.facts.order.done(stage, micro_batch).has(ActionKind::Recompute)
    }

    /// Returns the largest number of micro-batches whose activations the stage holds at one time; 0 for a
    /// stage that does not exist.
    #[must_use]
    pub fn held(&self, stage: StageId) -> usize {
        self.facts.held.get(stage.index()).copied().unwrap_or(0)
    }

    /// Returns the smallest capacity of the channels between stages with which no device waits for ever. A sender
    /// waits while its channel is full. The capacity is 1 for every [`Schedule`] except breadth-first on several
    /// devices, where boundaries queue until the whole mini-batch has passed a stage. Custom lists may need more
    /// than 1, too.
    ///
    /// [`Schedule`]: super::Schedule
    #[must_use]
    pub fn channel_capacity(&self) -> usize {
        self.facts.channel_capacity
    }
}
