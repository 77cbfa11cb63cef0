//! Learning-rate schedules: warm-up and decay.

use std::f64::consts::PI;

/// Learning-rate schedule that warms up over the first steps, and decays until the last step.
///
/// The schedule only computes a number for each step: the training loop sets the number in its optimizer.
///
/// ```
/// use brimful::optim::RateCurve;
///
/// let curve = RateCurve::new(1e-3).warmup(3).cosine(100).down_to(0.1);
/// assert_eq!(curve.at(0), 0.25e-3);
/// assert_eq!(curve.at(3), 1e-3);
/// assert_eq!(curve.at(100), 1e-4);
/// // In a loop: `optimizer.set_learning_rate(curve.at(step))?`
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[must_use]
pub struct RateCurve {
    rate: f64,
    warmup: usize,
    shape: CurveShape,
    /// Steps of the whole training, including the warm-up.
    steps: usize,
    /// Share of the learning rate that is left at the end.
    share: f64,
}

/// Shape of the decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CurveShape {
    Constant,
    Linear,
    Cosine,
}

impl RateCurve {
    /// Returns a constant learning rate. The optimizer's `set_learning_rate` refuses an invalid rate, such as a
    /// negative one.
    pub fn new(rate: f64) -> Self {
        Self { rate, warmup: 0, shape: CurveShape::Constant, steps: 0, share: 0.0 }
    }

    /// Warms up linearly over `steps` steps, which all have less than the full rate. The step after them has the
    /// full rate.
    pub fn warmup(self, steps: usize) -> Self {
        Self { warmup: steps, ..self }
    }

    /// Decays linearly, to the final share after `steps` steps, including the warm-up steps.
    pub fn linear(self, steps: usize) -> Self {
        Self { shape: CurveShape::Linear, steps, ..self }
    }

    /// Decays along half a cosine, slowly at first and at last, to the final share after `steps` steps,
    /// including the warm-up steps.
    pub fn cosine(self, steps: usize) -> Self {
        Self { shape: CurveShape::Cosine, steps, ..self }
    }

    /// Decays to this share of the rate, not to 0.
    pub fn down_to(self, share: f64) -> Self {
        Self { share, ..self }
    }

    /// Returns the learning rate of step `step`, counted from 0.
    pub fn at(&self, step: usize) -> f64 {
        if step < self.warmup {
            // Starts above 0, because a first step with a learning rate of 0 would be wasted.
            return self.rate * ((step + 1) as f64 / (self.warmup as f64 + 1.0));
        }
        let falling = self.steps.saturating_sub(self.warmup).max(1);
        let done = ((step - self.warmup) as f64 / falling as f64).min(1.0);
        let left = match self.shape {
            CurveShape::Constant => return self.rate,
            CurveShape::Linear => 1.0 - done,
            CurveShape::Cosine => (1.0 + (PI * done).cos()) / 2.0,
        };
        self.rate * (self.share + (1.0 - self.share) * left)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STEPS: [usize; 4] = [0, 2, 4, 5];

    #[test]
    fn a_rate_falls_from_all_to_nothing() {
        let rates = |curve: RateCurve| STEPS.map(|step| curve.at(step));
        assert_eq!(rates(RateCurve::new(0.5)), [0.5; 4]);
        assert_eq!(rates(RateCurve::new(0.5).linear(4)), [0.5, 0.25, 0.0, 0.0]);
        let [first, middle, last, beyond] = rates(RateCurve::new(0.5).cosine(4));
        assert_eq!((first, last, beyond), (0.5, 0.0, 0.0));
        assert!((middle - 0.25).abs() < 1e-15);
    }

    #[test]
    fn a_rate_falls_to_its_share() {
        let rates = |curve: RateCurve| STEPS.map(|step| curve.at(step));
        assert_eq!(rates(RateCurve::new(2.0).linear(4).down_to(0.5)), [2.0, 1.5, 1.0, 1.0]);
        assert_eq!(rates(RateCurve::new(2.0).cosine(4).down_to(1.0)), [2.0; 4]);
    }

    #[test]
    fn a_rate_rises_in_a_straight_line_and_falls_over_the_steps_that_are_left() {
        let curve = RateCurve::new(1.0).warmup(3).linear(5);
        let rates = [0, 1, 2, 3, 4, 5, 6].map(|step| curve.at(step));
        assert_eq!(rates, [0.25, 0.5, 0.75, 1.0, 0.5, 0.0, 0.0]);
    }

    #[test]
    fn a_training_without_steps_or_shorter_than_its_warmup_has_rates_too() {
        assert_eq!(RateCurve::new(1.0).cosine(0).at(0), 1.0);
        assert_eq!(RateCurve::new(1.0).linear(0).at(1), 0.0);
        let curve = RateCurve::new(1.0).warmup(3).linear(2);
        assert_eq!([1, 3, 4].map(|step| curve.at(step)), [0.5, 1.0, 0.0]);
        assert!(RateCurve::new(1.0).warmup(usize::MAX).cosine(usize::MAX).at(7) > 0.0);
    }

    proptest! {
        #[test]
        fn a_rate_never_leaves_its_bounds_and_turns_once(
            warmup in 0_usize..50,
            steps in 0_usize..100,
            share in 0.0..=1.0_f64,
            cosine: bool,
        ) {
            let curve = RateCurve::new(0.1).warmup(warmup).down_to(share);
            let curve = if cosine { curve.cosine(steps) } else { curve.linear(steps) };
            let rates: Vec<f64> = (0..150).map(|step| curve.at(step)).collect();
            prop_assert!(rates.iter().all(|rate| (0.0..=0.1).contains(rate)));
            prop_assert!(rates[..=warmup].is_sorted());
            prop_assert!(rates[warmup..].is_sorted_by(|a, b| a >= b));
            prop_assert_eq!(rates[warmup], 0.1);
            prop_assert!((rates[149] - 0.1 * share).abs() < 1e-15);
        }
    }
}
