//! Further features of a plain BatchNorm that an exact one shares: averages of all batches, input gradients, half
//! precision.

use brimful::nn::BatchNormConfig;
use brimful::{Layers, MicroBatcher, MicroBatches};
use tch::nn::{self, ModuleT, Path};
use tch::{Kind, Tensor};

use super::exact::{
    DEFERRED, EXACT, assert_exact, assert_gradients, both, full_batch_backward, gradients_of,
    input, layers, layers_of_inputs, loss,
};
use crate::support::pipeline_cases::{Plain, builder};
use crate::support::{Named, assert_within, clear, test_device};

#[test]
fn without_a_momentum_running_statistics_are_the_averages_of_all_batches() {
    let config = BatchNormConfig { momentum: None, ..EXACT };
    let pipe = builder(layers(2, config), 1).micro_batches(MicroBatches::Samples(2)).build();
    let (mut pipe, plain) = both(2, config, pipe.expect("a pipeline"));
    let first = plain.values().into_iter().find(|(name, _)| name == "first.weight");
    let (_, weight) = first.expect("the first layer");
    let (mut means, mut variances) = (Vec::new(), Vec::new());
    for number in 0..3 {
        let x = input(7, 2) * f64::from(number + 1);
        assert_exact(&mut pipe, &plain, &x, 1e-10, &format!("batch {number}"));
        pipe.zero_grad().expect("no gradients");
        clear(&plain.store);
        let values = x.transpose(1, -1).matmul(&weight).flatten(0, 2).detach();
        means.push(values.mean_dim(0, false, Kind::Double));
        variances.push(values.var_dim(0_i64, true, false));
    }
    let average = |all: &[Tensor]| Tensor::stack(all, 0).mean_dim(0, false, Kind::Double);
    let expected = vec![
        ("norm1.num_batches_tracked".to_owned(), Tensor::from(3.0).to_device(test_device())),
        ("norm1.running_mean".to_owned(), average(&means)),
        ("norm1.running_var".to_owned(), average(&variances)),
    ];
    let named = |(name, _): &(String, Tensor)| expected.iter().any(|(other, _)| other == name);
    let found: Named = pipe.variables().expect("variables").into_iter().filter(named).collect();
    assert_within(&found, &expected, 1e-10, "averages");
}

/// The mini-batch's samples as variables, indexed by their numbers: their gradients are the model's input
/// gradients.
fn layers_of_samples(config: BatchNormConfig) -> Layers {
    let samples = |p: &Path| {
        let samples = p.randn("samples", &[11, 3, 3, 3], 0.5, 2.0);
        nn::func(move |numbers| samples.index_select(0, numbers))
    };
    Layers::new().add("input", samples).add_layers("model", layers(2, config))
}

#[test]
fn gradients_of_what_enters_are_the_full_batchs() {
    let numbers = Tensor::arange(11, (Kind::Int64, test_device()));
    let weights = input(11, 2);
    for size in [1, 2, 7, 11] {
        let pipe =
            builder(layers_of_samples(EXACT), 1).micro_batches(MicroBatches::Samples(size)).build();
        let mut pipe = pipe.expect("a pipeline");
        let plain = Plain::of(&layers_of_samples(DEFERRED), &pipe);
        let mut whole = MicroBatcher::new(&plain.store, MicroBatches::Samples(11));
        let batch = (numbers.shallow_clone(), weights.shallow_clone());
        let expected = whole.backward(&batch, |(x, weights): (Tensor, Tensor)| {
            loss(&plain.model.forward_t(&x, true), &weights)
        });
        expected.expect("the whole mini-batch");
        let step = pipe.backward(&numbers, &weights, |out: Tensor, weights| loss(&out, weights));
        step.expect("a step");
        let gradients = pipe.gradients().expect("gradients");
        assert!(gradients.iter().any(|(name, _)| name == "input.samples"), "of what enters");
        assert_gradients(&pipe, &plain, 1e-10, &format!("micro-batches of {size}"));
    }
}

/// Returns the distance between all gradients, relative to their norm.
fn distance(ours: &Named, theirs: &Named) -> f64 {
    let all = |named: &Named| {
        let flat = named.iter().map(|(_, value)| value.to_kind(Kind::Double).flatten(0, -1));
        Tensor::cat(&flat.collect::<Vec<_>>(), 0)
    };
    let (ours, theirs) = (all(ours), all(theirs));
    ((ours - &theirs).norm() / theirs.norm()).double_value(&[])
}

#[test]
fn bf16_loses_no_more_than_in_the_plain_layer() {
    tch::manual_seed(5);
    // Near 10,000 neighbouring bf16 numbers are 64 apart: a deviation of 1 makes channels constant.
    for (mean, spread) in [(0.0, 1.0), (1e4, 64.0), (1e4, 1.0)] {
        let pipe = builder(layers_of_inputs(EXACT), 1).kind(Kind::BFloat16);
        let mut pipe = pipe.micro_batches(MicroBatches::Samples(4)).build().expect("a pipeline");
        let reference = Plain::of(&layers_of_inputs(DEFERRED), &pipe);
        let values = pipe.variables().expect("variables");
        let narrow = (Kind::BFloat16, test_device());
        let plain = Plain::on(narrow, &layers_of_inputs(DEFERRED), values);
        let x = (input(32, 2) * spread + mean).to_kind(Kind::BFloat16);
        full_batch_backward(&reference, &x.to_kind(Kind::Double));
        full_batch_backward(&plain, &x);
        pipe.backward(&x, &x, |out: Tensor, x| loss(&out, x)).expect("a step");
        let theirs = distance(&gradients_of(&plain), &gradients_of(&reference));
        let ours = distance(&pipe.gradients().expect("gradients"), &gradients_of(&reference));
        let least = 1e-6;
        assert!(
            ours <= 1.1 * theirs.max(least),
            "around {mean} ± {spread}: off by {ours}, the plain layer by {theirs}"
        );
    }
}
