//! Measures the host link (PCIe) for plans with offloaded stages.

use std::time::Instant;

use brimful_torch::device::synchronize;
use brimful_torch::stream::Stream;
use brimful_torch::transfer;
use tch::{Device, Kind, Tensor};

use crate::Result;
use brimful_plan::schedule::HostLinkCost;

/// Bytes that are copied each way: enough to separate bandwidth from a copy's latency.
const MOVED: i64 = 32 << 20;
/// Number of timed runs, of which the fastest counts; one untimed run comes before them.
const RUNS: usize = 3;

/// Measures the bandwidth between the device and host memory, in bytes a second, within a fraction of a second.
///
/// # Errors
/// When the device does not exist, or memory runs out on it or on the host.
pub fn measure_host_link(device: Device) -> Result<HostLinkCost> {
    let buffer = || Tensor::f_empty([MOVED], (Kind::Uint8, device));
    let (incoming, outgoing) = (buffer()?, buffer()?);
    let (source, target) = (transfer::empty_pinned(&incoming)?, transfer::empty_pinned(&outgoing)?);
    let streams = [Stream::new(device)?, Stream::new(device)?];
    let inward = || -> Result<()> {
        let _inward = streams[0].enter()?;
        Ok(transfer::copy(&incoming, &source)?)
    };
    let outward = || -> Result<()> {
        let _outward = streams[1].enter()?;
        Ok(transfer::copy(&target, &outgoing)?)
    };
    let both = || inward().and_then(|()| outward());
    let rate =
        |copy: &dyn Fn() -> Result<()>| Ok::<_, crate::Error>(MOVED as f64 / least(device, copy)?);
    Ok(HostLinkCost { inward: rate(&inward)?, outward: rate(&outward)?, both: rate(&both)? })
}

/// Returns the shortest time of all runs, in seconds, until the device has done the work.
fn least(device: Device, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut least = f64::INFINITY;
    for run in 0..=RUNS {
        synchronize(device)?;
        let start = Instant::now();
        work()?;
        synchronize(device)?;
        if run > 0 {
            least = least.min(start.elapsed().as_secs_f64());
        }
    }
    // Keeps rates finite if the clock did not advance.
    Ok(least.max(1e-9))
}
