//! Lists of layers: names, ranges, sharing, counting, and errors.

use super::*;
use crate::Error;
use crate::memory::Arena;
use crate::nn::{BatchNormConfig, BatchNormPolicy, Lora, batch_norm1d};
use crate::random::StepRng;
use std::ops::Range;
use tch::nn::VarStore;
use tch::{Device, Kind, nn};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

fn linear(inputs: i64, outputs: i64) -> impl Fn(&Path) -> nn::Linear + Send + Sync {
    move |p| nn::linear(p, inputs, outputs, Default::default())
}

/// Layers 4 → 8 → 8 → 8 → 2, with a nested list in the middle.
fn nested() -> Layers {
    let block = || Layers::new().add("fc", linear(8, 8)).add_fn("tanh", |x| x.tanh());
    Layers::new()
        .add("stem", linear(4, 8))
        .add_layers("blocks", Layers::new().add_layers("0", block()).add_layers("1", block()))
        .add_fn_t("drop", |x, train| x.dropout(0.5, train))
        .add("head", linear(8, 2))
}

/// A table of five rows, used by the first and the last layer.
fn tied() -> Layers {
    let table = |p: &Path| p.get("weight").unwrap_or_else(|| p.randn("weight", &[5, 3], 0.0, 1.0));
    Layers::new()
        .add("table", move |p| {
            let table = table(p);
            nn::func(move |x| Tensor::embedding(&table, x, -1, false, false))
        })
        .add_sharing("head", "table", move |_, p| {
            let table = table(p);
            nn::func(move |x| x.linear(&table, None::<Tensor>))
        })
}

fn names_of(vs: &VarStore) -> Vec<String> {
    let mut names: Vec<_> = vs.variables().into_keys().collect();
    names.sort();
    names
}

/// Asserts that building the list fails with an error that begins like this.
#[track_caller]
fn assert_refused(layers: &Layers, start: &str) {
    let error = error_of(layers);
    assert!(error.starts_with(start), "{error}");
}

#[track_caller]
fn error_of(layers: &Layers) -> String {
    let vs = VarStore::new(Device::Cpu);
    let error = layers.build(&vs.root()).expect_err("it is wrong");
    assert_eq!(layers.check(), Err(error.clone()));
    assert!(vs.is_empty(), "nothing is built of a list that is wrong");
    error.to_string()
}

#[test]
fn a_description_can_be_shared_between_threads() {
    fn shareable<T: Send + Sync + Clone>() {}
    shareable::<Layers>();
}

#[test]
fn nested_lists_flatten_and_join_their_names() {
    let layers = nested();
    let names = ["stem", "blocks.0.fc", "blocks.0.tanh", "blocks.1.fc", "blocks.1.tanh"];
    assert_eq!(layers.names().collect::<Vec<_>>(), [&names[..], &["drop", "head"]].concat());
    let vs = VarStore::new(Device::Cpu);
    let model = layers.build(&vs.root()).expect("a model");
    assert_eq!(model.names().collect::<Vec<_>>(), layers.names().collect::<Vec<_>>());
    assert!(vs.variables().contains_key("blocks.1.fc.weight"), "{:?}", names_of(&vs));
}

#[test]
fn the_parts_together_are_the_whole_under_the_same_names() {
    let (layers, x) = (nested(), Tensor::randn([3, 4], CPU));
    let whole_vs = VarStore::new(Device::Cpu);
    let whole = layers.build(&whole_vs.root()).expect("the whole");
    let expected = whole.forward_t(&x, false);
    for cut in 0..=layers.len() {
        let mut stores = [0..cut, cut..layers.len()].map(|range| {
            let vs = VarStore::new(Device::Cpu);
            let part = layers.build_range(&vs.root(), range).expect("a part");
            (vs, part)
        });
        for (vs, _) in &mut stores {
            vs.copy(&whole_vs).expect("the same names");
        }
        let out = stores.iter().fold(x.shallow_clone(), |x, (_, part)| part.forward_t(&x, false));
        assert_eq!(out, expected, "cut before layer {cut}");
    }
}

