//! Leaves besides the model's parameters (a batch that requires a gradient, another store's variables) get the
//! full batch's gradient on one device, atomically; elsewhere they are refused.

use crate::support::pipeline_cases::{builder, piped};
use crate::support::{
    Named, assert_all_close, assert_close, assert_same, clear, micro_batcher, numbers_there,
    test_device,
};
use brimful::memory::{Arena, Memory};
use brimful::schedule::Schedule;
use brimful::{Error, Layers, Loss, MicroBatcher, MicroBatches, Replicas};
use brimful_torch::autograd::set_gradient;
use tch::nn::{self, Module};
use tch::{Kind, Tensor};

const SAMPLES: i64 = 10;

/// Model in a store, factor in another, and a batch that requires a gradient; each already has a gradient.
struct Case {
    store: nn::VarStore,
    model: nn::Linear,
    factor: Tensor,
    x: Tensor,
}

impl Case {
    fn new() -> Self {
        tch::manual_seed(1);
        let mut store = nn::VarStore::new(test_device());
        let model = nn::linear(store.root(), 4, 3, Default::default());
        store.set_kind(Kind::Double);
        let leaf = |shape: &[i64], seed| numbers_there(shape, seed).set_requires_grad(true);
        let (factor, x) = (leaf(&[4], 5), leaf(&[SAMPLES, 4], 7));
        let case = Self { store, model, factor, x };
        for (_, mut leaf) in case.leaves() {
            let ones = leaf.ones_like();
            set_gradient(&mut leaf, Some(&ones)).expect("a gradient");
        }
        case
    }

    fn leaves(&self) -> Named {
        let model = self.store.variables().into_iter();
        let others = [("x", &self.x), ("factor", &self.factor)];
        let others = others.map(|(name, leaf)| (name.to_owned(), leaf.shallow_clone()));
        let mut all: Named = model.chain(others).collect();
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        all
    }

    fn gradients(&self) -> Named {
        self.leaves().into_iter().map(|(name, leaf)| (name, leaf.grad().copy())).collect()
    }

    fn out(&self, x: &Tensor) -> Tensor {
        self.model.forward(&(x * &self.factor).tanh())
    }

    /// Returns a loss with a denominator that is known only at the end, so that gradients are divided then.
    fn loss(&self, x: &Tensor) -> Loss {
        let out = self.out(x);
        Loss::ratio(out.square().sum(Kind::Double), positive(x)) + Loss::mean(mean(&out))
    }

    fn full(&self) {
        let out = self.out(&self.x);
        (out.square().sum(Kind::Double) / positive(&self.x) + mean(&out)).backward();
    }
}

fn positive(x: &Tensor) -> Tensor {
    x.gt(0.0).sum(Kind::Double)
}

fn mean(out: &Tensor) -> Tensor {
    out.sin().mean(Kind::Double)
}

const SIZES: [MicroBatches; 4] = [
    MicroBatches::Samples(1),
    MicroBatches::Samples(4),
    MicroBatches::Samples(100),
    MicroBatches::Auto,
];

#[test]
fn they_get_the_full_batchs_gradient() {
    let plain = Case::new();
    plain.full();
    for size in SIZES {
        let case = Case::new();
        let mut micro = micro_batcher(&case.store, size);
        micro.backward(&case.x, |x| case.loss(&x)).expect("a step");
        assert_close(&case.gradients(), &plain.gradients(), &format!("{size:?}"));
    }
}

#[test]
fn mini_batches_of_a_window_each_have_their_own() {
    let plain = Case::new();
    plain.full();
    let case = Case::new();
    let mut micro = micro_batcher(&case.store, MicroBatches::Samples(2));
    let rows = |start, end| case.x.slice(0, start, end, 1).detach().set_requires_grad(true);
    let parts = [rows(0, 3), rows(3, SAMPLES)];
    for part in &parts {
        micro.accumulate(part, |x| case.loss(&x)).expect("a part of the step");
    }
    assert!(parts.iter().all(|part| !part.grad().defined()));
    micro.commit().expect("the step");
    let x = Tensor::cat(&parts.map(|part| part.grad()), 0) + 1.0;
    let mut gradients = case.gradients();
    gradients.retain(|(name, _)| name != "x");
    gradients.push(("x".into(), x));
    assert_close(&gradients, &plain.gradients(), "a window");
}

#[test]
fn a_loss_on_all_outputs_reaches_them_too() {
    let loss = |out: &Tensor, factor: &Tensor| {
        (out.matmul(&out.tr()) * factor.sum(Kind::Double)).tanh().sum(Kind::Double)
    };
    let plain = Case::new();
    loss(&plain.out(&plain.x), &plain.factor).backward();
    for size in SIZES {
        let case = Case::new();
        let mut micro = micro_batcher(&case.store, size);
        let all = |out: &Tensor| loss(out, &case.factor);
        micro.backward_whole(&case.x, |x| case.out(&x), all).expect("a step");
        assert_close(&case.gradients(), &plain.gradients(), &format!("{size:?}"));
    }
}

#[test]
fn variables_that_the_closure_makes_count_from_its_first_micro_batch_on() {
    for size in SIZES {
        let case = Case::new();
        let mut made: Option<nn::Linear> = None;
        let step = micro_batcher(&case.store, size).backward(&case.x.detach(), |x| {
            let root = case.store.root();
            let build = || nn::linear(root / "late", 4, 4, Default::default());
            let x = made.get_or_insert_with(build).forward(&x);
            Loss::ratio(case.out(&x).sum(Kind::Double), x.size()[0] * 3)
        });
        step.expect("a step");
        let late = made.expect("it was called");
        let found = late.ws.grad().copy();
        let mut weight = late.ws.shallow_clone();
        set_gradient(&mut weight, None).expect("cleared");
        let out = case.out(&late.forward(&case.x.detach()));
        (out.sum(Kind::Double) / (SAMPLES * 3) as f64).backward();
        assert_all_close(&found, &weight.grad(), &format!("{size:?}"));
    }
}

