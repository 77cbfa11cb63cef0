//! Norms with a residual and activations with a bias equal libtorch's separate operations: values, gradients,
//! errors.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0` runs the custom kernels on a GPU; `BRIMFUL_KERNELS=off` switches them off.

use crate::support::{
    Named, assert_all_within, assert_fails, assert_same, gradients, near, numbers, test_device,
    with_each_launch_failing,
};
use brimful::nn::{Rotary, bias_gelu, bias_gelu_tanh, bias_swiglu, layer_norm, rms_norm};
use brimful::{Loss, MicroBatcher, MicroBatches};
use brimful_torch::autograd::backward;
use brimful_torch::gradients::{collect, offering};
use brimful_torch::norm::{RowNorm, add_norm, norm, norm_beside};
use brimful_torch::projection::{Outputs, embedding, projection, projections};
use brimful_torch::rotary::rotary;
use tch::nn::{Module, VarStore};
use tch::{Device, Kind, Tensor};

/// Rows × columns: single, odd, whole words, and wider than a warp or a block holds in words of one number.
const SHAPES: [[i64; 2]; 12] = [
    [1, 1],
    [1, 8],
    [7, 5],
    [3, 33],
    [130, 64],
    [65, 768],
    [9, 770],
    [33, 1024],
    [5, 2050],
    [17, 4096],
    [2, 12_288],
    [3000, 96],
];

const KINDS: [(Kind, f64); 4] =
    [(Kind::Double, 1e-9), (Kind::Float, 2e-5), (Kind::BFloat16, 3e-2), (Kind::Half, 5e-3)];

/// Inputs, in f64 and in host memory, and the compared functions.
struct Case<'a> {
    name: String,
    inputs: Vec<(&'static str, Tensor)>,
    ours: &'a dyn Fn(&[Tensor]) -> Vec<Tensor>,
    theirs: &'a dyn Fn(&[Tensor]) -> Vec<Tensor>,
}

impl Case<'_> {
    /// Returns outputs, and gradients of inputs, for pseudo-random output gradients.
    fn run(&self, kind: Kind, device: Device, f: &dyn Fn(&[Tensor]) -> Vec<Tensor>) -> Named {
        let leaf =
            |(_, t): &(_, Tensor)| t.to_device(device).to_kind(kind).copy().set_requires_grad(true);
        let leaves: Vec<_> = self.inputs.iter().map(leaf).collect();
        let outputs = f(&leaves);
        let roots: Vec<_> =
            (0..).zip(&outputs).map(|(i, out)| numbers(&out.size(), 50 + i)).collect();
        let roots: Vec<_> = roots.iter().map(|root| root.to_device(device).to_kind(kind)).collect();
        let from: Vec<_> = outputs.iter().collect();
        let with: Vec<_> = roots.iter().map(Some).collect();
        backward(&from, &with, false).expect("gradients");
        let host = |t: Tensor| t.detach().to_device(Device::Cpu).to_kind(Kind::Double);
        let mut all: Vec<_> = (0..)
            .zip(outputs)
            .map(|(i, out): (i32, _)| (format!("output {i}"), host(out)))
            .collect();
        for ((name, _), leaf) in self.inputs.iter().zip(&leaves) {
            all.push((format!("gradient of {name}"), host(leaf.grad())));
        }
        all
    }

    fn check(&self) {
        for (kind, part) in KINDS {
            let round =
                |(n, t): &(&'static str, Tensor)| (*n, t.to_kind(kind).to_kind(Kind::Double));
            let inputs = self.inputs.iter().map(round).collect();
            let rounded = Case { name: format!("{}, {kind:?}", self.name), inputs, ..*self };
            let found = rounded.run(kind, test_device(), self.ours);
            // On a CPU, half precision is libtorch's: its LayerNorm sums gradients in half precision.
            let is_half = matches!(kind, Kind::Half | Kind::BFloat16);
            let as_theirs = is_half && test_device() == Device::Cpu;
            let exact = if as_theirs { kind } else { Kind::Double };
            let expected = rounded.run(exact, Device::Cpu, self.theirs);
            near(&rounded.name, &found, &expected, part);
            let again = rounded.run(kind, test_device(), self.ours);
            assert_same(&format!("{}, a second run", rounded.name), &found, &again);
            // libtorch's operations round in between.
            with_each_launch_failing(|which| {
                let found = rounded.run(kind, test_device(), self.ours);
                near(&format!("{}, {which}", rounded.name), &found, &expected, part * 2.0);
            });
        }
    }
}