#[test]
fn functions_hear_whether_they_train() {
    let layers = Layers::new().add_fn_t("drop", |x, train| x.dropout(1.0, train));
    let vs = VarStore::new(Device::Cpu);
    let model = layers.build(&vs.root()).expect("a model");
    let x = Tensor::ones([4], CPU);
    assert_eq!(model.forward_t(&x, false), x);
    assert_eq!(model.forward_t(&x, true), x.zeros_like());
}

#[test]
fn no_layers_give_what_they_are_given() {
    let vs = VarStore::new(Device::Cpu);
    let model = Layers::new().build(&vs.root()).expect("an empty model");
    let x = Tensor::ones([2], CPU);
    assert!(model.is_empty() && model.forward_t(&x, true) == x);
    assert_eq!(Layers::new().parameter_count(), Ok(0));
}

#[test]
fn shared_variables_exist_once_and_collect_both_gradients() {
    let layers = Layers::new().add_layers("gpt", tied());
    assert_eq!(layers.shared(), Ok(vec![(1, 0)]));
    let vs = VarStore::new(Device::Cpu);
    let model = layers.build(&vs.root()).expect("a model");
    assert_eq!(names_of(&vs), ["gpt.table.weight"]);
    assert_eq!(layers.parameter_counts(), Ok(vec![15, 0]));
    let out = model.forward_t(&Tensor::from_slice(&[0_i64, 1]), true);
    out.sum(Kind::Float).backward();
    let gradient = vs.variables()["gpt.table.weight"].grad();
    // Only the head uses row 4; both layers use row 0.
    assert!(gradient.get(4) != gradient.get(0) && gradient.get(4) == gradient.get(3));
}

#[test]
fn a_part_makes_the_shared_variables_that_it_lacks_under_their_owners_name() {
    let vs = VarStore::new(Device::Cpu);
    tied().build_range(&vs.root(), 1..2).expect("the head alone");
    assert_eq!(names_of(&vs), ["table.weight"]);
}

#[test]
fn counting_needs_no_memory() {
    let arena = Arena::limited("tiny", 1 << 10).expect("a limit");
    let _inside = arena.enter();
    let large = Layers::new().add("a", linear(1 << 20, 1 << 20)).add("b", linear(1 << 20, 7));
    let (a, b) = ((1 << 40) + (1 << 20), 7 * (1 << 20) + 7);
    assert_eq!(large.parameter_counts(), Ok(vec![a, b]));
    assert_eq!(large.parameter_count(), Ok(a + b));
    let vs = VarStore::new(Device::Cpu);
    let error = large.build(&vs.root()).expect_err("4 TiB");
    assert!(matches!(error, Error::OutOfMemory(_)), "{error}");
}

#[test]
fn a_layer_that_cannot_be_built_is_named() {
    let layers = Layers::new().add("odd", |p| nn::linear(p, -3, 2, Default::default()));
    let vs = VarStore::new(Device::Cpu);
    let error = layers.build(&vs.root()).expect_err("-3 inputs").to_string();
    assert!(error.starts_with("layer 'odd' could not be built: "), "{error}");
}

#[test]
fn names_that_are_missing_or_broken_are_refused() {
    for name in ["", ".a", "a.", "a..b"] {
        let layers = nested().add_fn(name, Tensor::relu);
        assert_refused(&layers, &format!("layer 7 cannot be named '{name}'"));
    }
}

#[test]
fn a_name_given_twice_or_inside_another_is_refused_with_both_places() {
    let twice = "layers 1 and 7 are both named 'blocks.0.fc': rename one of them";
    assert_eq!(error_of(&nested().add_fn("blocks.0.fc", Tensor::relu)), twice);
    let inside = "layer 1, 'blocks.0.fc', lies inside layer 7, 'blocks'";
    assert_refused(&nested().add_fn("blocks", Tensor::relu), inside);
}

#[test]
fn sharing_with_a_layer_that_is_not_there_before_is_refused() {
    for owner in ["nobody", "late", "self"] {
        let user = |_: &Path, _: &Path| nn::func(Tensor::relu);
        let layers = Layers::new().add_sharing("self", owner, user).add_fn("late", Tensor::relu);
        assert_refused(&layers, "layer 0, 'self', shares the variables of ");
    }
}

