//! Flags of the commands that run a model on samples without training it.

use anyhow::Result;
use brimful::memory::Memory;
use brimful::{Bytes, MicroBatches};
use clap::Args;
use tch::Device;

use super::{device, within, words};

/// Device, memory and micro-batches of an evaluation.
#[derive(Debug, Args)]
pub(crate) struct EvaluationPlace {
    #[arg(long, default_value = "auto", value_name = "N", help = words::ANY_MICRO_BATCH)]
    #[arg(value_parser = words::micro_batch)]
    pub(crate) micro_batch_size: MicroBatches,
    #[arg(long, value_name = "BYTES", help = words::MEMORY_LIMIT)]
    memory_limit: Option<Bytes>,
    #[arg(long, value_name = "NAME", help = words::ANY_DEVICE)]
    device: Option<String>,
}

impl EvaluationPlace {
    /// Returns the chosen device.
    pub(crate) fn device(&self) -> Result<Device> {
        device(self.device.as_deref())
    }

    /// Returns the memory of this device within the limit.
    pub(crate) fn memory(&self, device: Device) -> Result<Memory> {
        within(Memory::of(device)?, self.memory_limit)
    }
}
