//! The models: published sizes, shapes, initial losses, and learning.

use brimful::layers::Model;
use brimful::memory::Arena;
use brimful::nn::linear_cross_entropy;
use brimful::{Layers, Loss, MicroBatcher, MicroBatches};
use brimful_models::{
    AmoebaNet, Gpt, ResNet, ShapeError, UNet, gpt, gpt_body, mlp, resnet18, resnet50, resnet101,
};
use tch::nn::{self, ModuleT, OptimizerConfig};
use tch::{Device, Kind, Tensor};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

fn tiny_gpt() -> Gpt {
    Gpt { layers: 2, width: 32, heads: 4, context: 16, vocabulary: 65, dropout: 0.0, tied: true }
}

fn tokens(samples: i64, sequence: i64) -> Tensor {
    Tensor::randint(65, [samples, sequence], (Kind::Int64, Device::Cpu))
}

fn built(layers: &Layers) -> (nn::VarStore, Model) {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = layers.build(&vs.root()).expect("a model");
    (vs, model)
}

/// Returns the shape of the output for this input, in evaluation.
fn shape_after(layers: &Layers, x: &Tensor) -> Vec<i64> {
    let (_vs, model) = built(layers);
    tch::no_grad(|| model.forward_t(x, false)).size()
}

#[test]
fn parameter_counts_are_the_published_ones() {
    let counts = [
        (resnet18(1000), 11_689_512),
        (resnet50(1000), 25_557_032),
        (resnet101(1000), 44_549_160),
        (gpt(&Gpt::gpt2_small()), 124_439_808),
        (gpt(&Gpt::gpt2_medium()), 354_823_168),
        (gpt(&Gpt::gpt2_large()), 774_030_080),
        (gpt(&Gpt::gpt2_xl()), 1_557_611_200),
        (mlp(784, &[300, 100], 10), 266_610),
    ];
    for (layers, count) in counts {
        assert_eq!(layers.parameter_count(), Ok(count), "{layers:?}");
    }
}

#[test]
fn a_u_net_has_the_paper_s_parameters_and_a_layer_for_each_block() {
    let published = [
        (5, 64, 232_687_328),
        (6, 72, 362_157_516),
        (11, 128, 2_213_834_176),
        (24, 128, 4_993_859_008),
        (24, 160, 7_802_903_600),
        (48, 160, 15_822_206_000),
    ];
    for (blocks, channels, count) in published {
        let layers = UNet::new(blocks, channels).layers().expect("a shape");
        assert_eq!(layers.parameter_count(), Ok(count), "({blocks}, {channels})");
        assert_eq!(layers.len(), 11 * blocks + 21);
        assert_eq!(layers.skips().expect("paired").len(), 5);
    }
}

#[test]
fn an_amoebanet_has_the_paper_s_parameters_and_a_layer_for_each_cell() {
    let published = [
        (18, 208, 81_505_540),
        (18, 256, 122_470_120),
        (18, 416, 319_024_120),
        (18, 544, 542_734_840),
        (36, 544, 1_055_832_376),
        (72, 512, 1_844_858_344),
    ];
    for (cells, filters, count) in published {
        let layers = AmoebaNet::new(cells, filters, 1000).layers().expect("a shape");
        assert_eq!(layers.parameter_count(), Ok(count), "({cells}, {filters})");
        assert_eq!(layers.len(), cells + 6);
    }
}

#[test]
fn shapes_that_cannot_be_cut_are_refused_with_their_numbers() {
    let u_net = |blocks, channels| UNet::new(blocks, channels).layers().expect_err("refused");
    assert_eq!(u_net(1, 64), ShapeError::UNetBlocks { blocks: 1 });
    assert_eq!(u_net(5, 63), ShapeError::UNetChannels { channels: 63 });
    assert_eq!(u_net(5, 0), ShapeError::UNetChannels { channels: 0 });
    let amoeba = |cells, filters| AmoebaNet::new(cells, filters, 10).layers().expect_err("refused");
    assert_eq!(amoeba(0, 8), ShapeError::AmoebaNetCells { cells: 0 });
    assert_eq!(amoeba(4, 8), ShapeError::AmoebaNetCells { cells: 4 });
    assert_eq!(amoeba(3, 12), ShapeError::AmoebaNetFilters { filters: 12 });
    assert!(amoeba(3, 12).to_string().contains("12 filters"));
}

#[test]
fn an_untied_head_adds_a_table() {
    let untied = Gpt { tied: false, ..Gpt::gpt2_small() };
    assert_eq!(gpt(&untied).parameter_count(), Ok(124_439_808 + 50_257 * 768));
    assert_eq!(gpt(&untied).shared(), Ok(vec![]));
    assert_eq!(gpt(&Gpt::gpt2_small()).shared(), Ok(vec![(16, 0)]));
}

