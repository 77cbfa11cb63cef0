//! Random state that can be restored, so that a failed step leaves it unchanged; and seeds for parallel draws.

use brimful_torch::random::{
    GeneratorState, OwnGenerator, generator_state, seed_generator, set_generator_state,
};
use tch::{Device, Kind, Tensor};

use crate::Result;

/// States of the generators of a device and of the CPU.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Randomness {
    states: Vec<(Device, GeneratorState)>,
}

impl Randomness {
    /// Saves the states of the device's generator and the CPU's.
    pub(crate) fn now(device: Device) -> Result<Self> {
        let mut devices = vec![Device::Cpu];
        devices.extend((device != Device::Cpu).then_some(device));
        Self::of(devices)
    }

    /// Saves the states of these devices' generators.
    pub(crate) fn of(devices: Vec<Device>) -> Result<Self> {
        let state = |device| Ok((device, generator_state(device)?));
        Ok(Self { states: devices.into_iter().map(state).collect::<Result<_>>()? })
    }

    /// Restores the generators.
    pub(crate) fn restore(&self) -> Result<()> {
        for (device, state) in &self.states {
            set_generator_state(*device, state)?;
        }
        Ok(())
    }
}

/// Random numbers of one micro-batch in one step. Each layer has a seed of its own, so the numbers do not depend
/// on schedule, balance, threads or recomputation.
///
/// A pipeline's [`StepReport`](crate::StepReport) reports the step's seed, from which a plain model can draw the
/// same numbers by `Model::forward_with_rng`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepRng {
    step: u64,
    micro_batch: u64,
}

impl StepRng {
    /// Creates the random numbers of this micro-batch, counted from 0, in the step with this seed.
    #[must_use]
    pub fn new(step: u64, micro_batch: usize) -> Self {
        Self { step, micro_batch: micro_batch as u64 }
    }

    /// Creates the random numbers of a model's initial values, with a seed from libtorch's default generator: a
    /// pipeline built now would draw the same values.
    ///
    /// # Errors
    ///
    /// When memory for the seed runs out.
    pub fn of_first_values() -> Result<Self> {
        Ok(Self::new(step_seed()?, 0))
    }

    /// Returns the seed of the layer at this position of the model; the loss comes after the last layer.
    #[must_use]
    pub fn seed(self, layer: usize) -> u64 {
        // Mixed twice and the layer inverted, so that micro-batch 1, layer 2 and micro-batch 2, layer 1 get
        // different seeds.
        mixed(mixed(self.step ^ mixed(self.micro_batch)) ^ mixed(!(layer as u64)))
    }
}

/// Generator of this thread on a device, seeded for each layer.
///
/// On a CPU, the thread has a generator of its own. On an accelerator, all threads use the device's default
/// generator, because kernels such as dropout's take no other: threads that share the device must take turns, and
/// restore the generator's state in the end.
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

/// Runs `f` with a seed for the step, or with the error of drawing it, so that `f` can report the error to other
/// ranks. If `f` fails, the draw is undone.
pub(crate) fn with_step_seed<T>(
    devices: Vec<Device>,
    f: impl FnOnce(Result<u64>) -> Result<T>,
) -> Result<T> {
    let drawn = SeedDraw::new(devices);
    let result = f(drawn.seed.clone());
    drawn.end(true, result)
}

/// Seed drawn for a step, and the states of the generators before the draw.
#[derive(Debug)]
pub(crate) struct SeedDraw {
    /// Seed, or the error of drawing it, which can be reported to other ranks.
    pub(crate) seed: Result<u64>,
    /// States of the accelerators' generators and of the CPU's.
    before: Option<(Randomness, Randomness)>,
}

impl SeedDraw {
    /// Draws a seed for a step that seeds the generators of these devices.
    pub(crate) fn new(devices: Vec<Device>) -> Self {
        let noted =
            of_accelerators(devices).and_then(|own| Ok((own, Randomness::now(Device::Cpu)?)));
        match noted {
            Ok(before) => Self { seed: step_seed(), before: Some(before) },
            Err(error) => Self { seed: Err(error), before: None },
        }
    }

    /// Ends the step: restores the accelerators' generators. Undoes the draw if the step has failed, or does not
    /// train, so that evaluations do not change the training that follows.
    pub(crate) fn end<T>(self, training: bool, result: Result<T>) -> Result<T> {
        let Some((own, before)) = self.before else { return result };
        own.restore()?;
        // The seed itself is drawn from the user's generator, which a failed step restores.
        if !training || result.is_err() {
            before.restore()?;
        }
        result
    }
}

/// Runs `f`, and restores the accelerators' generators afterwards, because steps seed them.
pub(crate) fn preserving_generators<T>(
    devices: Vec<Device>,
    f: impl FnOnce() -> Result<T>,
) -> Result<T> {
    preserving(of_accelerators(devices)?, f)
}

/// Runs `f`, then restores the generators to the states in `before`.
pub(crate) fn preserving<T>(before: Randomness, f: impl FnOnce() -> Result<T>) -> Result<T> {
    let result = f();
    // Restored after a failure too, because a step's own seeds must not determine the user's next draws.
    before.restore()?;
    result
}

/// Saves the states of the generators of the accelerators among these devices.
pub(crate) fn of_accelerators(devices: Vec<Device>) -> Result<Randomness> {
    let accelerators = devices.into_iter().filter(|device| *device != Device::Cpu);
    Randomness::of(accelerators.collect())
}

/// Draws a seed for a step from libtorch's default generator, so that `tch::manual_seed` determines it.
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
