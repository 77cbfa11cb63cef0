//! The angles of a Llama's rotary positions: stretched as its config says, and made once a device.

use std::f64::consts::TAU;
use std::sync::{Mutex, PoisonError};

use brimful::nn::Rotary;
use tch::{Device, Tensor};

use crate::Llama;

/// The least places that there are angles for at once: short sequences do not each make new ones.
const LEAST_PLACES: i64 = 256;

/// How rotary positions were stretched, so that a model takes longer sequences than it was first trained with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RotaryScaling {
    /// Not at all.
    Unscaled,
    /// All pairs turn slower by a factor.
    Linear {
        /// It.
        factor: f64,
    },
    /// Slow pairs turn slower by a factor, fast ones as before, those between them by something between.
    Llama3 {
        /// By how much slow pairs turn slower.
        factor: f64,
        /// Pairs that turn less often than this within the first context are slow.
        low_turns: f64,
        /// Those that turn more often than this are fast.
        high_turns: f64,
        /// The context of the first training.
        first_context: f64,
    },
}

impl RotaryScaling {
    /// What becomes of a pair's speed.
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

/// The angles of all blocks, on each device that one of them runs on.
#[derive(Debug)]
pub(crate) struct RotaryTables {
    speeds: Vec<f64>,
    /// The most places that there are.
    context: i64,
    made: Mutex<Vec<(Device, Rotary)>>,
}

impl RotaryTables {
    pub(crate) fn new(config: &Llama) -> Self {
        let speeds = Rotary::speeds(config.head_width, config.rotary_base).into_iter();
        let speeds = speeds.map(|speed| config.rotary_scaling.scaled(speed)).collect();
        Self { speeds, context: config.context, made: Mutex::new(Vec::new()) }
    }

    /// Queries or keys (samples × sequence × heads × width) of which the first token is at this place, turned.
    ///
    /// # Panics
    /// When they end after the context, or memory runs out.
    pub(crate) fn turn(&self, x: &Tensor, first: i64) -> Tensor {
        let (last, context) = (first + x.size()[1], self.context);
        assert!(
            last <= context,
            "a sequence of {last} tokens is longer than the context of {context}: shorten it"
        );
        let turned = self.on(x.device(), last).turn_from(x, first);
        turned.unwrap_or_else(|error| panic!("{error}"))
    }

    /// The angles of at least so many places, on this device.
    fn on(&self, device: Device, places: i64) -> Rotary {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let found = made.iter().find(|(at, rotary)| *at == device && rotary.context() >= places);
        if let Some((_, rotary)) = found {
            return rotary.shallow_clone();
        }
        let room = (places as u64).next_power_of_two() as i64;
        let room = room.max(LEAST_PLACES).min(self.context);
        let rotary = Rotary::with_speeds(room, &self.speeds, device);
        made.retain(|(at, _)| *at != device);
        made.push((device, rotary.shallow_clone()));
        rotary
    }
}
