//! Stream fences: the work that a thread has queued on accelerators, for which other streams can wait.

use brimful_torch::stream::{Event, Stream};
use tch::{Device, Tensor};

use crate::Result;

/// One event in the thread's stream on each of some accelerators.
#[derive(Debug)]
pub(crate) struct StreamFence(Vec<(Device, Event)>);

impl StreamFence {
    /// Records this thread's work on the accelerators of these tensors.
    pub(crate) fn behind<'a>(tensors: impl Iterator<Item = &'a Tensor>) -> Result<Self> {
        Self::now(accelerators(tensors.map(Tensor::device)))
    }

    /// Records this thread's work on those of these accelerators on which the thread has entered a stream other
    /// than the common one.
    pub(crate) fn apart(devices: &[Device]) -> Result<Self> {
        let mut apart = Vec::new();
        for &device in devices {
            // Work on the common stream is ordered already; an event for it would be a needless launch.
            if Stream::current(device)? != Stream::common(device)? {
                apart.push(device);
            }
        }
        Self::now(apart)
    }

    /// Returns a new fence on the same accelerators, which records this thread's work until now.
    pub(crate) fn since(&self) -> Result<Self> {
        Self::now(self.0.iter().map(|(device, _)| *device))
    }

    fn now(devices: impl IntoIterator<Item = Device>) -> Result<Self> {
        let event = |device| Ok((device, Event::after(Stream::current(device)?)?));
        Ok(Self(devices.into_iter().map(event).collect::<Result<_>>()?))
    }

    /// Returns the event on this accelerator; `None` if nothing was recorded there.
    pub(crate) fn on(&self, device: Device) -> Option<&Event> {
        self.0.iter().find(|(other, _)| *other == device).map(|(_, event)| event)
    }

    /// Makes this thread's later work on the fence's accelerators wait for the events.
    pub(crate) fn precede(&self) -> Result<()> {
        for (device, event) in &self.0 {
            // The stream waits, not the host: this thread keeps launching.
            Stream::current(*device)?.wait(event)?;
        }
        Ok(())
    }
}

/// Returns the accelerators among these devices, each once.
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
    fn a_cpu_records_nothing_and_each_accelerator_counts_once() {
        use Device::{Cpu, Cuda};
        let given = [Cpu, Cuda(1), Cuda(0), Cpu, Cuda(1)].into_iter();
        assert_eq!(accelerators(given), [Cuda(1), Cuda(0)]);
        let host = Tensor::from_slice(&[1.0]);
        let fence = StreamFence::behind([&host].into_iter()).expect("nothing");
        assert!(fence.on(Cpu).is_none());
        fence.precede().expect("nothing to come after");
    }
}