/// Makes a layer with these parameters.
fn layer<M>(build: impl Fn(&tch::nn::Path) -> M, parameters: &[Tensor]) -> (VarStore, M) {
    let mut store = VarStore::new(parameters[0].device());
    let layer = build(&store.root());
    store.set_kind(parameters[0].kind());
    for (name, mut variable) in store.variables() {
        let from = &parameters[usize::from(name == "bias")];
        tch::no_grad(|| variable.copy_(from));
    }
    (store, layer)
}

#[test]
fn a_layer_norm_with_a_residual_is_an_addition_and_a_norm() {
    for [rows, columns] in SHAPES {
        let inputs = vec![
            ("x", numbers(&[rows, columns], 1) * 3.0),
            ("residual", numbers(&[rows, columns], 2)),
            ("weight", numbers(&[columns], 3) + 1.5),
            ("bias", numbers(&[columns], 4)),
        ];
        let case = Case {
            name: format!("LayerNorm of {rows} × {columns}"),
            inputs,
            ours: &|t| {
                let (weight, bias) = (Some(&t[2]), Some(&t[3]));
                let how = RowNorm { weight, bias, eps: 1e-5, root_mean_square: false };
                let (sum, normed) = add_norm(&t[0], &t[1], how).expect("a norm");
                vec![sum, normed]
            },
            theirs: &|t| {
                let sum = &t[0] + &t[1];
                let normed = sum.layer_norm([columns], Some(&t[2]), Some(&t[3]), 1e-5, false);
                vec![sum, normed]
            },
        };
        case.check();
    }
}

fn by_root(weight: &Tensor) -> RowNorm<'_> {
    RowNorm { weight: Some(weight), bias: None, eps: 1e-6, root_mean_square: true }
}

#[test]
fn an_rms_norm_is_its_formula_with_and_without_a_residual() {
    for [rows, columns] in SHAPES {
        let formula = |x: &Tensor, weight: &Tensor| {
            let square = x.square().mean_dim([-1_i64].as_slice(), true, x.kind());
            x * (square + 1e-6).rsqrt() * weight
        };
        let inputs = vec![
            ("x", numbers(&[rows, columns], 1) * 3.0),
            ("residual", numbers(&[rows, columns], 2)),
            ("weight", numbers(&[columns], 3) + 1.5),
        ];
        Case {
            name: format!("RMSNorm of {rows} × {columns}"),
            inputs,
            ours: &|t| {
                let (sum, normed) = add_norm(&t[0], &t[1], by_root(&t[2])).expect("a norm");
                let alone = norm(&t[1], by_root(&t[2])).expect("a norm");
                vec![sum, normed, alone]
            },
            theirs: &|t| {
                let sum = &t[0] + &t[1];
                let normed = formula(&sum, &t[2]);
                vec![sum, normed, formula(&t[1], &t[2])]
            },
        }
        .check();
    }
}

#[test]
fn a_norm_gives_its_input_beside_and_adds_their_gradients() {
    // A row of one number is its own mean: the rest is rounding.
    for [rows, columns] in SHAPES.into_iter().filter(|shape| shape[1] > 1) {
        let inputs = vec![
            ("x", numbers(&[rows, columns], 1) * 3.0),
            ("weight", numbers(&[columns], 3) + 1.5),
            ("bias", numbers(&[columns], 4)),
        ];
        let how = |t: &[Tensor]| -> Vec<Tensor> {
            let (weight, bias) = (Some(&t[1]), Some(&t[2]));
            let how = RowNorm { weight, bias, eps: 1e-5, root_mean_square: false };
            let (x, normed) = norm_beside(&t[0], how).expect("both");
            vec![x * 2.0, normed]
        };
        let case = Case {
            name: format!("LayerNorm beside {rows} × {columns}"),
            inputs,
            ours: &how,
            theirs: &|t| {
                let normed = t[0].layer_norm([columns], Some(&t[1]), Some(&t[2]), 1e-5, false);
                vec![&t[0] * 2.0, normed]
            },
        };
        case.check();
    }
}

