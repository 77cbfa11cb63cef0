//! How far each step goes: the learning rate, and how it falls.

use std::f64::consts::PI;
use std::fmt;

use clap::ValueEnum;

/// How the learning rate falls to 0 over the whole training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Decay {
    /// Not at all
    None,
    /// In a straight line
    Linear,
    /// By half a cosine: slowly at first and at last
    Cosine,
}

impl fmt::Display for Decay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value();
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}

/// The learning rate of every step.
#[derive(Debug)]
pub(super) struct Rate {
    /// The full height.
    pub(super) first: f64,
    /// Steps over which it rises to that.
    warmup: usize,
    decay: Decay,
    /// Of the whole training.
    steps: usize,
}

impl Rate {
    pub(super) fn new(first: f64, warmup: usize, decay: Decay, steps: usize) -> Self {
        Self { first, warmup, decay, steps }
    }

    /// That of the step which so many went before.
    pub(super) fn after(&self, steps: usize) -> f64 {
        if steps < self.warmup {
            return self.first * (steps + 1) as f64 / self.warmup as f64;
        }
        let falling = self.steps.saturating_sub(self.warmup).max(1);
        let done = ((steps - self.warmup) as f64 / falling as f64).min(1.0);
        self.first
            * match self.decay {
                Decay::None => 1.0,
                Decay::Linear => 1.0 - done,
                Decay::Cosine => (1.0 + (PI * done).cos()) / 2.0,
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_falls_from_all_to_nothing() {
        let rates = |decay| [0, 2, 4, 5].map(|steps| Rate::new(0.5, 0, decay, 4).after(steps));
        assert_eq!(rates(Decay::None), [0.5; 4]);
        assert_eq!(rates(Decay::Linear), [0.5, 0.25, 0.0, 0.0]);
        let [first, middle, last, beyond] = rates(Decay::Cosine);
        assert_eq!((first, last, beyond), (0.5, 0.0, 0.0));
        assert!((middle - 0.25).abs() < 1e-15);
        let early = Rate::new(1.0, 0, Decay::Cosine, 100).after(10);
        assert!(early > 0.97 && early < 1.0, "{early}");
    }
}
