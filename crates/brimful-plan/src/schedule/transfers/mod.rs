//! Transfers between a device and host memory during a step: offloaded weights, their gradients, and
//! boundaries.
//!
//! A device has a few *device buffers*, each as large as its largest offloaded stage. A stage's
//! weights are fetched into a device buffer as soon as one is free, and stay until other weights are needed sooner.
//! So with two device buffers, one stage computes while the next one's weights are in flight:
//!
//! ```text
//! actions   0F0 0F1 1F0 1F1 2F0 2F1 2B1 2B0 1B1 1B0 0B1 0B0
//! buffer 1  0────── 2────────────────────── 0──────────────
//! buffer 2  1──────────────────────────────────────
//! ```
//!
//! Transfers are data, like actions: the same list is validated, simulated, drawn and executed.

mod check;
mod error;
mod held;
mod host_link;
mod make;
mod play;

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Action, Actions, DeviceId, MicroBatchId, StageId};
pub use error::{TransferError, TransferRule};
pub use play::simulate_transfers;

/// Memory that data stay in between their uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Location {
    /// Device memory: the data are always there.
    #[default]
    Device,
    /// Host memory (offloaded): the data are copied to the device on demand.
    Host,
}

/// Memory that a stage's data stay in, and whether it is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StageLocation {
    /// Place of the weights, their gradients and the optimizer's state.
    pub weights: Location,
    /// Place of the stage's input (before its forward, and between forward and recompute), and of the input's
    /// gradient.
    pub boundaries: Location,
    /// Whether any parameter is trained: a frozen stage has no gradients to send to the host.
    pub trained: bool,
}

impl StageLocation {
    /// Trained stage with everything on its device.
    pub const DEVICE: Self =
        Self { weights: Location::Device, boundaries: Location::Device, trained: true };
    /// Trained stage with offloaded weights; its boundaries stay on the device.
    pub const HOST: Self = Self { weights: Location::Host, ..Self::DEVICE };
}

/// Kind and direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TransferKind {
    /// Sends a stage's summed gradients to the host; then their device memory is free.
    #[serde(alias = "gradients-home")]
    OffloadGradients,
    /// Sends an updated stage's weights and its optimizer's state to the host.
    OffloadState,
    /// Frees a stage's device buffer. Copies nothing and takes no time: the host has the weights.
    Release,
    /// Sends a stage's input to the host, after the forward of the previous stage. The model's own input is
    /// sent after the forward of the first stage.
    BoundaryOut,
    /// Sends the gradient of a stage's input to the host, after the stage's backward.
    GradientOut,
    /// Fetches a stage's weights from the host into a free device buffer.
    Fetch,
    /// Fetches the optimizer's state of a stage that is about to be updated, and its gradients if these are on the
    /// host. The state of a step's last stages may be fetched at the end of the step, for their update in the next
    /// one.
    FetchState,
    /// Copies a stage's input back to the device, for its forward or its recompute.
    BoundaryIn,
    /// Copies the gradient of a stage's input back to the device, for the backward of the previous stage.
    GradientIn,
}

impl TransferKind {
    /// All kinds, in the order of transfers that start together: transfers that free memory come first.
    pub const ALL: [Self; 9] = [
        Self::OffloadGradients,
        Self::OffloadState,
        Self::Release,
        Self::BoundaryOut,
        Self::GradientOut,
        Self::Fetch,
        Self::FetchState,
        Self::BoundaryIn,
        Self::GradientIn,
    ];

    /// Returns the name in prose.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::OffloadGradients => "offload gradients",
            Self::OffloadState => "offload state",
            Self::Release => "release",
            Self::BoundaryOut => "boundary out",
            Self::GradientOut => "gradient out",
            Self::Fetch => "fetch",
            Self::FetchState => "fetch state",
            Self::BoundaryIn => "boundary in",
            Self::GradientIn => "gradient in",
        }
    }

    /// Returns the letter of this kind in the file of a run. There, actions have capital letters, and causes of
    /// waits have other small letters.
    #[must_use]
    pub const fn letter(self) -> char {
        match self {
            Self::OffloadGradients => 'h',
            Self::OffloadState => 't',
            Self::Release => 'r',
            Self::BoundaryOut => 'o',
            Self::GradientOut => 'u',
            Self::Fetch => 'f',
            Self::FetchState => 's',
            Self::BoundaryIn => 'i',
            Self::GradientIn => 'd',
        }
    }

    /// Returns whether it copies to the device; false for a release.
    #[must_use]
    pub const fn is_inward(self) -> bool {
        matches!(self, Self::Fetch | Self::FetchState | Self::BoundaryIn | Self::GradientIn)
    }

    /// Returns whether it copies to the host; false for a release.
    #[must_use]
    pub const fn is_outward(self) -> bool {
        matches!(
            self,
            Self::OffloadGradients | Self::OffloadState | Self::BoundaryOut | Self::GradientOut
        )
    }
}

/// Transfer of a device's list. The transfer *starts* right before action number `before` is run, without
/// blocking. Stream fences make it wait for its own dependencies (the actions before it, and the release that
/// freed its memory), and make the actions that need it wait for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Transfer {
    /// Kind of the transfer.
    pub kind: TransferKind,
    /// Stage; a boundary belongs to the stage that it enters.
    pub stage: StageId,
    /// Micro-batch of a boundary or its gradient.
    pub micro_batch: Option<MicroBatchId>,
    /// Index, in the device's list, of the action before which the transfer starts; the list's length for
    /// transfers after the last action.
    pub before: usize,
}

