//! Transfers of tensors between stages, and between host and device, with their times.

mod clock;
mod stage_transfer;

pub(crate) use clock::TransferClock;
pub(crate) use stage_transfer::{HostStaging, StageTransfer, Tensors};
