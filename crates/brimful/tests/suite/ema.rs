//! Weight averages: their updates, their use in place of the weights, and saving.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0` runs the same tests on a GPU.

use crate::support::pipeline_cases::{CASES, CNN, Plain, builder, mlp, piped};
use crate::support::{
    Named, Update, assert_close, assert_fails, assert_same, copies, numbers_there, set_values,
    test_device, variables,
};
use brimful::memory::Arena;
use brimful::optim::{Ema, OptimError, Optimizer, Sgd};
use brimful::{DeviceSpec, Error, MicroBatches, Pipeline};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

/// Two parameters and a running statistic.
fn store(kind: Kind) -> VarStore {
    let mut store = VarStore::new(test_device());
    for (seed, (name, shape)) in [("weight", &[3, 2][..]), ("bias", &[3])].into_iter().enumerate() {
        let _ = store.root().var_copy(name, &numbers_there(shape, seed as i64));
    }
    let _ = store.root().ones_no_train("mean", &[3]);
    store.set_kind(kind);
    store
}

/// Changes all values, as a step does.
fn move_all(store: &VarStore, seed: i64) {
    let _no_grad = tch::no_grad_guard();
    for (name, mut variable) in store.variables() {
        let change = numbers_there(&variable.size(), seed + name.len() as i64);
        let moved = &variable + change.to_kind(variable.kind());
        variable.copy_(&moved);
    }
}

fn values(store: &VarStore) -> Named {
    copies(&variables(store))
}

fn averages(ema: &Ema) -> Named {
    let mut all: Named = copies(&ema.averages().expect("averages"));
    all.sort_by(|(a, _), (b, _)| a.cmp(b));
    all
}

fn value(named: &Named, name: &str) -> Tensor {
    let found = named.iter().find(|(known, _)| known == name);
    found.expect("a tensor of that name").1.to_kind(Kind::Double)
}

#[test]
fn averages_follow_the_weights_and_statistics_are_copied() {
    for (warmup, decays) in [(false, [0.5; 3]), (true, [0.1, 2.0 / 11.0, 0.25])] {
        let store = store(Kind::Double);
        let mut ema = Ema::new(&store, 0.5).expect("averages").warmup(warmup);
        let mut expected = value(&values(&store), "weight");
        for (step, decay) in decays.into_iter().enumerate() {
            move_all(&store, step as i64);
            ema.update().expect("an update");
            expected = expected * decay + value(&values(&store), "weight") * (1.0 - decay);
        }
        let found = averages(&ema);
        assert!(value(&found, "weight").allclose(&expected, 1e-14, 1e-14, false));
        assert_eq!(value(&found, "mean"), value(&values(&store), "mean"));
        assert_eq!(ema.updates(), 3);
        assert_eq!(found.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), NAMES);
    }
}

const NAMES: [&str; 3] = ["bias", "mean", "weight"];

#[test]
fn half_weights_have_averages_in_f32_that_lose_no_small_change() {
    for kind in [Kind::Half, Kind::BFloat16] {
        let (half, full) = (store(kind), store(Kind::Double));
        // The initial values are rounded in only one of them: averages begin after the first change.
        let move_both = |step: i64| {
            move_all(&half, step);
            set_values(&full, &variables(&half));
        };
        move_both(0);
        let [mut ema, mut wide] =
            [&half, &full].map(|store| Ema::new(store, 0.999).expect("averages"));
        for step in 1..=20 {
            ema.update().expect("an update");
            wide.update().expect("an update");
            move_both(step);
        }
        let (ours, expected) = (averages(&ema), averages(&wide));
        for (name, average) in &ours {
            assert_eq!(average.kind(), Kind::Float, "{name}");
            let expected = value(&expected, name);
            assert!(value(&ours, name).allclose(&expected, 1e-5, 1e-5, false), "{name}");
        }
    }
}

#[test]
fn the_models_own_weights_come_back_to_the_last_bit() {
    for kind in [Kind::Float, Kind::BFloat16] {
        let store = store(kind);
        let mut ema = Ema::new(&store, 0.9).expect("averages");
        move_all(&store, 7);
        ema.update().expect("an update");
        let own = values(&store);
        ema.swap_in().expect("swapped");
        ema.swap_in().expect("they are in place");
        for (name, average) in averages(&ema) {
            let inside = &store.variables()[&name];
            assert_eq!(*inside, average.to_kind(kind), "{name}");
        }
        let refused = ema.update().expect_err("in place");
        assert_eq!(refused, OptimError::AveragesInPlace.into());
        let (tensors, texts) = ema.state().expect("a state");
        let refused = ema.load_state(&tensors, &texts).expect_err("in place");
        assert_eq!(refused, OptimError::AveragesInPlace.into());
        ema.swap_out().expect("swapped");
        ema.swap_out().expect("they are in place");
        assert_eq!(values(&store), own);
        ema.update().expect("an update");
    }
}

