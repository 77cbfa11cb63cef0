//! Device of stages or of a replica: a CUDA device, or a share of the CPU.

use brimful_torch::threads;
use tch::Device;

use crate::memory::{Arena, Memory};
use crate::{Result, device};

/// Device of a pipeline or of replicas, with one thread that owns the stages or the model on the device.
///
/// A [`tch::Device`] converts into a `DeviceSpec`. A CPU can be named more than once, each time with its own
/// threads and, optionally, an [`Arena`] that counts and limits its memory:
///
/// ```
/// use brimful::DeviceSpec;
/// use brimful::memory::Arena;
///
/// let small = Arena::limited("stage 0", 64 << 20)?;
/// let device = DeviceSpec::cpu().threads(2).arena(small);
/// # Ok::<(), brimful::Error>(())
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct DeviceSpec {
    pub(crate) device: Device,
    pub(crate) threads: Option<usize>,
    pub(crate) arena: Option<Arena>,
}

impl DeviceSpec {
    /// Makes a CPU device. By default, CPU devices share the caller's threads evenly.
    pub fn cpu() -> Self {
        Device::Cpu.into()
    }

    /// Sets the number of threads of each operation on a CPU.
    pub fn threads(self, threads: usize) -> Self {
        Self { threads: Some(threads.max(1)), ..self }
    }

    /// Sets the arena that the device's CPU memory is charged to.
    pub fn arena(self, arena: Arena) -> Self {
        Self { arena: Some(arena), ..self }
    }

    /// Adds an arena to a CPU without one: automatic sizes need counted memory.
    pub(crate) fn counted(self) -> Self {
        match (&self.arena, self.device) {
            (None, Device::Cpu) => self.arena(Arena::new("cpu")),
            _ => self,
        }
    }

    /// Returns the device's memory, if it is tracked: an accelerator's, or an arena's. `None` for a CPU without an
    /// arena.
    pub(crate) fn memory(&self) -> Option<Memory> {
        match (&self.arena, self.device) {
            (Some(arena), Device::Cpu) => Some(Memory::Arena(arena.clone())),
            (None, Device::Cpu) => None,
            (_, accelerator) => Some(Memory::Accelerator(accelerator)),
        }
    }
}

impl From<Device> for DeviceSpec {
    fn from(device: Device) -> Self {
        Self { device, threads: None, arena: None }
    }
}

impl From<Arena> for DeviceSpec {
    fn from(arena: Arena) -> Self {
        Self::cpu().arena(arena)
    }
}

impl From<Memory> for DeviceSpec {
    fn from(memory: Memory) -> Self {
        match memory {
            Memory::Arena(arena) => arena.into(),
            Memory::Accelerator(device) => device.into(),
        }
    }
}

/// Checks that the devices exist. CPU devices without a number of threads share the caller's threads equally.
pub(crate) fn resolved(devices: Vec<DeviceSpec>) -> Result<Vec<DeviceSpec>> {
    let cpus = devices.iter().filter(|device| device.device == Device::Cpu).count();
    // If each CPU device used all threads, there would be more threads than cores, which slows all of them down.
    let share = (threads::threads() / cpus.max(1)).max(1);
    let resolve = |mut spec: DeviceSpec| {
        spec.device = device::find(&device::name(spec.device))?;
        if spec.device == Device::Cpu {
            spec.threads.get_or_insert(share);
        }
        Ok(spec)
    };
    devices.into_iter().map(resolve).collect()
}
