//! Cut of an epoch into the mini-batches of its steps. Ranges are computed on demand, since there may be too many
//! steps to keep in memory.

use std::ops::Range;

/// Cut of an epoch into mini-batches of one size, and a smaller one of the rest. Several mini-batches make a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct EpochCut {
    samples: usize,
    /// Samples of a mini-batch.
    size: usize,
    /// Mini-batches of a step; the last step may have fewer.
    accumulate: usize,
}

impl EpochCut {
    /// Cuts this many samples into mini-batches of `batch_size`, or of all samples if there are fewer.
    pub(super) fn new(samples: usize, batch_size: usize, accumulate: usize) -> Self {
        Self { samples, size: batch_size.clamp(1, samples.max(1)), accumulate }
    }

    pub(super) fn steps(&self) -> usize {
        self.batches().div_ceil(self.accumulate)
    }

    /// Returns the positions, in the epoch's order, of a step's mini-batches.
    pub(super) fn step(self, step: usize) -> impl Iterator<Item = Range<usize>> {
        let batches = self.batches_of(step)..self.batches_of(step + 1);
        batches.map(move |batch| self.first(batch)..self.first(batch + 1))
    }

    /// Returns the number of samples in the first `steps` steps.
    pub(super) fn samples_of(&self, steps: usize) -> usize {
        self.first(self.batches_of(steps))
    }

    /// Returns the number of samples in the largest mini-batch.
    pub(super) fn largest(&self) -> usize {
        self.size
    }

    fn batches(&self) -> usize {
        self.samples.div_ceil(self.size)
    }

    fn batches_of(&self, steps: usize) -> usize {
        (steps * self.accumulate).min(self.batches())
    }

    /// Returns the position at which a mini-batch begins.
    fn first(&self, batch: usize) -> usize {
        (batch * self.size).min(self.samples)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_is_cut_into_mini_batches_of_a_size_and_one_of_the_rest() {
        for (samples, size, accumulate) in
            [(1, 5, 1), (10, 3, 2), (65, 16, 2), (64, 16, 4), (7, 1, 3), (1437, 1000, 1)]
        {
            let cut = EpochCut::new(samples, size, accumulate);
            let places: Vec<_> = (0..samples).collect();
            let batches = places.chunks(size).map(|places| places[0]..places[0] + places.len());
            let batches: Vec<_> = batches.collect();
            let steps: Vec<Vec<_>> =
                (0..cut.steps()).map(|step| cut.step(step).collect()).collect();
            let expected: Vec<_> = batches.chunks(accumulate).map(<[_]>::to_vec).collect();
            assert_eq!(steps, expected, "{samples} by {size}");
            assert_eq!((cut.largest(), cut.samples_of(steps.len())), (batches[0].len(), samples));
            assert_eq!(cut.samples_of(1), steps[0].iter().map(Range::len).sum::<usize>());
        }
    }
}