impl Transfer {
    /// Returns whether a fetched stage's gradients are complete before its weights are released again.
    /// `following` are the transfers after the fetch.
    #[must_use]
    pub fn completes_gradients<'a>(self, following: impl IntoIterator<Item = &'a Self>) -> bool {
        let ends = [TransferKind::OffloadGradients, TransferKind::Release];
        let mut following = following.into_iter().filter(|one| one.stage == self.stage);
        let end = following.find(|one| ends.contains(&one.kind));
        end.is_some_and(|one| one.kind == TransferKind::OffloadGradients)
    }
}

impl fmt::Display for Transfer {
    /// Writes `fetch 2` or `boundary out 2.5`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.name(), self.stage)?;
        self.micro_batch.map_or(Ok(()), |micro_batch| write!(f, ".{micro_batch}"))
    }
}

/// Data that a transfer copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Payload {
    Weights(StageId),
    Boundary(StageId, MicroBatchId),
    Gradient(StageId, MicroBatchId),
}

impl Payload {
    fn of(one: Transfer) -> Self {
        match (one.kind, one.micro_batch) {
            (TransferKind::GradientOut | TransferKind::GradientIn, Some(i)) => {
                Self::Gradient(one.stage, i)
            }
            (_, Some(i)) => Self::Boundary(one.stage, i),
            (_, None) => Self::Weights(one.stage),
        }
    }
}

/// Validated transfers of every device, in the order in which they start. They are validated on creation, so
/// they can always be run with their actions.
///
/// ```
/// use brimful_plan::schedule::{Recompute, Schedule};
/// use brimful_plan::schedule::{TransferKind, Transfers, StageLocation};
///
/// let schedule = Schedule::BreadthFirst { stages_per_device: 8 };
/// let actions = schedule.actions(1, 4, Recompute::Always)?;
/// let transfers = Transfers::new(&actions, &[StageLocation::HOST; 8], 2)?;
/// // Each stage is fetched twice, forward and back, but two stay in device buffers in between.
/// let fetches = transfers.of(0).iter().filter(|one| one.kind == TransferKind::Fetch);
/// assert_eq!(fetches.count(), 8 + 6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfers {
    lists: Vec<Vec<Transfer>>,
    locations: Vec<StageLocation>,
    device_buffers: usize,
}

impl Transfers {
    /// Makes the transfers of a training step. `locations` has one element for each stage. Every device has
    /// `device_buffers` device buffers. With one buffer, nothing overlaps; more than two buffers help if fetches
    /// are uneven.
    ///
    /// # Errors
    /// If `locations` does not match the schedule's stages, or there is no device buffer.
    pub fn new(
        actions: &Actions,
        locations: &[StageLocation],
        device_buffers: usize,
    ) -> Result<Self, TransferError> {
        Self::of_lists(actions.lists(), locations, device_buffers)
    }

    /// Makes the transfers of lists that are a part of a schedule, such as the forwards of an evaluation,
    /// which fetch weights once.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn of_lists(
        lists: &[Vec<Action>],
        locations: &[StageLocation],
        device_buffers: usize,
    ) -> Result<Self, TransferError> {
        check::numbers(lists, locations, device_buffers)?;
        let transfers =
            lists.iter().map(|list| make::transfers(list, locations, device_buffers)).collect();
        Self::given(lists, locations, device_buffers, transfers)
    }

    /// Takes custom transfers, a list for each device in the order in which they start, and checks that:
    ///
    /// 1. an offloaded stage is used only between its fetch and its release, and every fetched stage is
    ///    released;
    /// 2. a stage is fetched only if a device buffer is free;
    /// 3. gradients are sent to the host once, after their stage's last backward, if an offloaded stage is
    ///    trained;
    /// 4. an offloaded boundary is sent after the forward that makes it, and its gradient after the
    ///    backward; both are back before the actions that need them.
    ///
    /// # Errors
    /// With the broken rule.
    pub fn given(
        lists: &[Vec<Action>],
        locations: &[StageLocation],
        device_buffers: usize,
        transfers: Vec<Vec<Transfer>>,
    ) -> Result<Self, TransferError> {
        check::numbers(lists, locations, device_buffers)?;
        if transfers.len() != lists.len() {
            return Err(TransferError::WrongDevices {
                given: transfers.len(),
                needed: lists.len(),
            });
        }
        for (d, (list, transfers)) in lists.iter().zip(&transfers).enumerate() {
            check::list(list, transfers, locations, device_buffers)
                .map_err(|rule| TransferError::Broken { device: DeviceId::at(d), rule })?;
        }
        Ok(Self { lists: transfers, locations: locations.to_vec(), device_buffers })
    }

    /// Returns the transfers of a device, in the order in which they start; empty if there is no such device.
    #[must_use]
    pub fn of(&self, device: usize) -> &[Transfer] {
        self.lists.get(device).map_or(&[], Vec::as_slice)
    }

    /// Returns the list of each device.
    #[must_use]
    pub fn lists(&self) -> &[Vec<Transfer>] {
        &self.lists
    }

    /// Returns the location of each stage.
    #[must_use]
    pub fn locations(&self) -> &[StageLocation] {
        &self.locations
    }

    /// Returns the number of device buffers for offloaded stages.
    #[must_use]
    pub fn device_buffers(&self) -> usize {
        self.device_buffers
    }

    /// Returns whether there are no transfers.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lists.iter().all(Vec::is_empty)
    }
}
