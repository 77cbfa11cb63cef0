//! A seeded order of samples that takes no memory: what stands at a place is computed from the place.

use super::number_stream::{NumberStream, mixed};

/// As many rounds leave nothing of the order that there was.
const ROUNDS: usize = 8;
/// Fewer bits than these have too few orders to choose from.
const LEAST_HALF: u32 = 4;

/// All numbers below a count, each once, in an order of its own for each seed.
///
/// A Feistel network permutes the numbers of an even number of bits. Those that are not below the count are
/// put through it again, until one is: it comes back to where it began, which is below.
#[derive(Debug)]
pub(crate) struct Shuffle {
    count: u64,
    /// Bits of half a number.
    half: u32,
    keys: [u64; ROUNDS],
}

impl Shuffle {
    pub(crate) fn new(count: usize, seed: u64) -> Self {
        let count = count as u64;
        let bits = u64::BITS - count.saturating_sub(1).leading_zeros();
        let mut numbers = NumberStream::new(seed);
        let keys = [(); ROUNDS].map(|()| numbers.next());
        Self { count, half: bits.div_ceil(2).max(LEAST_HALF), keys }
    }

    /// The number at this place, which is below the count.
    pub(crate) fn at(&self, place: usize) -> usize {
        let mut number = self.permuted(place as u64);
        while number >= self.count {
            number = self.permuted(number);
        }
        number as usize
    }

    fn permuted(&self, number: u64) -> u64 {
        let low = (1 << self.half) - 1;
        let halves = (number >> self.half, number & low);
        let (left, right) = self.keys.iter().fold(halves, |(left, right), key| {
            (right, left ^ (mixed(right.wrapping_add(*key)) & low))
        });
        left << self.half | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(count: usize, seed: u64) -> Vec<usize> {
        let shuffle = Shuffle::new(count, seed);
        (0..count).map(|place| shuffle.at(place)).collect()
    }

    #[test]
    fn each_number_comes_once() {
        for count in [1, 2, 3, 15, 16, 17, 256, 257, 1000, 5000] {
            let mut numbers = order(count, 7);
            numbers.sort_unstable();
            assert!(numbers.into_iter().eq(0..count), "{count}");
        }
    }

    #[test]
    fn the_seed_decides_and_nothing_stays_where_it_was() {
        assert_eq!(order(1000, 3), order(1000, 3));
        for (one, other) in
            [(order(1000, 3), order(1000, 4)), (order(1000, 3), (0..1000).collect())]
        {
            let same = one.iter().zip(&other).filter(|(one, other)| one == other).count();
            assert!(same < 10, "{same}");
        }
    }

    /// Of every three samples each of the six orders comes about as often as the others.
    #[test]
    fn all_orders_are_as_likely() {
        let mut found = std::collections::BTreeMap::new();
        for seed in 0..6000 {
            *found.entry(order(3, seed)).or_insert(0) += 1;
        }
        assert_eq!(found.len(), 6);
        assert!(found.values().all(|count| (800..1200).contains(count)), "{found:?}");
    }
}
