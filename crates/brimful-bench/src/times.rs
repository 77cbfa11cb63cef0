//! Seconds of measured steps, and their statistics.

/// Seconds of a contestant's steps.
#[derive(Debug, Default)]
pub(crate) struct StepTimes(pub(crate) Vec<f64>);

impl StepTimes {
    pub(crate) fn push(&mut self, seconds: f64) {
        self.0.push(seconds);
    }

    /// Adds the time of a step, unless it is a warm-up.
    pub(crate) fn push_if(&mut self, counts: bool, seconds: f64) {
        if counts {
            self.push(seconds);
        }
    }

    pub(crate) fn median(&self) -> f64 {
        let sorted = self.sorted();
        let middle = sorted.len() / 2;
        if sorted.len() % 2 == 1 {
            sorted[middle]
        } else {
            (sorted[middle - 1] + sorted[middle]) / 2.0
        }
    }

    pub(crate) fn spread(&self) -> f64 {
        let sorted = self.sorted();
        (sorted[sorted.len() - 1] - sorted[0]) / self.median()
    }

    fn sorted(&self) -> Vec<f64> {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_is_between_its_middle_two() {
        let times = |list: &[f64]| StepTimes(list.to_vec());
        assert_eq!(times(&[3.0, 1.0, 2.0]).median(), 2.0);
        assert_eq!(times(&[4.0, 1.0, 2.0, 3.0]).median(), 2.5);
        assert_eq!(times(&[4.0, 1.0, 2.0, 3.0]).spread(), 3.0 / 2.5);
    }
}