/// The second output of a norm is its input: changing either in place changes both.
#[test]
fn what_a_norm_gives_beside_may_be_changed_in_place() {
    for (change_input, strided) in
        [false, true].into_iter().flat_map(|input| [false, true].map(|strided| (input, strided)))
    {
        let change = |t: &[Tensor]| -> Vec<Tensor> {
            let mut x = &t[0] * 1.0;
            if strided {
                x = x.tr();
            }
            let weight = Tensor::ones([x.size()[1]], (x.kind(), x.device()));
            let (mut beside, _) = norm_beside(&x, by_root(&weight)).expect("both");
            let _ = if change_input { &mut x } else { &mut beside }.g_mul_scalar_(2.0);
            vec![beside + x]
        };
        let case = Case {
            name: format!("a change of the input: {change_input}, strided: {strided}"),
            inputs: vec![("x", numbers(&[24, 24], 1))],
            ours: &change,
            theirs: &|t| vec![if strided { t[0].tr() } else { t[0].shallow_clone() } * 4.0],
        };
        case.check();
    }
}

#[test]
fn a_projection_is_a_product_in_either_order_with_or_without_a_bias() {
    for ([rows, inputs], outputs) in SHAPES.into_iter().zip([1, 3, 8, 64, 5, 96, 130].repeat(2)) {
        for inputs_first in [false, true] {
            let shape = if inputs_first { [inputs, outputs] } else { [outputs, inputs] };
            let given = vec![
                ("x", numbers(&[rows, inputs], 1)),
                ("weight", numbers(&shape, 2) / (inputs as f64).sqrt()),
                ("bias", numbers(&[outputs], 3)),
            ];
            let by = |weight: &Tensor| if inputs_first { weight.tr() } else { weight.copy() };
            let case = Case {
                name: format!("{rows} × {inputs} to {outputs}, inputs first: {inputs_first}"),
                inputs: given,
                ours: &|t| {
                    let out =
                        |bias| projection(&t[0], &t[1], bias, inputs_first).expect("a product");
                    vec![out(Some(&t[2])), out(None)]
                },
                theirs: &|t| {
                    let out = |bias| t[0].linear(&by(&t[1]), bias);
                    vec![out(Some(&t[2])), out(None::<&Tensor>)]
                },
            };
            case.check();
        }
    }
}

#[test]
fn several_projections_of_the_same_rows_are_each_by_itself() {
    for ([rows, inputs], outputs) in SHAPES.into_iter().zip([1, 3, 8, 64, 5, 96, 130].repeat(2)) {
        for (inputs_first, how) in [false, true]
            .into_iter()
            .flat_map(|first| [Outputs::Apart, Outputs::Joined].map(|how| (first, how)))
        {
            let weight = |outputs, seed| {
                let shape = if inputs_first { [inputs, outputs] } else { [outputs, inputs] };
                numbers(&shape, seed) / (inputs as f64).sqrt()
            };
            let by = |weight: &Tensor| if inputs_first { weight.tr() } else { weight.copy() };
            let case = Case {
                name: format!("{rows} × {inputs} to {outputs} and 7, {inputs_first}, {how:?}"),
                inputs: vec![
                    ("x", numbers(&[rows, inputs], 1)),
                    ("first weight", weight(outputs, 2)),
                    ("second weight", weight(7, 3)),
                    ("bias", numbers(&[7], 4)),
                ],
                ours: &|t| {
                    let layers = [(&t[1], None), (&t[2], Some(&t[3]))];
                    projections(&t[0], &layers, inputs_first, how).expect("products")
                },
                theirs: &|t| {
                    let first = t[0].linear(&by(&t[1]), None::<&Tensor>);
                    let all = [first, t[0].linear(&by(&t[2]), Some(&t[3]))];
                    match how {
                        Outputs::Apart => all.into(),
                        Outputs::Joined => vec![Tensor::cat(&all, 1)],
                    }
                },
            };
            case.check();
        }
    }
}

#[test]
fn an_embedding_s_gradient_counts_each_use() {
    let places = Tensor::from_slice(&[3i64, 0, 3, 3, 6, 0]).view([2, 3]);
    let there = |t: &Tensor| places.to_device(t.device());
    let case = Case {
        name: "rows of 7 × 40".into(),
        inputs: vec![("table", numbers(&[7, 40], 1))],
        ours: &|t| vec![embedding(&t[0], &there(&t[0])).expect("rows")],
        theirs: &|t| vec![Tensor::embedding(&t[0], &there(&t[0]), -1, false, false)],
    };
    case.check();
}

