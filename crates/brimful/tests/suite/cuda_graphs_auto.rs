//! Automatic sizes with CUDA graphs, for one device, replicas and ranks: micro-batches are even, captured work
//! has memory beside what eager work leaves, and its own memory is counted.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0 … -- --test-threads=1` on a GPU. On a CPU everything runs eagerly.

use crate::support::test_device;
use brimful::memory::Memory;
use brimful::{Loss, MicroBatcher, MicroBatches, Replicas, Result, StepReport, World};
use tch::nn::{self, Module, VarStore};
use tch::{Kind, Tensor};

/// Only divisors leave no remainder: 500 samples are 5 times 100, and so on.
const SAMPLES: i64 = 500;
/// Bytes of a GPU available beyond those in use: a third of what a whole mini-batch would need.
const ROOM: u64 = 256 << 20;
/// Steps after which a size is found, and its work captured.
const SETTLED: usize = 12;
const STEPS: usize = 18;

/// Every sample keeps about 1.5 MB of a GPU for the backward; a CPU's memory is not limited, so less is enough.
fn width() -> i64 {
    if test_device().is_cuda() { 4096 } else { 64 }
}

fn wide(path: &nn::Path) -> nn::Linear {
    nn::linear(path / "wide", 16, width(), Default::default())
}

fn loss(model: &nn::Linear, x: &Tensor) -> Loss {
    let grown = (0..48).fold(model.forward(x), |x, _| (x * 0.99).tanh());
    Loss::mean(grown.square().mean(Kind::Float))
}

fn samples() -> Tensor {
    crate::support::numbers_there(&[SAMPLES, 16], 1).to_kind(Kind::Float)
}

/// Limits a GPU's memory while it lives.
struct Limited(Option<Memory>);

impl Limited {
    fn new() -> Self {
        if !test_device().is_cuda() {
            return Self(None);
        }
        let memory = Memory::of(test_device()).expect("a GPU");
        brimful_torch::memory::empty_cache(test_device()).expect("an empty cache");
        let used = memory.usage().expect("figures").current.0;
        memory.set_limit(Some(used + ROOM)).expect("a limit");
        Self(Some(memory))
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        if let Some(memory) = &self.0 {
            memory.set_limit(None).expect("no limit");
        }
    }
}

/// Runs steps until a size is found, and some more.
fn holds(kind: &str, mut step: impl FnMut() -> Result<StepReport>) {
    let steps: Vec<StepReport> = (0..STEPS).map(|_| step().expect(kind)).collect();
    for (number, step) in steps.iter().enumerate().skip(SETTLED) {
        let what = format!("{kind}, step {number}: {:?} {:?}", step.sizes, step.decisions);
        assert_eq!(step.retries, 0, "{what}");
        if !test_device().is_cuda() {
            continue;
        }
        assert!(step.sizes.iter().all(|size| *size == step.sizes[0]), "{what}");
        assert!(step.replayed > 0, "{what}");
        // A micro-batch's activations are in captured work, which the allocator does not count as in use.
        let kept = step.sizes[0] as u64 * width() as u64 * 4 * 48;
        let peak = step.peaks[0].expect("counted").0;
        assert!(peak >= kept, "{what}: {peak} bytes at most, where {kept} are kept");
    }
}

/// Checks one device, alone or in each rank.
fn micro_batcher_holds(kind: &str, world: &World) {
    let store = VarStore::new(test_device());
    let model = wide(&store.root());
    let _limited = Limited::new();
    let micro = MicroBatcher::new(&store, MicroBatches::Auto).cuda_graphs(true);
    let mut micro = micro.join(world).expect("one model");
    let x = samples();
    holds(kind, || micro.backward(&x, |x: Tensor| loss(&model, &x)));
}

#[test]
fn one_device() {
    micro_batcher_holds("one device", &World::alone());
}

#[test]
fn replicas() {
    let replicas = Replicas::new([test_device()], MicroBatches::Auto, wide).expect("replicas");
    let mut replicas = replicas.cuda_graphs(true);
    let _limited = Limited::new();
    let x = samples();
    holds("replicas", || replicas.backward(&x, |model, x: Tensor| loss(model, &x)));
}

#[cfg(feature = "mpi")]
#[test]
fn ranks() {
    crate::support::ranks::in_ranks(2, |world| micro_batcher_holds("ranks", &world));
}
