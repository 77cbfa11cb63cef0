//! What a thread has queued on accelerators so far, for the work of other streams to come after.

use brimful_torch::stream::{Event, Stream};
use tch::{Device, Tensor};

use crate::Result;

/// A mark in the thread's stream of each of some accelerators.
#[derive(Debug)]
pub(crate) struct Queued(Vec<(Device, Event)>);

impl Queued {
    /// By this thread, on the accelerators that these tensors are on.
    pub(crate) fn behind<'a>(tensors: impl Iterator<Item = &'a Tensor>) -> Result<Self> {
        Self::now(accelerators(tensors.map(Tensor::device)))
    }

    /// By this thread on those of these accelerators where it has entered another stream than all
    /// threads use.
    pub(crate) fn apart(devices: &[Device]) -> Result<Self> {
        let mut apart = Vec::new();
        for &device in devices {
            // Work on the common stream is in order by itself; an event for it would be a launch for nothing.
            if Stream::current(device)? != Stream::common(device)? {
                apart.push(device);
            }
        }
        Self::now(apart)
    }

    /// By this thread on the same accelerators.
    pub(crate) fn since(&self) -> Result<Self> {
        Self::now(self.0.iter().map(|(device, _)| *device))
    }

    fn now(devices: impl IntoIterator<Item = Device>) -> Result<Self> {
        let mark = |device| Ok((device, Event::after(Stream::current(device)?)?));
        Ok(Self(devices.into_iter().map(mark).collect::<Result<_>>()?))
    }

    /// When what was queued on that accelerator is done; none where nothing was.
    pub(crate) fn on(&self, device: Device) -> Option<&Event> {
        self.0.iter().find(|(other, _)| *other == device).map(|(_, event)| event)
    }

    /// Lets this thread's work on those accelerators from now on come after it.
    pub(crate) fn precede(&self) -> Result<()> {
        for (device, event) in &self.0 {
            // The stream waits, not the host: this thread goes on launching.
            Stream::current(*device)?.wait(event)?;
        }
        Ok(())
    }
}

/// The accelerators among these devices, each once.
pub(crate) fn accelerators(devices: impl Iterator<Item = Device>) -> Vec<Device> {
    let mut all = Vec::new();
    for device in devices.filter(|device| *device != Device::Cpu) {
        if !all.contains(&device) {
            all.push(device);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_queues_nothing_and_each_accelerator_counts_once() {
        use Device::{Cpu, Cuda};
        let given = [Cpu, Cuda(1), Cuda(0), Cpu, Cuda(1)].into_iter();
        assert_eq!(accelerators(given), [Cuda(1), Cuda(0)]);
        let host = Tensor::from_slice(&[1.0]);
        let queued = Queued::behind([&host].into_iter()).expect("nothing");
        assert!(queued.on(Cpu).is_none());
        queued.precede().expect("nothing to come after");
    }
}