#[test]
#[allow(clippy::reversed_empty_ranges, reason = "the range that is tested")]
fn ranges_outside_the_list_are_refused() {
    let vs = VarStore::new(Device::Cpu);
    for range in [3..8, 8..9, 5..4] {
        let Range { start, end } = range;
        let error = nested().build_range(&vs.root(), range).expect_err("no such range");
        assert_eq!(error, Error::Layers(LayersError::Range { start, end, len: 7 }));
    }
}

/// Two levels of a U-Net, both of which name their skip `skip`.
fn u_net() -> Layers {
    let level = |inner: Layers| {
        Layers::new().stash("skip").add_fn("half", |x| x / 2).add_layers("inner", inner).pop(
            "join",
            "skip",
            |x, skip| x + skip * 10,
        )
    };
    level(level(Layers::new().add_fn("bottom", |x| x + 1)))
}

#[test]
fn a_skip_is_popped_in_its_own_list() {
    let skips = u_net().skips().expect("paired");
    assert_eq!(skips, [(0, 6), (2, 5)]);
    let model = u_net().build(&VarStore::new(Device::Cpu).root()).expect("built");
    let out = model.forward_t(&Tensor::from(8.0), true);
    // 8 → 4 → 2 → 3; 3 + 10 · 4; 43 + 10 · 8
    assert_eq!(f64::try_from(out).expect("a number"), 123.0);
}

#[test]
fn a_skip_of_an_outer_list_is_popped_in_an_inner_one_and_more_than_once() {
    let add = |x: &Tensor, skip: &Tensor| x + skip;
    let inner = Layers::new().pop("first", "skip", add).pop("second", "skip", add);
    let layers = Layers::new().stash("skip").add_layers("inner", inner).pop("third", "skip", add);
    assert_eq!(layers.skips().expect("paired"), [(0, 1), (0, 2), (0, 3)]);
    let model = layers.build(&VarStore::new(Device::Cpu).root()).expect("built");
    assert_eq!(model.forward_t(&Tensor::from(3), true).int64_value(&[]), 12);
}

#[test]
fn several_tensors_flow_from_layer_to_layer() {
    let layers = Layers::new()
        .add_many("pair", |_| |x, _| vec![x[0].shallow_clone(), &x[0] * 2])
        .stash("pair_skip")
        .add_many("scaled", |p| {
            let scale = p.ones("scale", &[1]);
            move |x, train| vec![&x[0] * &scale, &x[1] + i64::from(train)]
        })
        .pop_many("sums", "pair_skip", |x, skip| vec![&x[0] + &skip[0], &x[1] + &skip[1]]);
    let model = layers.build(&VarStore::new(Device::Cpu).root()).expect("built");
    let out = model.forward_many(&[Tensor::from(5.0)], true);
    let numbers: Vec<f64> = out.iter().map(|t| t.double_value(&[])).collect();
    assert_eq!(numbers, [10.0, 21.0]);
}

#[test]
fn a_normalisation_may_pop_and_is_a_layer_like_others() {
    let exact = BatchNormConfig { policy: BatchNormPolicy::Exact, ..Default::default() };
    let block = Layers::new().stash("entry").add("fc", linear(4, 4)).pop_norm("norm", "entry", {
        move |p| {
            let norm = batch_norm1d(p, 4, exact);
            move |x, entry, train| norm.forward_add_relu(x, entry, train)
        }
    });
    let layers = Layers::new().add_layers("block", block);
    assert_eq!(layers.skips().expect("a skip"), [(0, 2)]);
    assert_eq!(layers.exact_norms().expect("norms"), [2]);
    let store = VarStore::new(Device::Cpu);
    let model = layers.lora(&Lora::new(2)).build(&store.root()).expect("built");
    // Its variables are named and frozen like those of any other layer.
    assert!(!store.variables()["block.norm.weight"].requires_grad());
    let x = Tensor::randn([6, 4], CPU);
    let fc = |name: &str| store.variables()[&format!("block.fc.{name}")].shallow_clone();
    let inner = x.linear(&fc("weight"), Some(fc("bias")));
    let expected = (&x + &inner / (1.0_f64 + 1e-5).sqrt()).relu();
    let off = (model.forward_t(&x, false) - expected).abs().max().double_value(&[]);
    assert!(off < 1e-6, "off by {off}");
}

