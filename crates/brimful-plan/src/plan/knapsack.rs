//! Picks one way to run each stage of a device, for the least total time within the capacity: an exact
//! knapsack over units of bytes.

use crate::schedule::DeviceId;

/// Number of units in the capacity. A way's bytes are rounded up to whole units, so ways that fit by units also
/// fit by bytes. Rounding loses at most one unit for each stage.
const UNITS: usize = 4096;

/// One way to run a stage, and its cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Offer {
    /// Index among all ways.
    pub(super) way: usize,
    /// Bytes on the device.
    pub(super) bytes: u64,
    /// Seconds that it adds to the step.
    pub(super) seconds: f64,
}

/// Returns the way of each stage with the least total time, or `None` if even the smallest ways need more
/// than `bytes`.
pub(super) fn pick(stages: &[Vec<Offer>], bytes: u64) -> Option<Vec<usize>> {
    let unit = bytes.div_ceil(UNITS as u64).max(1);
    let units = |bytes: u64| usize::try_from(bytes.div_ceil(unit)).unwrap_or(usize::MAX);
    let capacity = (bytes / unit) as usize;
    // Element c of `least` is the shortest time of the stages so far with c units. `taken` has the offers that
    // give these times, for each stage.
    let mut least = vec![0.0; capacity + 1];
    let mut taken = Vec::with_capacity(stages.len());
    for offers in stages {
        let mut next = vec![f64::INFINITY; capacity + 1];
        let mut by = vec![usize::MAX; capacity + 1];
        for (at, cost) in offers.iter().enumerate() {
            let size = units(cost.bytes);
            for c in size..=capacity {
                let seconds = least[c - size] + cost.seconds;
                if seconds < next[c] {
                    next[c] = seconds;
                    by[c] = at;
                }
            }
        }
        least = next;
        taken.push(by);
    }
    let mut left = capacity;
    let mut picked = Vec::with_capacity(stages.len());
    for (offers, by) in stages.iter().zip(&taken).rev() {
        let cost = offers.get(by[left])?;
        picked.push(cost.way);
        left -= units(cost.bytes);
    }
    picked.reverse();
    Some(picked)
}

/// Picks the ways for all devices, each with its capacity; `placement` has the device of each stage.
pub(super) fn pick_all(
    placement: &[DeviceId],
    capacities: impl Iterator<Item = u64>,
    offers: impl Fn(usize) -> Vec<Offer>,
) -> Option<Vec<usize>> {
    let mut ways = vec![0; placement.len()];
    for (d, bytes) in capacities.enumerate() {
        let here: Vec<_> = (0..ways.len()).filter(|j| placement[*j].index() == d).collect();
        let offers: Vec<_> = here.iter().map(|j| offers(*j)).collect();
        here.iter().zip(pick(&offers, bytes)?).for_each(|(j, way)| ways[*j] = way);
    }
    Some(ways)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(way: usize, bytes: u64, seconds: f64) -> Offer {
        Offer { way, bytes, seconds }
    }

    #[test]
    fn the_least_time_within_the_capacity() {
        let stage = |bytes, saved| vec![offer(0, bytes, 10.0 - saved), offer(1, 0, 10.0)];
        // A choice by seconds per byte would take the first, which leaves too little for the other two.
        let stages = [stage(60, 6.5), stage(50, 5.0), stage(50, 5.0)];
        assert_eq!(pick(&stages, 100), Some(vec![1, 0, 0]));
        assert_eq!(pick(&stages, 99), Some(vec![0, 1, 1]));
        assert_eq!(pick(&stages, 0), Some(vec![1, 1, 1]));
    }

    #[test]
    fn too_little_memory_is_reported() {
        assert_eq!(pick(&[vec![offer(0, 5, 1.0)]], 4), None);
        assert_eq!(pick(&[vec![offer(3, 5, 1.0)]], u64::MAX), Some(vec![3]));
        assert_eq!(pick(&[], 0), Some(vec![]));
    }
}