#[test]
fn every_residual_and_transformer_block_is_a_layer() {
    let names = |layers: &Layers| layers.names().map(str::to_owned).collect::<Vec<_>>();
    let resnet = names(&resnet18(10));
    let blocks = (1..=4).flat_map(|group| (0..2).map(move |n| format!("layer{group}.{n}")));
    let expected = ["conv1", "bn1"].map(String::from).into_iter().chain(blocks);
    let expected = expected.chain(["avgpool", "flatten", "fc"].map(String::from));
    assert_eq!(resnet, expected.collect::<Vec<_>>());
    let ends = ["wte", "wpe", "drop", "h.0", "h.1", "ln_f", "lm_head"];
    assert_eq!(names(&gpt(&tiny_gpt())), ends);
    assert_eq!(names(&mlp(4, &[3, 2], 2)), ["flatten", "fc1", "relu1", "fc2", "relu2", "fc3"]);
}

#[test]
fn forward_shapes() {
    let image = |channels, side| Tensor::randn([2, channels, side, side], CPU);
    assert_eq!(shape_after(&resnet18(1000), &image(3, 224)), [2, 1000]);
    assert_eq!(shape_after(&resnet50(7), &image(3, 64)), [2, 7]);
    for side in [8, 28] {
        let small = ResNet::resnet18(10).small_images(1).layers();
        assert_eq!(shape_after(&small, &image(1, side)), [2, 10]);
    }
    assert_eq!(shape_after(&mlp(64, &[32], 10), &image(1, 8)), [2, 10]);
    let u_net = UNet::new(2, 2).layers().expect("a shape");
    assert_eq!(shape_after(&u_net, &image(3, 64)), [2, 1, 64, 64]);
    // 33 is halved to 17, 9, 5 and 3.
    let amoeba = AmoebaNet::new(3, 8, 7).layers().expect("a shape");
    assert_eq!(shape_after(&amoeba, &image(3, 33)), [2, 7]);
    assert_eq!(shape_after(&gpt(&tiny_gpt()), &tokens(3, 16)), [3, 16, 65]);
    assert_eq!(shape_after(&gpt(&tiny_gpt()), &tokens(3, 5)), [3, 5, 65]);
}

#[test]
fn a_gpt_starts_out_knowing_nothing() {
    for tied in [true, false] {
        let (_vs, model) = built(&gpt(&Gpt { width: 128, tied, ..tiny_gpt() }));
        let logits = model.forward_t(&tokens(16, 16), true).view([-1, 65]);
        let loss = logits.cross_entropy_for_logits(&tokens(16, 16).view([-1]));
        let expected = 65_f64.ln();
        assert!((loss.double_value(&[]) - expected).abs() < 0.1, "{loss:?} for {expected}");
    }
}

#[test]
fn a_gpt_does_not_look_ahead() {
    let (_vs, model) = built(&gpt(&tiny_gpt()));
    let (some, others) = (tokens(1, 16), tokens(1, 16));
    let changed = Tensor::cat(&[some.narrow(1, 0, 9), others.narrow(1, 9, 7)], 1);
    let [a, b] = [some, changed].map(|x| model.forward_t(&x, false).narrow(1, 0, 9));
    assert!(a.allclose(&b, 1e-5, 1e-6, false));
}

#[test]
fn dropout_acts_in_training_alone() {
    let (_vs, model) = built(&gpt(&Gpt { dropout: 0.5, ..tiny_gpt() }));
    let x = tokens(2, 8);
    assert_eq!(model.forward_t(&x, false), model.forward_t(&x, false));
    assert_ne!(model.forward_t(&x, true), model.forward_t(&x, true));
}

#[test]
fn all_models_run_and_train_in_double_precision() {
    let image = Tensor::randn([2, 1, 8, 8], (Kind::Double, Device::Cpu));
    let cases = [
        (mlp(64, &[16], 10), image.shallow_clone()),
        (ResNet::resnet18(10).small_images(1).layers(), image),
        (gpt(&tiny_gpt()), tokens(2, 8)),
    ];
    for (layers, x) in cases {
        let (mut vs, model) = built(&layers);
        vs.double();
        let out = model.forward_t(&x, true);
        assert_eq!(out.kind(), Kind::Double);
        out.square().mean(Kind::Double).backward();
        for (name, variable) in vs.variables() {
            let has_gradient = !variable.requires_grad() || variable.grad().defined();
            assert!(has_gradient, "{name} of {layers:?}");
        }
    }
}

