//! How fast the host is for stages that live there: the bus, and the optimizer's update.

use std::time::Instant;

use brimful_torch::autograd::set_gradient;
use brimful_torch::device::synchronize;
use brimful_torch::stream::Stream;
use brimful_torch::transfer;
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::optim::{Method, Optimizer};
use crate::schedule::BusCost;

/// Bytes that are moved each way: enough to tell the bus's speed from the start of a copy.
const MOVED: i64 = 32 << 20;
/// Numbers that are updated: more than a core's caches hold.
const UPDATED: i64 = 1 << 22;
/// What is measured is the least of so many runs, after one that does not count.
const RUNS: usize = 3;

/// What a [plan](crate::plan) of stages that live on the host goes by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HostSpeed {
    /// The way between the device and the host's memory, in bytes a second.
    pub bus: BusCost,
    /// Seconds of the optimizer's update on the host for each number that it trains.
    pub update: f64,
}

impl HostSpeed {
    /// Measures both, within a fraction of a second.
    ///
    /// # Errors
    /// When the device is not here, or memory runs out on it or on the host.
    pub fn measure(device: Device, method: impl Into<Method>) -> Result<Self> {
        Ok(Self { bus: bus(device)?, update: update(method.into())? })
    }
}

fn bus(device: Device) -> Result<BusCost> {
    let room = || Tensor::f_empty([MOVED], (Kind::Uint8, device));
    let (arriving, leaving) = (room()?, room()?);
    let (source, target) = (transfer::room_for(&arriving)?, transfer::room_for(&leaving)?);
    let streams = [Stream::new(device)?, Stream::new(device)?];
    let inward = || -> Result<()> {
        let _inward = streams[0].enter()?;
        Ok(transfer::copy(&arriving, &source)?)
    };
    let outward = || -> Result<()> {
        let _outward = streams[1].enter()?;
        Ok(transfer::copy(&target, &leaving)?)
    };
    let both = || inward().and_then(|()| outward());
    let rate =
        |copy: &dyn Fn() -> Result<()>| Ok::<_, crate::Error>(MOVED as f64 / least(device, copy)?);
    Ok(BusCost { inward: rate(&inward)?, outward: rate(&outward)?, both: rate(&both)? })
}

fn update(method: Method) -> Result<f64> {
    let numbers = Tensor::f_zeros([UPDATED], (Kind::Float, Device::Cpu))?;
    let mut parameter = numbers.f_set_requires_grad(true)?;
    let gradient = Tensor::f_ones([UPDATED], (Kind::Float, Device::Cpu))?;
    set_gradient(&mut parameter, Some(&gradient))?;
    let mut optimizer = Optimizer::for_named(vec![("updated".to_owned(), parameter)], method)?;
    // The first run, which does not count, makes the optimizer's state.
    Ok(least(Device::Cpu, || optimizer.step())? / UPDATED as f64)
}

/// Seconds until the device has done the work.
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
    // No clock's tick is a rate.
    Ok(least.max(f64::MIN_POSITIVE))
}
