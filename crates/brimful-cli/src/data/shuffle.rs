//! Seeded shuffle of samples that needs no memory: the sample at a position is computed from the position. Its random
//! numbers are of our own (SplitMix64), so that making data leaves libtorch's generators alone.

/// Number of rounds, enough to leave nothing of the original order.
const ROUNDS: usize = 8;
/// Smallest number of bits in half a number; fewer would give too few orders.
const LEAST_HALF: u32 = 4;

/// Permutation of the numbers below a count, determined by a seed.
///
/// A Feistel network permutes the numbers with an even number of bits. A result that is not below the count goes
/// through the network again, until one is. This ends, because a cycle returns to its start, which is below the
/// count.
#[derive(Debug)]
pub(crate) struct Shuffle {
    count: u64,
    /// Number of bits in half a number.
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

    /// Returns the number at a position below the count.
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

/// Stream of random numbers, determined by its seed.
#[derive(Debug)]
pub(super) struct NumberStream(u64);

impl NumberStream {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.0)
    }

    /// Returns an integer from 0 to below the limit.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        scaled(self.next(), limit)
    }
}

/// Mixes the bits, so that each depends on all.
pub(super) fn mixed(bits: u64) -> u64 {
    let mixed = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Scales random bits to an integer from 0 to below the limit.
pub(super) fn scaled(bits: u64, limit: u64) -> u64 {
    ((u128::from(bits) * u128::from(limit)) >> 64) as u64
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

    /// Each of the six orders of three samples occurs about equally often.
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
