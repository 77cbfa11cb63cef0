//! Every batch is cut without a copy, joined again without a change, and refused where it is wrong.

use std::collections::BTreeMap;
use std::ops::Range;

use brimful::batch::BatchError;
use brimful::batch::{self, Leaf};
use brimful::memory::Arena;
use brimful::{Batch, Error, Shared, split};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

/// Different numbers everywhere, so that a mix-up shows.
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

/// Cuts into micro-batches of each size, checks that these are views, and joins them again.
fn round_trip<B: Batch>(batch: &B) {
    let samples = batch::len(batch).expect("a length");
    for size in 1..=samples + 1 {
        let ranges = split::by_size(samples, size).expect("a split");
        let parts = cut(batch, &ranges);
        for (part, range) in parts.iter().zip(&ranges) {
            check_views(batch, part, range);
        }
        check_equal(&batch::join(parts).expect("a batch"), batch);
    }
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
            continue; // Without elements there is no place to point to.
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

/// By hand, for what the derive cannot know.
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
    // One micro-batch is no exception.
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
        "the leaves of a batch must have one length, but are 8, 8 and 6 long: give each the same \
         samples, and wrap what all micro-batches share in `Shared`"
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
         `batch::len` says how many there are"
    );
    let backwards = Range { start: 3, end: 2 };
    assert!(matches!(
        batch::slice(&batch, backwards).err(),
        Some(Error::Batch(BatchError::SliceOutside { start: 3, end: 2, leaf: 0, length: 8 }))
    ));
    assert!(batch::slice(&batch, 0..usize::MAX).is_err());
}

#[test]
fn parts_that_are_not_cuts_of_one_batch_are_refused() {
    assert_eq!(batch::join(Vec::<Tensor>::new()), Err(Error::Batch(BatchError::NothingToJoin)));
    let x = || counted(&[2, 3]);
    let differing = |first: &str, other: &str| {
        Some(Error::Batch(BatchError::PartsDiffer {
            part: 1,
            first: first.into(),
            other: other.into(),
        }))
    };
    let error = batch::join(vec![vec![x(), x()], vec![x()]]).err();
    assert_eq!(error, differing("a Vec of 2", "a Vec of 1"));
    // As many leaves in both, but not in the same places.
    let error = batch::join(vec![(Some(x()), None), (None, Some(x()))]).err();
    assert_eq!(error, differing("Some", "None"));
    let map = |key: &str| BTreeMap::from([(key.to_owned(), x())]);
    assert_eq!(batch::join(vec![map("a"), map("b")]).err(), differing("the key a", "the key b"));
    let error = batch::join(vec![x(), counted(&[2, 4])]).err();
    assert_eq!(
        error,
        differing("a Float tensor of shape [_, 3]", "a Float tensor of shape [_, 4]")
    );
    let error = batch::join(vec![x(), x().to_kind(Kind::Double)]).err();
    assert_eq!(
        error,
        differing("a Float tensor of shape [_, 3]", "a Double tensor of shape [_, 3]")
    );
    let error = batch::join(vec![counted(&[2]), counted(&[])]).err();
    assert_eq!(error, differing("a Float tensor of shape [_]", "a Float tensor of shape []"));
}

#[test]
fn a_number_that_differs_from_part_to_part_is_not_lost() {
    let parts = vec![(counted(&[2]), 0.5), (counted(&[2]), 0.5), (counted(&[2]), 0.75)];
    assert_eq!(
        message(batch::join(parts)),
        "part 2 (counted from 0) cannot be joined to part 0: it has 0.75 where that has 0.5; parts \
         may differ in their samples alone, so make a number that differs a tensor"
    );
}

type AnyBatch = (Vec<Tensor>, Option<[Tensor; 2]>, Shared<Tensor>, Vec<Sentences>);

/// Batches of any number of samples, of leaves of any shape and number.
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
        let ranges = split::by_count(samples, count).expect("a split");
        let parts = cut(&batch, &ranges);
        for (part, range) in parts.iter().zip(&ranges) {
            check_views(&batch, part, range);
        }
        check_equal(&batch::join(parts).expect("a batch"), &batch);
    }
}
