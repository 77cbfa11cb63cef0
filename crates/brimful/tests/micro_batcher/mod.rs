//! A micro-batcher as the tests are to have it: `BRIMFUL_TEST_REPLAY=1` asks for replay.

use brimful::{MicroBatcher, Size};
use tch::nn::VarStore;

pub fn micro_batcher(store: &VarStore, size: Size) -> MicroBatcher {
    MicroBatcher::new(store, size).replay(std::env::var_os("BRIMFUL_TEST_REPLAY").is_some())
}
