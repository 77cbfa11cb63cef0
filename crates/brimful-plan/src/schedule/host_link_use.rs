//! Transfers of a device in a step, and the waits of its compute.

use serde::{Deserialize, Serialize};

use super::{Transfer, TransferKind};

/// Transfer and its time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TransferSpan {
    /// Transfer.
    #[serde(alias = "moved")]
    pub transfer: Transfer,
    /// Start.
    pub start: f64,
    /// End.
    pub end: f64,
    /// Number of bytes transferred.
    pub bytes: u64,
}

/// Causes for which compute waits if weights or boundaries are offloaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Awaited {
    /// A stage's weights, which are in flight.
    Weights,
    /// A boundary or its gradient, in flight between device and host.
    Boundaries,
    /// The memory of gradients that are still being offloaded.
    #[serde(alias = "gradients-room")]
    GradientMemory,
    /// The optimizer's state, which is in flight.
    Update,
}

impl Awaited {
    /// All causes.
    pub const ALL: [Self; 4] =
        [Self::Weights, Self::Boundaries, Self::GradientMemory, Self::Update];

    /// Returns the cause of a wait during which only this kind of transfer runs.
    #[must_use]
    pub const fn of(kind: TransferKind) -> Self {
        match kind {
            TransferKind::Fetch | TransferKind::Release => Self::Weights,
            TransferKind::OffloadGradients => Self::GradientMemory,
            TransferKind::FetchState | TransferKind::OffloadState => Self::Update,
            TransferKind::BoundaryOut
            | TransferKind::BoundaryIn
            | TransferKind::GradientOut
            | TransferKind::GradientIn => Self::Boundaries,
        }
    }

    /// Returns the name in prose.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Boundaries => "boundaries",
            Self::GradientMemory => "gradient memory",
            Self::Update => "optimizer state",
        }
    }

    /// Returns the letter of this cause in the file of a run. No action or transfer has the same letter
    /// (`tests/suite/letters.rs`).
    #[must_use]
    pub const fn letter(self) -> char {
        match self {
            Self::Weights => 'w',
            Self::Boundaries => 'b',
            Self::GradientMemory => 'g',
            Self::Update => 'p',
        }
    }
}

/// Time in which compute had to wait.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct WaitSpan {
    /// Cause of the wait.
    pub awaited: Awaited,
    /// Start.
    pub start: f64,
    /// End.
    pub end: f64,
}

/// Use of a device's host link in one step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct HostLinkUse {
    /// Transfers, sorted by their start; each direction has one at a time. Includes releases, which transfer
    /// nothing and take no time. A skip connection across a boundary is a separate transfer with the boundary's
    /// name.
    #[serde(alias = "moves")]
    pub transfers: Vec<TransferSpan>,
    /// Waits of compute, in order.
    pub waits: Vec<WaitSpan>,
}

impl HostLinkUse {
    /// Returns the start and the end of each transfer and each wait.
    pub(super) fn times(&self) -> impl Iterator<Item = (f64, f64)> + Clone {
        let transfers = self.transfers.iter().map(|span| (span.start, span.end));
        transfers.chain(self.waits.iter().map(|span| (span.start, span.end)))
    }

    /// Returns the transfers without releases, and the waits, with times relative to `origin`.
    pub(super) fn since(&self, origin: f64) -> Self {
        let Self { mut transfers, mut waits } = self.clone();
        transfers.retain(|span| span.transfer.kind != TransferKind::Release);
        let of_transfers = transfers.iter_mut().map(|span| [&mut span.start, &mut span.end]);
        let of_waits = waits.iter_mut().map(|span| [&mut span.start, &mut span.end]);
        of_transfers.chain(of_waits).flatten().for_each(|time| *time -= origin);
        Self { transfers, waits }
    }
}
