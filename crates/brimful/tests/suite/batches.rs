//! Every batch is cut without a copy, joined without a change, and refused if it is invalid.

use std::collections::BTreeMap;
use std::ops::Range;

use brimful::batch::BatchError;
use brimful::batch::{self, Leaf};
use brimful::memory::Arena;
use brimful::{Batch, Error, Layers, Loss, MicroBatcher, MicroBatches, Pipeline, Shared};
use brimful_plan::split;
use proptest::prelude::*;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

/// Distinct numbers, so that a mix-up shows.
fn counted(shape: &[i64]) -> Tensor {
    let count = shape.iter().product::<i64>();
    Tensor::arange(count, (Kind::Float, Device::Cpu)).reshape(shape)
}

fn leaves<B: Batch>(batch: &B) -> Vec<Leaf<'_>> {
    let mut leaves = Vec::new();
    batch.visit(&mut |leaf| leaves.push(leaf));
    leaves
}

fn sizes<B: Batch>(batch: &B) -> Vec<Vec<i64>> {
    leaves(batch).iter().map(|leaf| leaf.tensor().size()).collect()
}

fn cut<B: Batch>(batch: &B, ranges: &[Range<usize>]) -> Vec<B> {
    ranges.iter().map(|range| batch::slice(batch, range.clone()).expect("a slice")).collect()
}

/// Cuts into micro-batches of each size and joins them again.
fn round_trip<B: Batch>(batch: &B) {
    let samples = batch::len(batch).expect("a length");
    for size in 1..=samples + 1 {
        cut_and_join(batch, &split::by_size(samples, size).expect("a split"));
    }
}

/// Cuts into micro-batches, checks that these are views, and joins them again.
fn cut_and_join<B: Batch>(batch: &B, ranges: &[Range<usize>]) {
    let parts = cut(batch, ranges);
    for (part, range) in parts.iter().zip(ranges) {
        check_views(batch, part, range);
    }
    check_equal(&batch::join(parts).expect("a batch"), batch);
}

fn check_views<B: Batch>(whole: &B, part: &B, range: &Range<usize>) {
    assert_eq!(leaves(whole).len(), leaves(part).len());
    for (whole, part) in leaves(whole).into_iter().zip(leaves(part)) {
        let start = match (whole, part) {
            (Leaf::Cut(_), Leaf::Cut(part)) => {
                assert_eq!(part.size()[0] as usize, range.len());
                range.start
            }
            (Leaf::Shared(_), Leaf::Shared(_)) => 0,
            mixed => panic!("{mixed:?}"),
        };
        let (whole, part) = (whole.tensor(), part.tensor());
        if part.numel() == 0 {
            continue; // Without elements there is no address to compare.
        }
        let stride = whole.stride().first().map_or(0, |&stride| stride as usize);
        let offset = start * stride * whole.kind().elt_size_in_bytes();
        assert_eq!(part.data_ptr() as usize, whole.data_ptr() as usize + offset);
    }
}

fn check_equal<B: Batch>(left: &B, right: &B) {
    let (left, right) = (leaves(left), leaves(right));
    assert_eq!(left.len(), right.len());
    for (left, right) in left.into_iter().zip(right) {
        assert_eq!(matches!(left, Leaf::Cut(_)), matches!(right, Leaf::Cut(_)));
        assert_eq!(left.tensor(), right.tensor());
    }
}

#[derive(Debug, Batch)]
struct Sentences {
    tokens: Tensor,
    lengths: Option<Tensor>,
    #[batch(shared)]
    weights: (Tensor, Tensor),
    name: String,
}

#[derive(Batch)]
struct Pair<A, B = Tensor>(A, B);

#[derive(Batch)]
struct Views<'n, T, const N: usize>
where
    T: Clone,
    'n: 'static,
{
    images: [Tensor; N],
    r#type: T,
    nested: Vec<Pair<Tensor, Box<Pair<T>>>>,
    tag: Tag<'n>,
}

/// Implemented by hand, as the derive cannot.
#[derive(Clone)]
struct Tag<'n>(&'n str);

