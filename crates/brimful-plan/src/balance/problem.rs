//! Input of the solver: the cost of giving a run of layers to a stage, in constant time.
//!
//! [Note: monotone] A longer run of layers never costs less and never needs fewer bytes. All of `partition` relies
//! on this.

use super::BalanceError;
use crate::schedule::is_time;

/// Load of one layer on its stage.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Load {
    /// Time of one micro-batch, on a device of speed 1.
    pub time: f64,
    /// Bytes that are in use all the time.
    pub bytes: u64,
    /// Bytes of activations, for each micro-batch that the stage holds.
    pub activation_bytes: u64,
    /// Bytes sent to the next stage if the model is cut after this layer.
    pub output_bytes: u64,
}

/// Capacity of one stage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slot {
    /// Speed of its device; times are divided by it.
    pub speed: f64,
    /// Memory in bytes; `None` for no limit.
    pub memory: Option<u64>,
    /// Number of micro-batches that the stage holds at one time.
    pub held: u64,
}

impl Default for Slot {
    /// Returns speed 1, no limit, one micro-batch.
    fn default() -> Self {
        Self { speed: 1.0, memory: None, held: 1 }
    }
}

/// Quantity to minimise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BalanceGoal {
    Time,
    TimeWithin,
    Bytes,
}

/// Layers, stages and a goal, with prefix sums over the layers.
#[derive(Debug)]
pub(super) struct PartitionProblem<'a> {
    stages: &'a [Slot],
    layers: &'a [Load],
    goal: BalanceGoal,
    /// Whether costs by [`BalanceGoal::Bytes`] are shares of a stage's memory instead of numbers of bytes.
    shares: bool,
    time: Vec<f64>,
    bytes: Vec<u128>,
    activations: Vec<u128>,
}

impl<'a> PartitionProblem<'a> {
    pub(super) fn new(
        layers: &'a [Load],
        stages: &'a [Slot],
        goal: BalanceGoal,
    ) -> Result<Self, BalanceError> {
        check(layers, stages)?;
        let time = sums(layers, |layer| layer.time);
        if !time[layers.len()].is_finite() {
            return Err(BalanceError::Overflow);
        }
        Ok(Self {
            stages,
            layers,
            goal,
            shares: stages.iter().all(|stage| stage.memory.is_some_and(|memory| memory > 0)),
            time,
            bytes: sums(layers, |layer| u128::from(layer.bytes)),
            activations: sums(layers, |layer| u128::from(layer.activation_bytes)),
        })
    }

    pub(super) fn stages(&self) -> usize {
        self.stages.len()
    }

    pub(super) fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Returns the cost of stage `j` with the layers from `start` to `end`.
    pub(super) fn cost(&self, j: usize, start: usize, end: usize) -> f64 {
        let stage = &self.stages[j];
        if self.goal != BalanceGoal::Bytes {
            return (self.time[end] - self.time[start]) / stage.speed;
        }
        let bytes = self.bytes(j, start, end) as f64;
        // A share needs a limit, so costs are shares only if all stages have one.
        match stage.memory {
            Some(memory) if self.shares => bytes / memory as f64,
            _ => bytes,
        }
    }

    /// Returns whether stage `j` can have the layers from `start` to `end`: its cost is at most `most`, and the
    /// layers fit its memory if that counts.
    pub(super) fn allows(&self, j: usize, start: usize, end: usize, most: f64) -> bool {
        let limit = self.stages[j].memory.filter(|_| self.goal == BalanceGoal::TimeWithin);
        self.cost(j, start, end) <= most
            && limit.is_none_or(|limit| self.bytes(j, start, end) <= u128::from(limit))
    }

    fn bytes(&self, j: usize, start: usize, end: usize) -> u128 {
        let held = u128::from(self.stages[j].held);
        let activations = self.activations[end] - self.activations[start];
        (self.bytes[end] - self.bytes[start]).saturating_add(activations.saturating_mul(held))
    }

    /// Returns the bytes over the boundary before layer `start`.
    pub(super) fn transfer(&self, start: usize) -> u64 {
        self.layers[start - 1].output_bytes
    }

    /// Returns the error when nothing fits.
    pub(super) fn does_not_fit(&self) -> BalanceError {
        // Every layer is counted with the fewest micro-batches that any stage holds, so the bytes are lower
        // bounds.
        let held = self.stages.iter().map(|stage| u128::from(stage.held)).min().unwrap_or(0);
        let layer = |layer: &Load| {
            u128::from(layer.bytes) + u128::from(layer.activation_bytes).saturating_mul(held)
        };
        let memory = |stage: &Slot| u128::from(stage.memory.unwrap_or(u64::MAX));
        let clamp = |bytes: u128| u64::try_from(bytes).unwrap_or(u64::MAX);
        BalanceError::DoesNotFit {
            stages: self.stages.len(),
            needed: clamp(self.layers.iter().map(layer).fold(0, u128::saturating_add)),
            largest_layer: clamp(self.layers.iter().map(layer).max().unwrap_or(0)),
            available: clamp(self.stages.iter().map(memory).sum()),
            largest_device: clamp(self.stages.iter().map(memory).max().unwrap_or(0)),
        }
    }
}

fn check(layers: &[Load], stages: &[Slot]) -> Result<(), BalanceError> {
    if stages.is_empty() {
        return Err(BalanceError::NoStages);
    }
    if layers.len() < stages.len() {
        return Err(BalanceError::TooFewLayers { stages: stages.len(), layers: layers.len() });
    }
    if let Some(layer) = layers.iter().position(|layer| !is_time(layer.time)) {
        return Err(BalanceError::BadTime { layer, what: "whole", value: layers[layer].time });
    }
    // Subnormal speeds are refused, because a time divided by one could be infinite.
    let is_speed = |speed: f64| speed.is_normal() && speed > 0.0;
    if let Some(device) = stages.iter().position(|stage| !is_speed(stage.speed)) {
        return Err(BalanceError::BadSpeed { device, value: stages[device].speed });
    }
    Ok(())
}

/// Returns prefix sums: element `k` is the sum over the first `k` layers.
fn sums<T: Copy + Default + std::ops::Add<Output = T>>(
    layers: &[Load],
    of: impl Fn(&Load) -> T,
) -> Vec<T> {
    let mut sum = T::default();
    let later = layers.iter().map(|layer| {
        sum = sum + of(layer);
        sum
    });
    std::iter::once(T::default()).chain(later).collect()
}