/// Gradients go directly into a step's sums, for weights that are used twice and in several micro-batches.
#[test]
fn a_step_s_sums_are_those_of_the_full_batch() {
    let step = |kind: Kind, device: Device, size: usize| -> Named {
        let store = VarStore::new(device);
        let root = store.root();
        let leaf = |name: &str, shape: &[i64], seed| {
            let mut leaf = root.var(name, shape, tch::nn::Init::Const(0.0));
            // Numbers that half precision represents exactly.
            let from = numbers(shape, seed).to_kind(Kind::BFloat16);
            tch::no_grad(|| leaf.copy_(&from));
            leaf
        };
        let (table, weight, bias) =
            (leaf("table", &[11, 16], 1), leaf("weight", &[16, 16], 2), leaf("bias", &[16], 3));
        let mut store = store;
        store.set_kind(kind);
        let tokens = Tensor::arange(24, (Kind::Int64, Device::Cpu)).remainder(11).view([8, 3]);
        let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(size));
        let ran = micro.backward(&tokens, |tokens| {
            let x = embedding(&table, &tokens).expect("rows").view([-1, 16]);
            let x = projection(&x, &weight, Some(&bias), true).expect("a product").tanh();
            let both = [(&weight, None), (&weight, Some(&bias))];
            let x = projections(&x, &both, false, Outputs::Joined).expect("products").remove(0);
            Loss::mean(x.square().mean(Kind::Float))
        });
        ran.expect("a step");
        let host = |t: Tensor| t.to_device(Device::Cpu).to_kind(Kind::Double);
        let found = gradients(&store);
        assert_eq!(found.len(), 3, "table, weight and bias have one");
        found.into_iter().map(|(name, gradient)| (name, host(gradient))).collect()
    };
    for (kind, part) in KINDS {
        for size in [8, 3, 1] {
            let found = step(kind, test_device(), size);
            let expected = step(Kind::Double, Device::Cpu, 8);
            near(&format!("a step in {kind:?} by {size}"), &found, &expected, part * 2.0);
            assert_same("a second run", &found, &step(kind, test_device(), size));
            with_each_launch_failing(|which| {
                let found = step(kind, test_device(), size);
                let what = format!("a step in {kind:?} by {size}, {which}");
                near(&what, &found, &expected, part * 4.0);
            });
        }
    }
}

/// Returns the gradients of a norm's weight and bias, with sums for both or for the weight only.
fn norm_s_sums(kind: Kind, device: Device, both: bool) -> Named {
    let there = |t: Tensor| t.to_kind(Kind::BFloat16).to_device(device).to_kind(kind);
    let [weight, bias] = [3, 4].map(|seed| there(numbers(&[64], seed)).set_requires_grad(true));
    let parameters = [&weight, &bias].map(Tensor::shallow_clone);
    let offered = if both { &parameters[..] } else { &parameters[..1] };
    let mut sums = [None, None];
    for round in 0..2 {
        let x = there(numbers(&[130, 64], round));
        let (weight, bias) = (Some(&weight), Some(&bias));
        let how = RowNorm { weight, bias, eps: 1e-5, root_mean_square: false };
        let out = norm(&x, how).expect("a norm").square().sum(kind);
        // Fills memory with NaN, so that a read of uninitialised memory shows.
        let not_numbers = || Tensor::full([64], f64::NAN, (Kind::Float, device));
        drop((0..512).map(|_| not_numbers()).collect::<Vec<_>>());
        let run = || backward(&[&out], &[None], false);
        offering(offered, &mut sums[..offered.len()], run).expect("a backward");
        collect(&parameters, &mut sums).expect("sums");
    }
    let host = |t: Option<Tensor>| t.expect("a sum").to_device(Device::Cpu).to_kind(Kind::Double);
    ["weight", "bias"].map(str::to_owned).into_iter().zip(sums.map(host)).collect()
}

