//! Random state that can be put back, so that a failed step draws no numbers; and seeds for those
//! who draw in parallel.

use brimful_torch::random::{
    GeneratorState, OwnGenerator, generator_state, seed_generator, set_generator_state,
};
use tch::{Device, Kind, Tensor};

use crate::{Error, Result};

/// Where the generators of a device and of the CPU stood.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Randomness {
    states: Vec<(Device, GeneratorState)>,
}

impl Randomness {
    /// Takes note of the device's generator and the CPU's.
    pub(crate) fn now(device: Device) -> Result<Self> {
        let mut devices = vec![Device::Cpu];
        devices.extend((device != Device::Cpu).then_some(device));
        Self::of(devices)
    }

    /// Takes note of these devices' generators.
    pub(crate) fn of(devices: Vec<Device>) -> Result<Self> {
        let state = |device| Ok((device, generator_state(device)?));
        Ok(Self { states: devices.into_iter().map(state).collect::<Result<_>>()? })
    }

    /// Puts them back to where they stood.
    pub(crate) fn restore(&self) -> Result<()> {
        for (device, state) in &self.states {
            set_generator_state(*device, state)?;
        }
        Ok(())
    }
}

/// The random numbers of one micro-batch in one step. Each layer has a seed of its own, so that they
/// depend neither on the schedule, the balance and the threads nor on running a layer again.
///
/// A pipeline's [`Step`](crate::Step) tells its seed, and a plain model can draw the same
/// numbers by `Model::forward_drawing`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draws {
    step: u64,
    micro_batch: u64,
}

impl Draws {
    /// Of this micro-batch, counted from 0, in the step with this seed.
    #[must_use]
    pub fn new(step: u64, micro_batch: usize) -> Self {
        Self { step, micro_batch: micro_batch as u64 }
    }

    /// Those of a model's first values, by a seed from libtorch's default generator: what a pipeline that is
    /// built now would begin with.
    ///
    /// # Errors
    /// When there is no memory for the seed.
    pub fn of_first_values() -> Result<Self> {
        Ok(Self::new(step_seed()?, 0))
    }

    /// The seed of the layer at this position of the model; the loss comes after the last.
    #[must_use]
    pub fn seed(self, layer: usize) -> u64 {
        // Mixed twice and the layer inverted, so that (micro-batch 1, layer 2) is not (2, 1).
        mixed(mixed(self.step ^ mixed(self.micro_batch)) ^ mixed(!(layer as u64)))
    }
}

/// What this thread draws from on a device, seeded a layer at a time.
///
/// On a CPU it is a generator of the thread's own. On an accelerator it is the device's default one,
/// because kernels such as dropout's take no other: who shares the device must take turns, and put
/// its state back in the end.
#[derive(Debug)]
pub(crate) struct Generator {
    own: OwnGenerator,
    device: Device,
}

impl Generator {
    pub(crate) fn new(device: Device) -> Self {
        Self { own: OwnGenerator::enter(), device }
    }

    pub(crate) fn seed(&self, seed: u64) {
        self.own.seed(seed);
        if self.device != Device::Cpu {
            seed_generator(self.device, seed).expect("there are tensors on the device");
        }
    }
}

/// Runs `f` with a seed for the step, or with what keeps it from one: other ranks may wait to hear of that. If `f`
/// fails, it is as if none had been drawn.
pub(crate) fn with_step_seed<T>(
    devices: Vec<Device>,
    f: impl FnOnce(Result<u64>) -> Result<T>,
) -> Result<T> {
    with_seed(devices, true, f)
}

/// The same. What does not train leaves the seed to the next step: how often somebody evaluates a model is not
/// to change how it is trained.
pub(crate) fn with_seed<T>(
    devices: Vec<Device>,
    training: bool,
    f: impl FnOnce(Result<u64>) -> Result<T>,
) -> Result<T> {
    let noted = of_accelerators(devices).and_then(|own| Ok((own, Randomness::now(Device::Cpu)?)));
    let seed = noted.as_ref().map_err(Error::clone).and_then(|_| step_seed());
    let result = f(seed);
    let (own, before) = noted?;
    own.restore()?;
    // The seed itself is drawn from the user's generator: a failed step gives it back.
    if !training || result.is_err() {
        before.restore()?;
    }
    result
}

/// Runs `f`; the accelerators' own generators, which steps seed as they need, are as before
/// afterwards.
pub(crate) fn preserving_generators<T>(
    devices: Vec<Device>,
    f: impl FnOnce() -> Result<T>,
) -> Result<T> {
    preserving(of_accelerators(devices)?, f)
}

/// Runs `f`; the generators are as they were `before` afterwards.
pub(crate) fn preserving<T>(before: Randomness, f: impl FnOnce() -> Result<T>) -> Result<T> {
    let result = f();
    // Whether it failed or not: a step's own seeds are not to steer what the user draws next.
    before.restore()?;
    result
}

/// States of the generators that accelerators among these devices have.
pub(crate) fn of_accelerators(devices: Vec<Device>) -> Result<Randomness> {
    let accelerators = devices.into_iter().filter(|device| *device != Device::Cpu);
    Randomness::of(accelerators.collect())
}

/// A seed for a step, from libtorch's default generator, so that `tch::manual_seed` rules it.
fn step_seed() -> Result<u64> {
    let drawn = Tensor::f_randint(i64::MAX, [1_i64], (Kind::Int64, Device::Cpu))?;
    Ok(drawn.f_int64_value(&[0])?.unsigned_abs())
}

/// Spreads a number over all bits: the output function of `SplitMix64`.
fn mixed(number: u64) -> u64 {
    let z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
