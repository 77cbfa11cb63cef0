//! Random numbers of our own (SplitMix64), so that making data leaves libtorch's generators alone.

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