impl Batch for Tag<'_> {
    fn visit<'a>(&'a self, _: &mut dyn FnMut(Leaf<'a>)) {}

    fn map(&self, _: &mut dyn FnMut(Leaf<'_>) -> brimful::Result<Tensor>) -> brimful::Result<Self> {
        Ok(self.clone())
    }
}

#[derive(Batch)]
struct Nothing;

fn sentences(samples: i64) -> Sentences {
    Sentences {
        tokens: counted(&[samples, 4]),
        lengths: Some(counted(&[samples])),
        weights: (counted(&[10]), counted(&[])),
        name: "train".into(),
    }
}

#[test]
fn every_container_is_cut_and_joined() {
    let x = || counted(&[5, 3]);
    let y = || counted(&[5]);
    round_trip(&x());
    round_trip(&(x(),));
    round_trip(&(x(), y()));
    round_trip(&(x(), y(), x(), y(), x(), y(), x(), (y(), ())));
    round_trip(&[x(), x(), x()]);
    round_trip(&vec![x(), y()]);
    round_trip(&(x(), Some(y()), None::<Tensor>));
    round_trip(&Box::new((x(), y())));
    round_trip(&(x(), Shared(counted(&[10]))));
    round_trip(&BTreeMap::from([("image", x()), ("label", y())].map(|(k, v)| (k.to_owned(), v))));
    round_trip(&vec![Some((x(), Box::new([y(), y()]))), None]);
}

#[test]
fn numbers_and_strings_go_to_every_micro_batch() {
    let batch = (counted(&[4]), 3_usize, -0.5_f64, 'c', true, String::from("s"), vec![1_u8, 2]);
    round_trip(&batch);
    let part = batch::slice(&batch, 1..3).expect("a slice");
    assert_eq!((part.1, part.2, part.3, part.4), (3, -0.5, 'c', true));
    assert_eq!((part.5.as_str(), part.6), ("s", vec![1, 2]));
}

#[test]
fn a_struct_is_cut_field_by_field_and_its_shared_fields_are_not() {
    let batch = sentences(6);
    round_trip(&batch);
    let part = batch::slice(&batch, 4..6).expect("a slice");
    assert_eq!(part.tokens, counted(&[6, 4]).narrow(0, 4, 2));
    assert_eq!(part.lengths.expect("lengths").size(), [2]);
    assert_eq!((part.weights.0.size(), part.weights.1.size()), (vec![10], vec![]));
    assert_eq!(part.name, "train");
}

#[test]
fn generic_tuple_and_unit_structs_are_batches_too() {
    round_trip(&Pair(counted(&[3]), Pair(counted(&[3, 1]), Some(counted(&[3])))));
    let nested = vec![Pair(counted(&[3]), Box::new(Pair(7_i64, counted(&[3, 2]))))];
    let images = [counted(&[3, 2, 2]), counted(&[3, 1, 1])];
    let views = Views { images, r#type: 7_i64, nested, tag: Tag("a") };
    round_trip(&views);
    assert_eq!(sizes(&views), [vec![3, 2, 2], vec![3, 1, 1], vec![3], vec![3, 2]]);
    let part = batch::slice(&views, 0..2).expect("a slice");
    assert_eq!((part.r#type, part.tag.0), (7, "a"));
    round_trip(&(counted(&[2]), Nothing));
}

#[test]
fn what_is_inside_shared_is_shared_however_deep() {
    let batch = (counted(&[4]), Shared((counted(&[7]), vec![Shared(sentences(2))])));
    assert_eq!(batch::len(&batch), Ok(4));
    assert!(leaves(&batch)[1..].iter().all(|leaf| matches!(leaf, Leaf::Shared(_))));
    round_trip(&batch);
    assert_eq!(batch.1.0.0.size(), [7]);
    assert_eq!(Shared(vec![1, 2]).len(), 2);
}

#[test]
fn map_replaces_the_leaves_in_the_order_of_visit() {
    let batch = sentences(2);
    let mut seen = Vec::new();
    let doubled = batch
        .map(&mut |leaf| {
            seen.push(leaf.tensor().size());
            Ok(leaf.tensor() * 2)
        })
        .expect("a batch");
    assert_eq!(seen, sizes(&batch));
    assert_eq!(doubled.tokens, &batch.tokens * 2);
    assert_eq!(doubled.weights.1, &batch.weights.1 * 2);
    let error = batch.map(&mut |_| Err(Error::Batch(BatchError::Empty)));
    assert_eq!(error.err(), Some(Error::Batch(BatchError::Empty)));
}

#[test]
fn gradients_flow_back_through_cut_and_join() {
    let x = counted(&[5, 2]).set_requires_grad(true);
    let parts = cut(&x, &[0..3, 3..5]);
    batch::join(parts).expect("a batch").square().sum(Kind::Float).backward();
    assert_eq!(x.grad(), x.detach() * 2);
}

#[test]
fn results_of_one_number_become_one_number_for_each_part() {
    let losses = |count: i64| (0..count).map(|i| (counted(&[2, 3]), Tensor::from(i as f32)));
    let (outputs, joined) = batch::join(losses(4).collect()).expect("a batch");
    assert_eq!((outputs.size(), joined.size()), (vec![8, 3], vec![4]));
    assert_eq!(joined, counted(&[4]));
    // A single micro-batch is no exception.
    let (outputs, joined) = batch::join(losses(1).collect()).expect("a batch");
    assert_eq!((outputs.size(), joined.size()), (vec![2, 3], vec![1]));
}

#[test]
fn parts_of_different_length_join_in_their_order() {
    let x = counted(&[7, 2]);
    let parts = cut(&x, &[0..1, 1..1, 1..5, 5..7]);
    assert_eq!(batch::join(parts).expect("a batch"), x);
}

#[test]
fn joining_holds_one_leaf_twice_at_most() {
    let arena = Arena::new("join");
    let _inside = arena.enter();
    let part = |_| (counted(&[1000]), counted(&[1000]));
    let parts: Vec<_> = (0..4).map(part).collect();
    assert_eq!(arena.current(), 32_000);
    arena.reset_peak();
    let joined = batch::join(parts).expect("a batch");
    // The first leaf joined, the first part's own, and the second leaf in parts and joined.
    assert_eq!(arena.peak(), 16_000 + 4_000 + 2 * 16_000);
    assert_eq!(arena.current(), 32_000);
    drop(joined);
}

fn message<T>(result: brimful::Result<T>) -> String {
    result.err().expect("an error").to_string()
}

#[test]
fn leaves_of_different_length_are_listed() {
    let batch = (counted(&[8, 2]), Shared(counted(&[3])), vec![counted(&[8]), counted(&[6])]);
    assert_eq!(
        message(batch::len(&batch)),
        "the leaves of a batch must have the same length, but are 8, 8 and 6 long: give each leaf the \
         same samples, and wrap in `Shared` what all micro-batches share"
    );
    let zero = (counted(&[0, 2]), counted(&[3]));
    assert_eq!(
        batch::len(&zero),
        Err(Error::Batch(BatchError::LeafLengthsDiffer { lengths: vec![0, 3] }))
    );
}

#[test]
fn a_single_number_cannot_be_cut() {
    let batch = (counted(&[8]), Shared(counted(&[])), counted(&[]));
    let expected = "leaf 2 of the batch (counted from 0) is a single number, which cannot be cut: \
                    wrap it in `Shared`, or give it a value for each sample";
    assert_eq!(message(batch::len(&batch)), expected);
    assert_eq!(message(batch::slice(&batch, 0..1)), expected);
}

#[test]
fn a_leaf_that_is_not_defined_is_refused() {
    let batch = (counted(&[4, 2]), Shared(Tensor::new()));
    let expected = "leaf 1 of the batch (counted from 0) is an undefined tensor: leave it out, or make \
                    it an `Option` that is `None`";
    assert_eq!(message(batch::len(&batch)), expected);
    let store = VarStore::new(Device::Cpu);
    let mut micro = MicroBatcher::new(&store, MicroBatches::Auto);
    let step = micro.backward(&batch, |_| Loss::sum(Tensor::new()));
    assert_eq!(message(step), expected);
    let layers = Layers::new().add_fn("same", Tensor::shallow_clone);
    let mut pipe = Pipeline::builder(layers).build().expect("a pipeline");
    let step = pipe.backward(&batch.0, &batch.1, |_: Tensor, _| Loss::sum(Tensor::new()));
    assert_eq!(message(step), expected.replace("leaf 1", "leaf 0"));
}

#[test]
fn a_batch_of_nothing_is_refused() {
    assert_eq!(batch::len(&counted(&[0, 4])), Err(Error::Batch(BatchError::Empty)));
    assert_eq!(batch::len(&()), Err(Error::Batch(BatchError::NothingToCut)));
    assert_eq!(batch::len(&Vec::<Tensor>::new()), Err(Error::Batch(BatchError::NothingToCut)));
    assert_eq!(
        message(batch::len(&(Shared(counted(&[4])), 3.0))),
        "the batch has nothing to cut: give it a tensor that is not `Shared`"
    );
}

#[test]
fn samples_that_are_not_there_are_refused() {
    let batch = (counted(&[8]), counted(&[6]));
    assert_eq!(
        message(batch::slice(&batch, 5..8)),
        "samples 5..8 cannot be cut out of leaf 1 of the batch (counted from 0), which is 6 long: \
         `batch::len` returns the number of samples"
    );
    let backwards = Range { start: 3, end: 2 };
    assert!(matches!(
        batch::slice(&batch, backwards).err(),
        Some(Error::Batch(BatchError::SliceOutside { start: 3, end: 2, leaf: 0, length: 8 }))
    ));
    assert!(batch::slice(&batch, 0..usize::MAX).is_err());
}

/// Tries to join two parts that differ; the error must name both.
#[track_caller]
fn refuse_to_join<B: Batch>(parts: [B; 2], first: &str, other: &str) {
    let (first, other) = (first.into(), other.into());
    let differ = Error::Batch(BatchError::PartsDiffer { part: 1, first, other });
    assert_eq!(batch::join(parts.into()).err(), Some(differ));
}

#[test]
fn parts_that_are_not_cuts_of_one_batch_are_refused() {
    assert_eq!(batch::join(Vec::<Tensor>::new()), Err(Error::Batch(BatchError::NothingToJoin)));
    let x = || counted(&[2, 3]);
    refuse_to_join([vec![x(), x()], vec![x()]], "a Vec of 2", "a Vec of 1");
    // As many leaves in both, but in different places.
    refuse_to_join([(Some(x()), None), (None, Some(x()))], "Some", "None");
    let map = |key: &str| BTreeMap::from([(key.to_owned(), x())]);
    refuse_to_join([map("a"), map("b")], "the key a", "the key b");
    let of = |kind: &str, shape: &str| format!("a {kind} tensor of shape {shape}");
    let first = of("Float", "[_, 3]");
    refuse_to_join([x(), counted(&[2, 4])], &first, &of("Float", "[_, 4]"));
    refuse_to_join([x(), x().to_kind(Kind::Double)], &first, &of("Double", "[_, 3]"));
    refuse_to_join([counted(&[2]), counted(&[])], &of("Float", "[_]"), &of("Float", "[]"));
}

#[test]
fn a_number_that_differs_from_part_to_part_is_not_lost() {
    let parts = vec![(counted(&[2]), 0.5), (counted(&[2]), 0.5), (counted(&[2]), 0.75)];
    assert_eq!(
        message(batch::join(parts)),
        "part 2 (counted from 0) cannot be joined to part 0: part 2 has 0.75 where part 0 has 0.5; \
         only tensors may differ between parts: if a plain number differs, make it a tensor"
    );
}

type AnyBatch = (Vec<Tensor>, Option<[Tensor; 2]>, Shared<Tensor>, Vec<Sentences>);

/// Batches of any number of samples, with leaves of any shape and number.
fn any_batch() -> impl Strategy<Value = AnyBatch> {
    let shapes = prop::collection::vec(prop::collection::vec(0..4_i64, 0..3), 1..4);
    (1..40_i64, shapes, any::<bool>(), 0..3_usize).prop_map(|(samples, shapes, some, structs)| {
        let leaf = |shape: &Vec<i64>| counted(&[&[samples], shape.as_slice()].concat());
        let tensors = shapes.iter().map(leaf).collect();
        let pair = some.then(|| [leaf(&vec![2]), leaf(&vec![])]);
        let structs = (0..structs).map(|_| sentences(samples)).collect();
        (tensors, pair, Shared(counted(&shapes[0])), structs)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_batch_survives_cutting_and_joining(batch in any_batch(), count in 1..50_usize) {
        let samples = batch::len(&batch).expect("a length");
        cut_and_join(&batch, &split::by_count(samples, count).expect("a split"));
    }
}

/// Tiny language model on sequences of different lengths: a loss over tokens, and an output for each.
mod sequences {
    use brimful::batch::Sequences;
    use brimful::layers::Model;
    use brimful::memory::{Arena, Memory};
    use brimful::{Layers, Loss, MicroBatcher, MicroBatches, Replicas};
    use proptest::prelude::*;
    use tch::nn::{self, ModuleT};
    use tch::{Device, Kind, Tensor};

    use crate::support::pipeline_cases::builder;
    use crate::support::{
        Named, assert_close, assert_fails, copies, fill, gradients, micro_batcher, test_device,
        variables,
    };

    const WORDS: i64 = 11;
    const STEP: usize = 4;

    fn rows(lengths: &[usize]) -> Vec<Tensor> {
        let row = |(i, &length): (usize, &usize)| {
            let places = Tensor::arange(length as i64, (Kind::Int64, Device::Cpu));
            (places * 3 + i as i64).remainder(WORDS)
        };
        lengths.iter().enumerate().map(row).collect()
    }

    fn batch(lengths: &[usize]) -> (Sequences, Sequences) {
        let inputs = rows(lengths);
        let targets: Vec<Tensor> =
            inputs.iter().map(|row| (row * 5 + 1).remainder(WORDS)).collect();
        (
            Sequences::in_steps_of(STEP, &inputs, 0.0).expect("sequences"),
            Sequences::in_steps_of(STEP, &targets, -100.0).expect("sequences"),
        )
    }

    fn layers() -> Layers {
        let words = |p: &nn::Path<'_>| nn::embedding(p, WORDS, 6, Default::default());
        Layers::new()
            .add("words", words)
            .add("mix", |p| nn::linear(p, 6, 6, Default::default()))
            .add("past", |_| nn::func(|x| x.tanh().cumsum(1, Kind::Double)))
            .add("head", |p| nn::linear(p, 6, WORDS, Default::default()))
    }

    /// Returns the mean over all targets that are not padding, and the best word at each position.
    fn loss(logits: &Tensor, targets: &Tensor) -> (Loss, Tensor) {
        let flat = logits.reshape([-1, WORDS]).log_softmax(-1, Kind::Double);
        let targets = targets.reshape([-1]);
        let real = targets.ge(0);
        let chosen = flat.gather(1, &targets.clamp_min(0).unsqueeze(1), false).squeeze_dim(1);
        let sum = -(chosen * &real).sum(Kind::Double);
        (Loss::ratio(sum, real.sum(Kind::Double)), logits.argmax(-1, false))
    }

    fn model(root: &nn::Path<'_>) -> Model {
        layers().build(root).expect("a model")
    }

    fn store() -> (nn::VarStore, Model) {
        let mut store = nn::VarStore::new(test_device());
        let model = model(&store.root());
        store.double();
        fill(&store);
        (store, model)
    }

    /// Returns gradients, loss and outputs of the padded batch, in plain tch.
    fn plain(lengths: &[usize]) -> (Named, f64, Tensor) {
        let (store, model) = store();
        let (x, y) = batch(lengths);
        let x = x.to_device(test_device());
        let y = y.to_device(test_device());
        let logits = model.forward_t(&x, true);
        let count = y.ge(0).sum(Kind::Double);
        let flat = logits.reshape([-1, WORDS]);
        let sum = flat.log_softmax(-1, Kind::Double);
        let sum = sum.g_nll_loss::<Tensor>(&y.reshape([-1]), None, tch::Reduction::Sum, -100);
        let mean = sum / count;
        mean.backward();
        (copies(&gradients(&store)), mean.double_value(&[]), logits.argmax(-1, false))
    }

    /// Compares outputs up to each sequence's end; a model may output anything beyond it.
    fn assert_same_words(found: &Tensor, expected: &Tensor, lengths: &[usize]) {
        assert_eq!(found.size(), expected.size());
        for (i, &length) in lengths.iter().enumerate() {
            let words = |of: &Tensor| of.get(i as i64).narrow(0, 0, length as i64).to(Device::Cpu);
            assert_eq!(words(found), words(expected), "sequence {i}");
        }
    }

    const LENGTHS: [usize; 9] = [3, 17, 8, 1, 12, 30, 5, 9, 16];

    #[test]
    fn the_gradient_does_not_depend_on_the_cut_and_outputs_are_in_order() {
        let (expected, mean, words) = plain(&LENGTHS);
        for size in [
            MicroBatches::Tokens(32),
            MicroBatches::Tokens(48),
            MicroBatches::Tokens(1000),
            MicroBatches::Samples(2),
            MicroBatches::Count(4),
            MicroBatches::Auto,
            MicroBatches::Largest,
        ] {
            let (store, model) = store();
            let mut micro = micro_batcher(&store, size);
            let batch = batch(&LENGTHS);
            let step = micro
                .backward(&batch, |(x, y)| loss(&model.forward_t(&x, true), &y))
                .unwrap_or_else(|error| panic!("{size:?}: {error}"));
            assert_eq!(step.samples, LENGTHS.len());
            assert!((step.loss - mean).abs() < 1e-12, "{size:?}");
            assert_close(&gradients(&store), &expected, &format!("{size:?}"));
            assert_same_words(&step.outputs, &words, &LENGTHS);
            let evaluated = micro
                .evaluate(&batch, |(x, y)| loss(&model.forward_t(&x, true), &y))
                .expect("evaluated");
            assert!((evaluated.loss - mean).abs() < 1e-12, "{size:?}");
            let mapped = micro.map(&batch, |(x, _)| model.forward_t(&x, true).argmax(-1, false));
            assert_same_words(&mapped.expect("outputs"), &words, &LENGTHS);
        }
    }

    #[test]
    fn micro_batches_have_like_lengths_and_are_as_wide_as_their_own_longest() {
        let (store, model) = store();
        let mut micro = micro_batcher(&store, MicroBatches::Tokens(32));
        let mut shapes = Vec::new();
        let step = micro.backward(&batch(&LENGTHS), |(x, y)| {
            shapes.push(x.size());
            loss(&model.forward_t(&x, true), &y)
        });
        assert_eq!(shapes, [[1, 32], [1, 20], [2, 16], [2, 12], [3, 8]]);
        assert_eq!(step.expect("a step").sizes, [1, 1, 2, 2, 3]);
    }

    #[test]
    fn replicas_share_tokens_and_give_the_same() {
        let (expected, mean, words) = plain(&LENGTHS);
        for size in [MicroBatches::Tokens(32), MicroBatches::Count(2), MicroBatches::Auto] {
            // An accelerator has one replica; a CPU may have several.
            let devices = [test_device(), Device::Cpu];
            let mut replicas = Replicas::new(devices, size, model).expect("replicas");
            replicas.store_mut().double();
            let (from, _) = store();
            replicas.store_mut().copy(&from).expect("the same variables");
            let step = replicas
                .backward(&batch(&LENGTHS), |model, (x, y)| loss(&model.forward_t(&x, true), &y))
                .unwrap_or_else(|error| panic!("{size:?}: {error}"));
            assert!((step.loss - mean).abs() < 1e-12);
            assert_eq!(step.shares, [2, 7]);
            assert_close(&gradients(replicas.store()), &expected, &format!("{size:?}"));
            assert_same_words(&step.outputs, &words, &LENGTHS);
        }
    }

    #[test]
    fn a_pipeline_gives_the_same_with_values_of_each_micro_batch_s_own_width() {
        let (expected, mean, words) = plain(&LENGTHS);
        let (from, _) = store();
        for size in [MicroBatches::Tokens(32), MicroBatches::Count(3), MicroBatches::Auto] {
            let pipe = builder(layers(), 2).balance([2, 2]).micro_batches(size).build();
            let mut pipe = pipe.expect("stages");
            let named = from.variables().into_iter().collect();
            pipe.set_variables(named).expect("the same names");
            let (x, y) = batch(&LENGTHS);
            let step = pipe
                .backward(&x, &y, |out: Tensor, y: &Sequences| loss(&out, y))
                .unwrap_or_else(|error| panic!("{size:?}: {error}"));
            assert!((step.loss - mean).abs() < 1e-12, "{size:?}");
            let found = pipe.gradients().expect("gradients");
            assert_close(&found, &expected, &format!("{size:?}"));
            assert_same_words(&step.outputs, &words, &LENGTHS);
            let out = pipe.backward_whole(&x, |out| out.square().mean(Kind::Double));
            assert_same_words(&out.expect("a step").outputs.argmax(-1, false), &words, &LENGTHS);
            let mapped = pipe.map(&x, |out: Tensor| out.argmax(-1, false)).expect("outputs");
            assert_same_words(&mapped, &words, &LENGTHS);
        }
    }

    #[test]
    fn a_loss_on_all_outputs_gets_them_in_order() {
        let whole = |out: &Tensor| {
            let rows = Tensor::arange(out.size()[0], (Kind::Double, out.device())) / 1000.0;
            (out.sum_dim_intlist(1, false, Kind::Double) * rows).sum(Kind::Double).square()
        };
        let ends =
            |x: &Tensor, logits: Tensor| logits.sum_dim_intlist(-1, false, Kind::Double) * x.ge(0);
        let one = |size| {
            let (store, model) = store();
            let mut micro = micro_batcher(&store, size);
            let inputs = Sequences::in_steps_of(STEP, &rows(&LENGTHS), -1.0).expect("sequences");
            micro
                .backward_whole(
                    &inputs,
                    |x| ends(&x, model.forward_t(&x.clamp_min(0), true)),
                    whole,
                )
                .expect("a step");
            let found = copies(&gradients(&store));
            assert_eq!(found.len(), variables(&store).len(), "all have a gradient");
            found
        };
        assert_close(&one(MicroBatches::Tokens(32)), &one(MicroBatches::Count(1)), "one");
    }

    #[test]
    fn what_no_size_can_do_is_said_with_numbers() {
        let (store, model) = store();
        let mut micro = micro_batcher(&store, MicroBatches::Tokens(20));
        let run = |x: Sequences, y: Sequences| loss(&model.forward_t(&x, true), &y);
        assert_fails(micro.backward(&batch(&LENGTHS), |(x, y)| run(x, y)), &["32 tokens"]);
        let alike = Tensor::zeros([4, 8], (Kind::Int64, Device::Cpu));
        assert_fails(micro.map(&alike, |x| x), &["batch::Sequences"]);
    }

    #[test]
    fn an_automatic_size_learns_bytes_a_token() {
        let lengths: Vec<usize> = (0..200).map(|i| 1 + (i * 37) % 61).collect();
        let memory = Memory::Arena(Arena::limited("small", 1 << 20).expect("an arena"));
        let mut store = nn::VarStore::new(Device::Cpu);
        let model = model(&store.root());
        store.double();
        let mut micro = MicroBatcher::new(&store, MicroBatches::Largest).memory(memory);
        let mut last = None;
        for _ in 0..3 {
            let step =
                micro.backward(&batch(&lengths), |(x, y)| loss(&model.forward_t(&x, true), &y).0);
            last = Some(step.expect("it fits"));
            store.variables().values_mut().for_each(|v| v.zero_grad());
        }
        let step = last.expect("three steps");
        assert_eq!(step.retries, 0, "{:?}", step.decisions);
        assert!(step.sizes.len() > 1 && step.sizes.first() < step.sizes.last(), "{:?}", step.sizes);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

        #[test]
        fn every_sequence_is_run_once_and_comes_back_to_its_place(
            lengths in prop::collection::vec(1..40_usize, 1..30), spare in 0..60_usize,
        ) {
            let store = nn::VarStore::new(Device::Cpu);
            let tokens = 40 + spare;
            let mut micro = MicroBatcher::new(&store, MicroBatches::Tokens(tokens));
            let inputs = Sequences::in_steps_of(STEP, &rows(&lengths), -1.0).expect("sequences");
            let mut most = 0;
            let (all, sums) = micro
                .map(&inputs, |x| {
                    most = most.max(x.numel());
                    let sums = x.clamp_min(0).sum_dim_intlist(1, false, Kind::Int64);
                    (x.shallow_clone() + 1, sums)
                })
                .expect("outputs");
            prop_assert!(most <= tokens);
            prop_assert_eq!(all.size(), inputs.size());
            for (i, row) in rows(&lengths).iter().enumerate() {
                let own = all.get(i as i64).narrow(0, 0, lengths[i] as i64);
                prop_assert_eq!(own, row + 1);
                prop_assert_eq!(sums.int64_value(&[i as i64]), row.sum(Kind::Int64).int64_value(&[]));
            }
        }
    }
}
