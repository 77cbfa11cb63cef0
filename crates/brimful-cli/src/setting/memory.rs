//! Memories with the limit that was asked for.

use anyhow::Result;
use brimful::Bytes;
use brimful::memory::{Arena, Memory};
use tch::Device;

/// The memory of each device, with this limit; on a CPU each has an account of its own.
pub fn accounts(devices: &[Device], limit: Option<Bytes>) -> Result<Vec<Memory>> {
    let account = |(number, device): (usize, &Device)| {
        let memory = match device {
            Device::Cpu => Memory::Arena(Arena::new(&format!("device {number}"))),
            accelerator => Memory::of(*accelerator)?,
        };
        within(memory, limit)
    };
    devices.iter().enumerate().map(account).collect()
}

/// The memory with this limit, if there is one.
pub fn within(memory: Memory, limit: Option<Bytes>) -> Result<Memory> {
    if let Some(limit) = limit {
        memory.set_limit(Some(limit.0))?;
    }
    Ok(memory)
}

/// How much of the device's memory there is for a model; none where nothing limits it.
pub fn room(device: Device, limit: Option<Bytes>) -> Result<Option<Bytes>> {
    match device {
        Device::Cpu => Ok(limit),
        accelerator => Ok(within(Memory::of(accelerator)?, limit)?.usage()?.available),
    }
}