#[test]
fn an_evaluation_with_averages_leaves_no_trace_in_the_training() {
    let train = |swaps: bool| {
        let store = store(Kind::BFloat16);
        let mut optimizer = Optimizer::new(&store, Sgd::new(0.01)).expect("an optimizer");
        let mut ema = Ema::new(&store, 0.9).expect("averages");
        for _ in 0..5 {
            let weight = &store.variables()["weight"];
            (weight * weight).sum(Kind::Float).backward();
            optimizer.update();
            ema.update().expect("an update");
            if swaps {
                ema.swap_in().expect("swapped");
                ema.swap_out().expect("swapped");
            }
        }
        // The master weights too.
        let (state, _) = optimizer.state().expect("a state");
        (values(&store), averages(&ema), state)
    };
    assert_eq!(train(true), train(false));
}

#[test]
fn saved_averages_go_on_exactly_where_they_stopped() {
    let store = store(Kind::Float);
    let mut ema = Ema::new(&store, 0.99).expect("averages").warmup(true);
    move_all(&store, 1);
    ema.update().expect("an update");
    let (tensors, texts) = ema.state().expect("a state");
    let tensors = copies(&tensors);
    let mut other = Ema::new(&store, 0.5).expect("averages");
    other.load_state(&tensors, &texts).expect("loaded");
    move_all(&store, 2);
    ema.update().expect("an update");
    other.update().expect("an update");
    assert_eq!(averages(&other), averages(&ema));
    assert_eq!(other.state().expect("a state").1, ema.state().expect("a state").1);
}

#[test]
fn averages_that_do_not_fit_are_refused_by_name_and_change_nothing() {
    let store = store(Kind::Float);
    let mut ema = Ema::new(&store, 0.9).expect("averages");
    let before = averages(&ema);
    let (tensors, texts) = ema.state().expect("a state");
    let named = |name: &str, shape: &[i64]| (name.to_owned(), numbers_there(shape, 3));
    let with = |more: (String, Tensor)| {
        let kept = tensors.iter().filter(|(name, _)| *name != more.0);
        let mut all: Named = kept.map(|(name, value)| (name.clone(), value + 1.0)).collect();
        all.push(more);
        all
    };
    let cases = [
        (with(named("weight", &[2])), "'weight' is of shape [2] in them, but of shape [3, 2] here"),
        (with(named("more", &[2])), "'more' is of shape [2] in them, but missing here"),
        (with(named("more", &[2])).split_off(1), "'bias' is missing in them"),
    ];
    for (tensors, expected) in cases {
        assert_fails(ema.load_state(&tensors, &texts), &[expected]);
    }
    for (key, text) in [("format", "x"), ("decay", "2"), ("updates", "-1"), ("warmup", "x")] {
        let mut texts = texts.clone();
        texts.insert(key.to_owned(), text.to_owned());
        assert_fails(ema.load_state(&tensors, &texts), &[key]);
    }
    assert_eq!(averages(&ema), before);
    for decay in [-0.1, 1.0, f64::NAN] {
        let error = Ema::new(&store, decay).expect_err("no decay");
        assert!(matches!(error, Error::Optim(OptimError::BadOption { .. })), "{error}");
    }
}

#[test]
fn averages_are_counted_in_the_memory_that_is_entered_and_an_update_is_whole_or_not_at_all() {
    let mut store = VarStore::new(Device::Cpu);
    let _ = store.root().ones("weight", &[64, 64]);
    store.set_kind(Kind::BFloat16);
    // Enough memory for the f32 averages, but not for converted weights beside them.
    let arena = Arena::limited("averages", 20_000).expect("an arena");
    let mut ema = {
        let _inside = arena.enter();
        Ema::new(&store, 0.9).expect("averages")
    };
    assert!(arena.current() >= 4 * 64 * 64);
    let _ = tch::no_grad(|| store.variables()["weight"].shallow_clone().fill_(3.0));
    let before = averages(&ema);
    {
        let _inside = arena.enter();
        let error = ema.update().expect_err("too little memory");
        assert!(matches!(error, Error::OutOfMemory(_)), "{error}");
    }
    assert_eq!((averages(&ema), ema.updates()), (before, 0));
    ema.update().expect("outside there is room");
}

