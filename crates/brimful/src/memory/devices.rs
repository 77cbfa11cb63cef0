//! Lists the devices of this machine with their memory.

use brimful_torch::{cuda, memory as torch_memory};
use tch::Device;

use super::host::{HostMemory, host};
use crate::Result;
use crate::device::name;
use brimful_plan::bytes::Bytes;

/// Device and its memory.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The device, as tch identifies it.
    pub device: Device,
    /// The name that [`device::find`](crate::device::find) takes: `cpu`, `cuda:0`.
    pub name: String,
    /// Model name given by its maker.
    pub model: String,
    /// Total memory.
    pub total: Bytes,
    /// Free memory.
    pub free: Bytes,
}

/// Lists the devices of the machine, the CPU first.
///
/// # Errors
/// When a device does not respond.
pub fn devices() -> Result<Vec<DeviceInfo>> {
    let HostMemory { total, available } = host()?;
    let model = cpu_model().unwrap_or_else(|| "CPU".into());
    let cpu = DeviceInfo { device: Device::Cpu, name: "cpu".into(), model, total, free: available };
    let accelerators = (0..cuda::device_count()).map(describe);
    std::iter::once(Ok(cpu)).chain(accelerators).collect()
}

fn describe(index: usize) -> Result<DeviceInfo> {
    let device = Device::Cuda(index);
    let memory = torch_memory::device_memory(device)?;
    Ok(DeviceInfo {
        device,
        name: name(device),
        model: cuda::device_name(index)?,
        total: Bytes(memory.total),
        free: Bytes(memory.free),
    })
}

fn cpu_model() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(": ")?.1.trim().to_owned())
}