#[test]
fn sums_of_columns_count_once_whichever_launch_fails() {
    let expected = norm_s_sums(Kind::Double, Device::Cpu, true);
    let mut runs = 0;
    for both in [true, false] {
        let mut check = |which: &str| {
            runs += 1;
            let found = norm_s_sums(Kind::Float, test_device(), both);
            near(&format!("sums for both: {both}, {which}"), &found, &expected, 1e-4);
        };
        check("none fails");
        with_each_launch_failing(check);
    }
    assert!(runs > 4 || !test_device().is_cuda(), "no launch has failed");
}

#[test]
fn activations_with_a_bias_are_an_addition_and_an_activation() {
    for [rows, columns] in SHAPES {
        let inputs = || {
            vec![
                ("x", numbers(&[rows, 2 * columns], 1) * 4.0),
                ("bias", numbers(&[2 * columns], 2)),
            ]
        };
        let exact: fn(&Tensor, Option<&Tensor>) -> brimful::Result<Tensor> = bias_gelu;
        for (gelu, name) in [(exact, "none"), (bias_gelu_tanh, "tanh")] {
            Case {
                name: format!("GELU ({name}) of {rows} × {}", 2 * columns),
                inputs: inputs(),
                ours: &|t| vec![gelu(&t[0], Some(&t[1])).expect("a GELU")],
                theirs: &|t| vec![(&t[0] + &t[1]).gelu(name)],
            }
            .check();
        }
        Case {
            name: format!("SwiGLU of {rows} × {}", 2 * columns),
            inputs: inputs(),
            ours: &|t| vec![bias_swiglu(&t[0], Some(&t[1])).expect("a SwiGLU")],
            theirs: &|t| {
                let halves = (&t[0] + &t[1]).chunk(2, -1);
                vec![halves[0].silu() * &halves[1]]
            },
        }
        .check();
    }
}

#[test]
fn huge_means_do_not_cancel() {
    let device = test_device();
    let x = numbers(&[40, 96], 1) + 1e4;
    let parameters = [numbers(&[96], 3) + 1.5, numbers(&[96], 4)]
        .map(|t| t.to_device(device).to_kind(Kind::Float));
    let (_store, layer) = layer(|path| layer_norm(path, 96), &parameters);
    let x = x.to_kind(Kind::Float);
    let found = layer.forward(&x.to_device(device)).to_device(Device::Cpu).to_kind(Kind::Double);
    let [weight, bias] = parameters.map(|t| t.to_device(Device::Cpu).to_kind(Kind::Double));
    let x = x.to_kind(Kind::Double);
    let expected = x.layer_norm([96], Some(&weight), Some(&bias), 1e-5, false);
    assert_all_within(&found, &expected, 5e-3, "1e4 ± 1");
}

#[test]
fn the_layers_have_the_names_and_numbers_of_their_parameters() {
    let store = VarStore::new(test_device());
    let norm = layer_norm(store.root() / "layer", 6);
    let rms = rms_norm(store.root() / "rms", 6);
    let mut names: Vec<_> = store.variables().into_keys().collect();
    names.sort();
    assert_eq!(names, ["layer.bias", "layer.weight", "rms.weight"]);
    let x = numbers(&[2, 3, 6], 1).to_kind(Kind::Float).to_device(test_device());
    let (sum, normed) = norm.forward_add(&x, &x);
    assert_eq!(sum, &x + &x);
    assert_all_within(&normed, &norm.forward(&(&x + &x)), 1e-6, "twice");
    assert_eq!(rms.forward(&x).size(), [2, 3, 6]);
}