#[test]
fn the_n_th_allocation_fails_for_every_n() {
    let arena = Arena::new("faulty");
    for n in 1.. {
        // The first step of each case: it allocates what later steps reuse.
        let case = Case::new();
        let before = case.gradients();
        let memory = Memory::Arena(arena.clone());
        let mut micro = MicroBatcher::new(&case.store, MicroBatches::Samples(4)).memory(memory);
        arena.fail_nth_allocation(n);
        let ended = micro.backward(&case.x, |x| case.loss(&x));
        arena.fail_nth_allocation(0);
        let Err(error) = ended else {
            assert!(n > 50 || test_device().is_cuda(), "only {n} in three micro-batches");
            break;
        };
        assert!(matches!(error, Error::OutOfMemory(_)), "allocation {n}: {error}");
        assert_same(&format!("allocation {n}"), &before, &case.gradients());
    }
}

/// bf16 has 8 bits: 256 + 1 rounds to 256.
#[test]
fn half_precision_beside_a_wide_model_is_summed_in_f32() {
    let case = Case::new();
    let half = numbers_there(&[1], 1).to_kind(Kind::BFloat16).set_requires_grad(true);
    let x = numbers_there(&[300, 4], 3);
    let mut micro = micro_batcher(&case.store, MicroBatches::Samples(1));
    let mut calls = 0;
    micro
        .backward(&x, |x| {
            calls += 1;
            let out = case.out(&x).sum(Kind::Double);
            // Not in the first call, so that the sums have begun without it.
            Loss::sum(if calls > 4 { out + half.sum(Kind::Double) } else { out })
        })
        .expect("a step");
    assert_eq!(half.grad().double_value(&[0]), 296.0);
    let ones = case.store.trainable_variables()[0].grad();
    clear(&case.store);
    case.out(&x).sum(Kind::Double).backward();
    let plain = case.store.trainable_variables()[0].grad() + 1.0;
    assert_all_close(&ones, &plain, "sums in other places");
}

#[test]
fn replicas_refuse_them_before_anything_has_changed() {
    let build = |root: &nn::Path| nn::linear(root, 4, 3, Default::default());
    let mut replicas = Replicas::new([test_device()], MicroBatches::Samples(3), build)
        .expect("one replica is enough");
    replicas.store_mut().double();
    let x = Case::new().x;
    let squares = |out: Tensor| out.square().sum(Kind::Double);
    let step = replicas.backward(&x, move |model, x| Loss::sum(squares(model.forward(&x))));
    refused(step, &[SAMPLES, 4]);
    let whole = replicas.backward_whole(
        &x,
        |model, x| model.forward(&x),
        move |_, out: &Tensor| squares(out.shallow_clone()),
    );
    refused(whole, &[SAMPLES, 4]);
    assert_eq!(x.grad(), x.ones_like());
    assert!(replicas.store().trainable_variables().iter().all(|weight| !weight.grad().defined()));
}

#[test]
fn a_pipeline_refuses_them_before_anything_has_changed() {
    let layers = Layers::new()
        .add("one", |p| nn::linear(p, 4, 4, Default::default()))
        .add("two", |p| nn::linear(p, 4, 3, Default::default()));
    for schedule in [Schedule::OneFOneB, Schedule::ZeroBubbleH1] {
        let pipe = builder(layers.clone(), 2)
            .schedule(schedule)
            .micro_batches(MicroBatches::Count(3))
            .build();
        let mut pipe = pipe.expect("a pipeline");
        let x = Case::new().x.detach();
        let scale = numbers_there(&[3], 2).set_requires_grad(true);
        let used = scale.shallow_clone();
        let step = pipe.backward(&x, &(), move |out: Tensor, (): &()| {
            Loss::sum((out * &used).square().sum(Kind::Double))
        });
        refused(step, &[3]);
        assert!(!scale.grad().defined());
        assert!(pipe.gradients().expect("gradients").is_empty());
        let step = pipe
            .backward(&x, &(), |out: Tensor, (): &()| Loss::sum(out.square().sum(Kind::Double)));
        step.expect("the next step");
    }
}

#[test]
fn a_loss_on_all_outputs_of_a_pipeline_refuses_leaves_of_its_own() {
    let layers = Layers::new().add("one", |p| nn::linear(p, 4, 3, Default::default()));
    let mut pipe = piped(layers, 1, 3);
    let x = Case::new().x.detach();
    let scale = numbers_there(&[3], 2).set_requires_grad(true);
    refused(pipe.backward_whole(&x, |out| (&**out * &scale).square().sum(Kind::Double)), &[3]);
    assert!(!scale.grad().defined());
    assert!(pipe.gradients().expect("gradients").is_empty());
    // With two calls, the loss's backward is the caller's own.
    let out = pipe.forward(&x).expect("a forward");
    (&*out * &scale).square().sum(Kind::Double).backward();
    pipe.backward_from(out).expect("a backward");
    assert!(scale.grad().defined());
}

#[track_caller]
fn refused<T>(result: brimful::Result<T>, shape: &[i64]) {
    let message = result.err().expect("an error").to_string();
    let expected = format!("a tensor of shape {shape:?} that requires a gradient");
    assert!(message.contains(&expected) && message.contains("detach it"), "{message}");
}
