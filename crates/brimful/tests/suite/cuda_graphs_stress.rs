//! Two thousand steps in which everything changes give the same results with CUDA graphs as eagerly.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0 … -- --test-threads=1` on a GPU. On a CPU everything runs eagerly, and a short run
//! is enough.

use crate::support::state::state;
use crate::support::{
    Update, assert_same, assert_within, numbers_there, set_values, test_device, variables,
};
use brimful::optim::{Optimizer, Sgd};
use brimful::{Error, Loss, MicroBatcher, MicroBatches};
use tch::nn::{self, Module};
use tch::{Kind, Tensor};

/// Tolerance between a capture and an eager run, in doubles.
const TOLERANCE: f64 = 1e-9;

struct HungryNet {
    one: nn::Linear,
    two: nn::Linear,
}

impl HungryNet {
    fn outputs(&self, x: &Tensor) -> Tensor {
        // A micro-batch of one sample asks for 16 TiB.
        if x.size()[0] == 1 {
            let _ = Tensor::zeros([1 << 41], (Kind::Double, x.device()));
        }
        self.two.forward(&self.one.forward(x).tanh())
    }
}

/// Model and its trainer.
struct Side {
    store: nn::VarStore,
    net: HungryNet,
    optimizer: Optimizer,
    micro: MicroBatcher,
}

impl Side {
    fn new(cuda_graphs: bool) -> Self {
        let mut store = nn::VarStore::new(test_device());
        let one = nn::linear(store.root() / "one", 6, 16, Default::default());
        let two = nn::linear(store.root() / "two", 16, 4, Default::default());
        store.set_kind(Kind::Double);
        let optimizer = Optimizer::new(&store, Sgd::new(0.01).momentum(0.5)).expect("an optimizer");
        let micro = MicroBatcher::new(&store, MicroBatches::Samples(4)).cuda_graphs(cuda_graphs);
        Self { store, net: HungryNet { one, two }, optimizer, micro }
    }

    /// Runs a step with the first or the second loss.
    fn backward(&mut self, x: &Tensor, second: bool) -> Result<brimful::StepReport, Error> {
        let Self { net, micro, .. } = self;
        if second {
            return micro.backward(x, |x: Tensor| {
                let count = x.abs().sum(Kind::Double);
                Loss::ratio(net.outputs(&x).sin().sum(Kind::Double), count)
            });
        }
        micro.backward(x, |x: Tensor| {
            let mean = net.outputs(&x).square().mean(Kind::Double);
            Loss::mean(mean) + Loss::once(net.two.ws.square().sum(Kind::Double) * 0.01)
        })
    }
}

fn assert_alike(a: &Side, b: &Side, step: i64) {
    assert_within(&state(&a.store), &state(&b.store), TOLERANCE, &format!("step {step}"));
}

/// Samples of one of three shapes; a ragged last micro-batch now and then.
fn samples(step: i64) -> Tensor {
    let rows = if step % 5 == 0 { 23 } else { 24 };
    let shape: &[i64] = match step % 3 {
        0 => &[rows, 6],
        1 => &[rows, 2, 6],
        _ => &[rows, 3, 6],
    };
    numbers_there(shape, step)
}

#[test]
fn steps_in_which_everything_changes_are_the_eager_ones() {
    let steps = if test_device().is_cuda() { 2000 } else { 120 };
    tch::manual_seed(3);
    let (mut eager, mut replayed) = (Side::new(false), Side::new(true));
    set_values(&replayed.store, &variables(&eager.store));
    let (mut count, mut failures) = (0, 0);
    for step in 0..steps {
        for side in [&mut eager, &mut replayed] {
            // Frozen for 30 steps of every 70.
            let _ = side.net.one.ws.set_requires_grad(step % 70 < 40);
            if step % 11 == 0 {
                let rate = 0.01 / (1 + step % 4) as f64;
                side.optimizer.set_learning_rate(rate).expect("a rate");
            }
            if step % 50 == 49 {
                let before = state(&side.store);
                let error = side.backward(&samples(step).narrow(0, 0, 1), step % 2 == 0);
                assert!(matches!(error, Err(Error::OutOfMemory(_))), "{error:?}");
                assert_same("out of memory", &before, &state(&side.store));
                failures += 1;
            }
        }
        let x = samples(step);
        let second = step % 2 == 1;
        let one = eager.backward(&x, second).expect("an eager step");
        let two = replayed.backward(&x, second).expect("a replayed step");
        let off = (one.loss - two.loss).abs();
        let what = format!("step {step}, {} of {} replayed", two.replayed, two.sizes.len());
        assert!(off <= TOLERANCE * one.loss.abs().max(1e-3), "{what}: {} {}", one.loss, two.loss);
        count += two.replayed;
        assert_alike(&replayed, &eager, step);
        for side in [&mut eager, &mut replayed] {
            side.optimizer.update();
        }
        assert_alike(&replayed, &eager, step);
    }
    assert!(failures > 0);
    // Most steps have six micro-batches.
    let expected = if test_device().is_cuda() { steps as usize * 3 } else { 0 };
    assert!(count >= expected, "{count} replayed: {:?}", replayed.micro.eager_cause());
}
