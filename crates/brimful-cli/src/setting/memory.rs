//! Memory accounts with the requested limit.

use anyhow::Result;
use brimful::Bytes;
use brimful::memory::{Arena, Memory};
use tch::Device;

/// Returns the memory of each device with this limit; each CPU device has an account of its own.
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

/// Sets this limit on the memory, if there is one.
pub fn within(memory: Memory, limit: Option<Bytes>) -> Result<Memory> {
    if let Some(limit) = limit {
        memory.set_limit(Some(limit.0))?;
    }
    Ok(memory)
}

/// Returns the bytes that a model may use on the device; none without a limit.
pub fn capacity(device: Device, limit: Option<Bytes>) -> Result<Option<Bytes>> {
    match device {
        Device::Cpu => Ok(limit),
        accelerator => Ok(within(Memory::of(accelerator)?, limit)?.usage()?.available),
    }
}
