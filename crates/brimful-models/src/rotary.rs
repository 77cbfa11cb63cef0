//! Angles of a Llama's rotary positions, scaled as its config says, and computed once per device.

use std::f64::consts::TAU;
use std::sync::{Mutex, PoisonError};

use brimful::nn::Rotary;
use tch::{Device, Tensor};

use crate::Llama;

/// Least number of positions computed at once, so that short sequences share one table.
const LEAST_PLACES: i64 = 256;

/// Scaling of rotary positions, with which a model takes longer sequences than it was first trained on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RotaryScaling {
    /// No scaling.
    Unscaled,
    /// All pairs rotate slower by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Slow pairs rotate slower by a factor, fast pairs at their own speed, and pairs in between slower by an
    /// interpolated factor.
    Llama3 {
        /// Factor by which slow pairs rotate slower.
        factor: f64,
        /// Pairs with fewer rotations than this within the first context are slow.
        low_turns: f64,
        /// Pairs with more rotations than this are fast.
        high_turns: f64,
        /// Context of the first training.
        first_context: f64,
    },
}

impl RotaryScaling {
    /// Returns the scaled speed of a pair.
    fn scaled(self, speed: f64) -> f64 {
        match self {
            Self::Unscaled => speed,
            Self::Linear { factor } => speed / factor,
            Self::Llama3 { factor, low_turns, high_turns, first_context } => {
                let turns = first_context * speed / TAU;
                let kept = ((turns - low_turns) / (high_turns - low_turns)).clamp(0.0, 1.0);
                speed * (kept + (1.0 - kept) / factor)
            }
        }
    }
}

/// Angles for all blocks, on each device that runs one of them.
#[derive(Debug)]
pub(crate) struct RotaryTables {
    speeds: Vec<f64>,
    /// Limit on the number of positions.
    context: i64,
    made: Mutex<Vec<(Device, Rotary)>>,
}

impl RotaryTables {
    pub(crate) fn new(config: &Llama) -> Self {
        let speeds = Rotary::speeds(config.head_width, config.rotary_base).into_iter();
        let speeds = speeds.map(|speed| config.rotary_scaling.scaled(speed)).collect();
        Self { speeds, context: config.context, made: Mutex::new(Vec::new()) }
    }

    /// Rotates queries or keys (samples × sequence × heads × width) whose first token is at position `first`.
    ///
    /// # Panics
    /// Panics if the tokens end beyond the context, or memory runs out.
    pub(crate) fn apply(&self, x: &Tensor, first: i64) -> Tensor {
        let (last, context) = (first + x.size()[1], self.context);
        assert!(
            last <= context,
            "a sequence of {last} tokens is longer than the context of {context}: shorten it"
        );
        let turned = self.on(x.device(), last).apply_from(x, first);
        turned.unwrap_or_else(|error| panic!("{error}"))
    }

    /// Returns the angles of at least `places` positions, on a device.
    fn on(&self, device: Device, places: i64) -> Rotary {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let found = made.iter().find(|(at, rotary)| *at == device && rotary.context() >= places);
        if let Some((_, rotary)) = found {
            return rotary.shallow_clone();
        }
        let capacity = (places as u64).next_power_of_two() as i64;
        let capacity = capacity.max(LEAST_PLACES).min(self.context);
        let rotary = Rotary::with_speeds(capacity, &self.speeds, device);
        made.retain(|(at, _)| *at != device);
        made.push((device, rotary.shallow_clone()));
        rotary
    }
}