#[test]
fn an_mlp_learns_exclusive_or() {
    tch::manual_seed(0);
    let x = Tensor::from_slice2(&[[0.0_f32, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]);
    let y = Tensor::from_slice(&[0_i64, 1, 1, 0]);
    let (vs, model) = built(&mlp(2, &[16], 2));
    let mut adam = nn::Adam::default().build(&vs, 0.03).expect("an optimizer");
    for _ in 0..200 {
        adam.backward_step(&model.forward_t(&x, true).cross_entropy_for_logits(&y));
    }
    assert_eq!(model.forward_t(&x, false).argmax(1, false), y);
}

#[test]
fn a_gpt_learns_to_count() {
    tch::manual_seed(0);
    let start = Tensor::arange(60, (Kind::Int64, Device::Cpu)).unsqueeze(1);
    let ahead = Tensor::arange(5, (Kind::Int64, Device::Cpu)).unsqueeze(0);
    let x = start + ahead;
    let y = (&x + 1).view([-1]);
    let (vs, model) = built(&gpt(&Gpt { layers: 1, ..tiny_gpt() }));
    let mut adam = nn::Adam::default().build(&vs, 0.01).expect("an optimizer");
    for _ in 0..100 {
        let logits = model.forward_t(&x, true).view([-1, 65]);
        adam.backward_step(&logits.cross_entropy_for_logits(&y));
    }
    let right = model.forward_t(&x, false).argmax(-1, false).view([-1]).eq_tensor(&y);
    assert!(right.to_kind(Kind::Double).mean(Kind::Double).double_value(&[]) > 0.99);
}

#[test]
fn a_gpt_that_does_not_add_up_is_refused_with_the_numbers() {
    let vs = nn::VarStore::new(Device::Cpu);
    let odd = Gpt { heads: 5, ..tiny_gpt() };
    let error = gpt(&odd).build(&vs.root()).expect_err("32 is not 5 × n").to_string();
    assert!(error.contains("'h.0' could not be built: a width of 32"), "{error}");
}

#[test]
#[should_panic = "a sequence of 17 tokens is longer than the context of 16"]
fn a_sequence_that_is_too_long_is_refused() {
    shape_after(&gpt(&tiny_gpt()), &tokens(1, 17));
}

#[test]
fn a_u_net_takes_images_whose_channels_are_last() {
    let layers = UNet { dropout: 0.0, ..UNet::new(2, 2) }.layers().expect("a shape");
    let (_vs, model) = built(&layers);
    let x = Tensor::randn([2, 3, 64, 64], CPU);
    let last = x.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]);
    let off = (model.forward_t(&x, true) - model.forward_t(&last, true)).abs().max();
    assert!(off.double_value(&[]) < 1e-4, "{off:?}");
}

#[test]
#[should_panic = "but 6×5 cannot be halved"]
fn an_image_that_a_u_net_cannot_halve_is_refused() {
    let layers = UNet::new(2, 2).layers().expect("a shape");
    shape_after(&layers, &Tensor::randn([1, 3, 96, 80], CPU));
}

/// The loss computed from a GPT's hidden states and its embedding equals that of its logits, and so do all gradients.
#[test]
fn a_body_and_the_loss_of_its_head_are_the_whole_gpt() {
    let tokens = tokens(3, 17);
    let (inputs, targets) = (tokens.narrow(1, 0, 16), tokens.narrow(1, 1, 16));
    let batch = (inputs, targets);
    let ((first, whole), (mut second, body)) =
        (built(&gpt(&tiny_gpt())), built(&gpt_body(&tiny_gpt())));
    second.copy(&first).expect("the same variables");
    let table = second.variables().remove("wte.weight").expect("a table");
    let expected =
        MicroBatcher::new(&first, MicroBatches::Samples(2)).backward(&batch, |(x, y)| {
            let logits = whole.forward_t(&x, true).view([-1, 65]);
            Loss::mean(logits.cross_entropy_for_logits(&y.reshape([-1])))
        });
    let found = MicroBatcher::new(&second, MicroBatches::Samples(2)).backward(&batch, |(x, y)| {
        linear_cross_entropy(&body.forward_t(&x, true), &table, None, &y, Default::default())
    });
    let losses = [expected, found].map(|step| step.expect("a step").loss);
    assert!((losses[0] - losses[1]).abs() < 1e-5, "{losses:?}");
    for (name, variable) in first.variables() {
        let (expected, found) = (variable.grad(), second.variables()[&name].grad());
        assert!(found.allclose(&expected, 1e-4, 1e-6, false), "{name}");
    }
}

#[test]
fn a_model_in_half_precision_takes_16_mib_more_than_itself_to_be_built() {
    const PIECE: u64 = 16 << 20;
    let shape = Gpt { layers: 2, width: 1024, heads: 8, vocabulary: 12_288, ..tiny_gpt() };
    let layers = gpt(&shape).kind(Kind::BFloat16);
    let weights = layers.parameter_count().expect("a number") * 2;
    let arena = Arena::new("half");
    let _inside = arena.enter();
    let (_vs, _model) = built(&layers);
    assert_eq!(arena.current(), weights);
    // Biases and norms of a block are in f32 until it is built.
    assert!(arena.peak() <= weights + PIECE + (128 << 10), "{} for {weights}", arena.peak());
}