#[test]
fn skips_without_a_partner_are_refused_with_their_layers() {
    let pop = |layers: Layers| layers.pop("join", "skip", |x, skip| x + skip);
    let neither = "layer 1, 'join', pops 'skip', which is stashed neither";
    assert_refused(&pop(Layers::new().add_fn("first", Tensor::relu)), neither);
    let later = "layer 0, 'join', pops 'skip', which is stashed only later, by layer 1";
    assert_refused(&pop(Layers::new()).stash("skip"), later);
    let unused = "layer 0 stashes 'skip', which no layer pops: pop it, or remove it";
    assert_eq!(error_of(&Layers::new().stash("skip")), unused);
    let twice = "layers 0 and 1 are both named 'skip': rename one of them";
    assert_eq!(error_of(&pop(Layers::new().stash("skip").stash("skip"))), twice);
    // The stash of an inner list is local to it.
    let inner = Layers::new().add_layers("inner", Layers::new().stash("skip"));
    assert_refused(&pop(inner), neither);
}

#[test]
#[should_panic(expected = "2 tensors came where one was expected")]
fn a_layer_of_one_tensor_says_so() {
    let layers = Layers::new().add_many("pair", |_| |x, _| x[0].chunk(2, 0));
    let layers = layers.add_fn("relu", Tensor::relu);
    let model = layers.build(&VarStore::new(Device::Cpu).root()).expect("built");
    let _ = model.forward_t(&Tensor::ones([2, 2], CPU), true);
}

/// Four layers of 1 MiB in f32; the head shares the weights of the first.
fn wide() -> Layers {
    let layers = (0..4).fold(Layers::new(), |layers, number| {
        layers.add(format!("fc{number}"), |p| {
            nn::linear(p, 512, 512, nn::LinearConfig { bias: false, ..Default::default() })
        })
    });
    layers.add_sharing("head", "fc0", |_, p| {
        let weight = p.get("weight").expect("it is the first layer's");
        nn::func(move |x| x.linear(&weight, None::<Tensor>))
    })
}

#[test]
fn layers_of_a_dtype_are_never_all_there_in_another() {
    const LAYER: u64 = 512 * 512 * 4;
    let arena = Arena::new("half");
    let _inside = arena.enter();
    let store = VarStore::new(Device::Cpu);
    let build = |layers: Layers, store: &VarStore| {
        let built = layers.build_range_with_rng(&store.root(), 0..5, StepRng::new(3, 0));
        built.expect("a model")
    };
    build(wide().kind(Kind::BFloat16), &store);
    // All layers at two bytes a number, and one at four, with its copy at two.
    assert_eq!(arena.current(), 4 * LAYER / 2);
    assert!(arena.peak() <= 4 * LAYER / 2 + 2 * LAYER, "{}", arena.peak());
    // The values equal those of a model that was converted at the end.
    let mut plain = VarStore::new(Device::Cpu);
    build(wide(), &plain);
    plain.set_kind(Kind::BFloat16);
    assert_eq!(store.variables(), plain.variables());
}

#[test]
fn memory_that_runs_out_in_a_conversion_is_an_error() {
    const LAYER: u64 = 512 * 512 * 4;
    let arena = Arena::limited("half", LAYER + LAYER / 4).expect("a limit");
    let _inside = arena.enter();
    let store = VarStore::new(Device::Cpu);
    let error = wide().kind(Kind::BFloat16).build(&store.root()).expect_err("no room for a copy");
    let oom = error.out_of_memory().expect("memory ran out");
    assert_eq!(oom.limit.map(|limit| limit.0), Some(LAYER + LAYER / 4));
}