#[test]
fn a_pipelines_averages_are_those_of_the_plain_model_whatever_the_balance() {
    tch::manual_seed(3);
    for case in &CASES {
        let layers = (case.layers)();
        let mut pipe = piped(layers.clone(), 3, 2);
        let plain = Plain::of(&layers, &pipe);
        let mut optimizer = pipe.optimizer(Sgd::new(0.1)).expect("an optimizer");
        let mut own = Optimizer::new(&plain.store, Sgd::new(0.1)).expect("an optimizer");
        let mut ema = pipe.ema(0.9).expect("averages").warmup(true);
        let mut expected = Ema::new(&plain.store, 0.9).expect("averages").warmup(true);
        for _ in 0..3 {
            let (x, y) = ((case.input)(6), (case.target)(6));
            let step = pipe.backward(&x, &y, case.loss).expect("a step");
            plain.backward(case, &x, &y, MicroBatches::Count(2), step.seed);
            optimizer.update();
            own.update();
            ema.update().expect("an update");
            expected.update().expect("an update");
        }
        let (found, texts) = ema.state().expect("a state");
        assert_close(&found, &averages(&expected), case.name);
        assert_eq!(texts, expected.state().expect("a state").1, "{}", case.name);

        let mut other = builder(layers, 2).build().expect("a pipeline");
        let mut loaded = other.ema(0.5).expect("averages");
        loaded.load_state(&found, &texts).expect("loaded");
        loaded.swap_in().expect("swapped");
        assert_close(&other.variables().expect("variables"), &found, case.name);
    }
}

#[test]
fn a_pipeline_is_judged_with_its_averages_and_trains_on_with_its_own_weights() {
    tch::manual_seed(4);
    // Copies of shared weights are updated too.
    for case in &CASES {
        let mut pipe = piped((case.layers)(), 3, 2);
        let (x, y) = ((case.input)(6), (case.target)(6));
        let judged = |pipe: &mut Pipeline| pipe.evaluate(&x, &y, case.loss).expect("judged").loss;
        let mut ema = pipe.ema(0.9).expect("averages");
        let first = judged(&mut pipe);
        let moved = pipe.variables().expect("variables").into_iter();
        let moved: Named = moved.map(|(name, value)| (name, value.detach() + 0.5)).collect();
        pipe.set_variables(moved).expect("set");
        let last = judged(&mut pipe);
        ema.swap_in().expect("swapped");
        assert_eq!(judged(&mut pipe), first, "{}", case.name);
        ema.swap_out().expect("swapped");
        assert_eq!(judged(&mut pipe), last, "{}", case.name);
        assert_ne!(first, last, "{}", case.name);
    }
}

/// A second handle replaces the averages of the first one, on all workers or on none.
#[test]
fn averages_that_cannot_be_made_leave_earlier_ones() {
    if test_device() != Device::Cpu {
        return;
    }
    let arenas = ["first", "second"].map(Arena::new);
    let devices = arenas.clone().map(|arena| DeviceSpec::from(arena).threads(1));
    let mut pipe = builder(mlp(), 2).devices(devices).build().expect("a pipeline");
    let ema = pipe.ema(0.9).expect("averages");
    let before = ema.state().expect("a state").0;
    let moved = pipe.variables().expect("variables").into_iter();
    let moved = moved.map(|(name, value)| (name, value.detach() + 0.5)).collect();
    pipe.set_variables(moved).expect("set");
    arenas[1].fail_from_nth_allocation(1);
    let error = pipe.ema(0.9).map(drop).expect_err("too little memory on the second device");
    assert!(error.out_of_memory().is_some(), "{error}");
    arenas[1].fail_nth_allocation(0);
    assert_same("averages", &before, &ema.state().expect("a state").0);
}

#[test]
fn averages_of_another_model_are_refused_by_a_pipeline() {
    let mut pipe = builder(mlp(), 2).build().expect("a pipeline");
    let mut ema = pipe.ema(0.9).expect("averages");
    let mut other = builder((CNN.layers)(), 1).build().expect("a pipeline");
    let (tensors, texts) = other.ema(0.9).expect("averages").state().expect("a state");
    let error = ema.load_state(&tensors, &texts).expect_err("others");
    assert!(matches!(error, Error::Optim(OptimError::AveragesMismatch { .. })), "{error}");
    let (mut tensors, texts) = ema.state().expect("a state");
    tensors.pop();
    assert_fails(ema.load_state(&tensors, &texts), &["is missing in them"]);
}