#[test]
fn strided_and_offset_inputs_are_taken_as_they_are() {
    let device = test_device();
    let store = VarStore::new(device);
    let norm = layer_norm(store.root(), 8);
    let x = numbers(&[9, 12], 1).to_kind(Kind::Float).to_device(device);
    for part in [
        x.narrow(1, 1, 8),
        x.narrow(1, 3, 8),
        numbers(&[8, 9], 2).to_kind(Kind::Float).to_device(device).tr(),
    ] {
        let (found, expected) = (norm.forward(&part), norm.forward(&part.copy()));
        assert_eq!(found, expected);
        let found = bias_gelu(&part, None).expect("a GELU");
        assert_all_within(&found, &part.copy().gelu("none"), 1e-6, "strided");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let store = VarStore::new(test_device());
    let norm = layer_norm(store.root(), 8);
    let x = Tensor::zeros([2, 7], (Kind::Float, test_device()));
    assert_fails(norm.f_forward(&x), &["a norm of 8 columns", "[2, 7]"]);
    let x = Tensor::zeros([2, 8], (Kind::Float, test_device()));
    assert_fails(norm.f_forward_add(&x, &x.narrow(0, 0, 1)), &["a residual of [1, 8]"]);
    assert_fails(bias_swiglu(&x.narrow(1, 0, 7), None), &["an even number of columns, but got 7"]);
    let bias = Tensor::zeros([7], (Kind::Float, test_device()));
    assert_fails(bias_gelu_tanh(&x, Some(&bias)), &["one number for each of the 8 columns"]);
}

/// Rotates by the formula: each number of the first half is the real part of a complex number.
fn turned(x: &Tensor, base: f64) -> Tensor {
    let (sequence, width) = (x.size()[1], x.size()[3]);
    let exact = (Kind::Double, Device::Cpu);
    let speeds = (Tensor::arange(width / 2, exact) * (-2.0 * base.ln() / width as f64)).exp();
    let angles = Tensor::arange(sequence, exact).outer(&speeds).unsqueeze(1);
    let [cos, sin] = [angles.cos(), angles.sin()].map(|t| t.to_kind(Kind::Float).to_kind(x.kind()));
    let halves = x.chunk(2, -1);
    let first = &halves[0] * &cos - &halves[1] * &sin;
    let second = &halves[1] * &cos + &halves[0] * &sin;
    Tensor::cat(&[first, second], -1)
}

#[test]
fn rotary_positions_turn_pairs_by_their_places() {
    for shape in [[1, 1, 1, 2], [2, 5, 3, 6], [3, 33, 2, 64], [2, 1030, 1, 16], [1, 70, 4, 128]] {
        let case = Case {
            name: format!("rotary positions of {shape:?}"),
            inputs: vec![("x", numbers(&shape, 1) * 3.0)],
            ours: &|t| {
                let rotary = Rotary::new(1100, shape[3], 10_000.0, t[0].device());
                vec![rotary.apply(&t[0]).expect("turned")]
            },
            theirs: &|t| vec![turned(&t[0], 10_000.0)],
        };
        case.check();
    }
}

#[test]
fn rotary_positions_take_strided_numbers_and_refuse_others() {
    let rotary = Rotary::new(8, 16, 10_000.0, test_device());
    let many = numbers(&[2, 8, 9, 16], 1).to_device(test_device()).to_kind(Kind::Float);
    let part = many.narrow(2, 3, 4);
    let found = rotary.apply(&part).expect("turned");
    assert_eq!(found, rotary.apply(&part.contiguous()).expect("turned"));
    for shape in [[2, 9, 3, 16], [2, 8, 3, 18], [2, 8, 3, 15]] {
        let other = Tensor::zeros(shape, (Kind::Float, test_device()));
        assert_fails(rotary.apply(&other), &["rotary positions"]);
    }
}

#[test]
fn angles_that_are_trained_have_gradients() {
    let case = Case {
        name: "rotary positions".into(),
        inputs: vec![
            ("x", numbers(&[2, 5, 3, 8], 1)),
            ("cos", numbers(&[5, 4], 2)),
            ("sin", numbers(&[5, 4], 3)),
        ],
        ours: &|t| vec![rotary(&t[0], &t[1], &t[2]).expect("turned")],
        theirs: &|t| {
            let (cos, sin) = (t[1].unsqueeze(1), t[2].unsqueeze(1));
            let halves = t[0].chunk(2, -1);
            let first = &halves[0] * &cos - &halves[1] * &sin;
            let second = &halves[1] * &cos + &halves[0] * &sin;
            vec![Tensor::cat(&[first, second], -1)]
        },
    };
    case.check();
}

#[test]
fn angles_that_are_changed_before_the_backward_are_refused() {
    let there =
        |shape: &[i64], seed| numbers(shape, seed).to_kind(Kind::Float).to_device(test_device());
    let x = there(&[2, 5, 3, 8], 1).set_requires_grad(true);
    let (mut cos, sin) = (there(&[5, 4], 2), there(&[5, 4], 3));
    let out = rotary(&x, &cos, &sin).expect("turned").sum(Kind::Float);
    let _ = cos.g_mul_scalar_(2.0);
    assert_fails(backward(&[&out], &[None], false), &["modified by an inplace operation"]);
}
