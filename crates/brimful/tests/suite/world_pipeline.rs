//! A pipeline over ranks gives the plain model's results: outputs, loss, gradients, and parameters after steps of
//! Adam, for every schedule, with skips, shared tables, dropout and deferred BatchNorm.

use std::fs;
use std::path::PathBuf;

use crate::support::pipeline_cases::{
    self, CASES, Case, Cut, GPT, INTERLEAVED, MLP, Plain, U_NET, built, descend, eval, linear,
    of_all,
};
use crate::support::ranks::in_ranks;
use crate::support::{
    Update, assert_all_close, assert_close, assert_fails, assert_same, clear, copies, test_device,
};
use brimful::memory::Arena;
use brimful::optim::{Adam, Ema, Optimizer};
use brimful::pipeline::{BalanceBy, Builder, Offload};
use brimful::schedule::Schedule;
use brimful::world::WorldError;
use brimful::{DeviceSpec, Layers, Loss, MicroBatcher, MicroBatches, Pipeline, World};
use brimful_plan::split;
use tch::nn::{self, ModuleT};
use tch::{Device, Kind, Tensor};

/// Builds a pipeline in f64 over a world, with this many devices in each rank.
fn builder(case: &Case, world: &World, devices: usize) -> Builder {
    pipeline_cases::builder((case.layers)(), devices).world(world)
}

/// Builds such a pipeline, which cuts a mini-batch into this many micro-batches.
fn piped(case: &Case, world: &World, devices: usize, micro_batches: usize) -> Pipeline {
    let builder = builder(case, world, devices).micro_batches(MicroBatches::Count(micro_batches));
    builder.build().expect("a pipeline")
}

/// Returns the part of a mini-batch for this rank's replica: empty if there are too few samples.
fn part(world: &World, replicas: usize, all: &Tensor) -> Tensor {
    let samples = all.size()[0] as usize;
    let replica = world.rank() / (world.size() / replicas);
    let parts = split::by_count(samples, replicas).expect("samples");
    let own = parts.get(replica).cloned().unwrap_or(samples..samples);
    all.narrow(0, own.start as i64, own.len() as i64)
}

/// Compares two steps and an evaluation on rank 0.
fn compare(case: &Case, world: &World, builder: Builder, cut: Cut, what: &str) {
    let mut pipe = built(
        builder.replicas(cut.replicas).micro_batches(MicroBatches::Count(cut.micro_batches)),
        what,
    );
    let lists = pipe.actions(cut.micro_batches).expect("lists").to_string();
    world.agree("the lists", &lists).expect(what);
    let part = |all: &Tensor| part(world, cut.replicas, all);
    let values = pipe.variables().expect("variables");
    let is_first = world.rank() == 0;
    let mut plain = is_first.then(|| Plain::with(&(case.layers)(), values));
    let mut optimizer = pipe.optimizer(Adam::new(0.01)).expect("an optimizer");
    for number in 0..2 {
        let what = format!("{what}, step {number}");
        let (x, y) = case.data(cut.samples, number);
        let step = pipe.backward(&part(&x), &part(&y), case.loss);
        let step = step.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(step.samples, cut.samples, "{what}: those of all replicas");
        assert_eq!(step.shares.iter().sum::<usize>() as i64, part(&x).size()[0], "{what}");
        let gradients = pipe.gradients().expect("gradients");
        optimizer.update();
        let values = pipe.variables().expect("variables");
        if let Some(plain) = &mut plain {
            let pieces = case.pieces(cut, step.seed);
            let expected = plain.backward_pieces(case, &x, &y, &pieces);
            assert!((step.loss - expected).abs() < 1e-10, "{what}: {} not {expected}", step.loss);
            assert_close(&gradients, &plain.gradients(), &what);
            plain.optimizer.update();
            assert_close(&values, &plain.values(), &what);
        }
    }
    let (x, y) = case.data(cut.samples, 9);
    let out = eval(&mut pipe, &part(&x), MicroBatches::Count(3)).expect("an evaluation");
    pipe.set_micro_batches(MicroBatches::Count(3));
    let evaluated = pipe.evaluate(&part(&x), &part(&y), case.loss_and_outputs());
    let evaluated = evaluated.expect("an evaluation");
    // A replica without a sample has no outputs.
    let has_samples = part(&x).size()[0] > 0;
    assert_eq!((out.defined(), evaluated.outputs.defined()), (has_samples, has_samples), "{what}");
    if has_samples {
        assert_eq!(evaluated.outputs, out, "every rank has the outputs of its replica");
    }
    assert_eq!(evaluated.samples, cut.samples, "{what}: those of all replicas");
    let evaluated = world.share("the loss", &evaluated.loss).expect("shared");
    assert!(evaluated.iter().all(|loss| *loss == evaluated[0]), "{what}: {evaluated:?}");
    if let Some(plain) = &plain {
        assert_all_close(&out, &plain.answer(&part(&x)), what);
        let expected = whole_loss(case, &plain.answer(&x), &y);
        assert!((evaluated[0] - expected).abs() < 1e-10, "{what}: {evaluated:?} not {expected}");
    }
}

/// Returns the loss of a whole mini-batch's outputs.
fn whole_loss(case: &Case, out: &Tensor, y: &Tensor) -> f64 {
    let mut one = MicroBatcher::new(&nn::VarStore::new(test_device()), MicroBatches::Count(1));
    let batch = (out.shallow_clone(), y.shallow_clone());
    one.evaluate(&batch, |(out, y)| (case.loss)(out, &y)).expect("a loss").loss
}

/// Measured times differ from rank to rank: all use the first one's, and make the same lists.
#[test]
fn automatic_lists_over_ranks() {
    in_ranks(2, |world| {
        let interleaved = Schedule::AutoInterleaved { stages_per_device: 2 };
        for schedule in [Schedule::Auto, interleaved, Schedule::AutoV] {
            for (case, sample) in [(&MLP, (MLP.input)(4)), (&GPT, (GPT.input)(4))] {
                let what = format!("{}, {schedule} over two ranks", case.name);
                let builder = builder(case, &world, 1).schedule(schedule);
                let builder = builder.balance(BalanceBy::by_time(&sample));
                let cut = Cut { samples: 13, replicas: 1, micro_batches: 4 };
                compare(case, &world, builder, cut, &what);
            }
        }
    });
}

/// Each rank of two pipelines updates the variables that it has.
#[test]
fn copies_in_other_ranks_follow_what_a_user_does() {
    in_ranks(4, |world| {
        let replicas = 2;
        let pipe = builder(&GPT, &world, 1).replicas(replicas);
        let pipe = pipe.micro_batches(MicroBatches::Count(2)).build();
        let mut pipe = pipe.expect("a pipeline");
        let values = pipe.variables().expect("variables");
        let plain = (world.rank() == 0).then(|| Plain::with(&(GPT.layers)(), values));
        for number in 0..3 {
            let what = format!("step {number}");
            let (x, y) = GPT.data(8, number);
            let (own_x, own_y) = (part(&world, replicas, &x), part(&world, replicas, &y));
            let step = pipe.backward(&own_x, &own_y, GPT.loss).expect(&what);
            let gradients = pipe.gradients().expect("gradients");
            if let Some(plain) = &plain {
                plain.backward(&GPT, &x, &y, MicroBatches::Count(2 * replicas), step.seed);
                assert_close(&gradients, &plain.gradients(), &what);
                descend(plain.values());
                clear(&plain.store);
            }
            // Rank 0 gets copies of the others' variables beside its own.
            descend(pipe.variables().expect("variables"));
            pipe.zero_grad().expect("cleared");
        }
        let (x, _) = GPT.data(8, 9);
        let x = part(&world, replicas, &x);
        let out = eval(&mut pipe, &x, MicroBatches::Count(3)).expect("an evaluation");
        if let Some(plain) = &plain {
            assert_all_close(&out, &plain.answer(&x), "an evaluation");
        }
    });
}

/// The first rank has a shared variable and its copy, the second has neither.
#[test]
fn a_variable_that_is_shared_within_one_rank_is_no_other_ones_matter() {
    in_ranks(2, |world| {
        let layers = || {
            let shared = |p: &nn::Path| {
                let weight = p.get("weight").unwrap_or_else(|| p.randn_standard("weight", &[4, 4]));
                nn::func(move |x| x.linear(&weight, None::<Tensor>))
            };
            Layers::new()
                .add("one", shared)
                .add_sharing("two", "one", move |_, p| shared(p))
                .add("three", |p| nn::linear(p, 4, 3, Default::default()))
        };
        let case = Case { layers, ..MLP };
        let devices = 2 - world.rank();
        let cut = Cut { samples: 6, replicas: 1, micro_batches: 2 };
        compare(&case, &world, builder(&case, &world, devices), cut, "shared within a rank");
    });
}

/// Checks windows in whose last mini-batch one of the pipelines has no sample.
#[test]
fn two_pipelines_of_two_ranks_each() {
    in_ranks(4, |world| {
        for case in &CASES {
            for (schedule, samples, m) in [
                (Schedule::GPipe, 12, 3),
                (Schedule::OneFOneB, 13, 2),
                (INTERLEAVED, 11, 2),
                (Schedule::OneFOneB, 1, 2),
            ] {
                let what = format!("{}, {schedule}, {samples}/{m}", case.name);
                let cut = Cut { samples, replicas: 2, micro_batches: m };
                compare(case, &world, builder(case, &world, 1).schedule(schedule), cut, &what);
            }
        }
    });
}

/// Returns name, dtype and bits of these tensors.
fn bits(named: &[(String, Tensor)]) -> Vec<(String, String, Vec<u64>)> {
    let of = |tensor: &Tensor| {
        let values = tensor.to_device(Device::Cpu).to_kind(Kind::Double).view([-1]);
        let values = Vec::<f64>::try_from(&values).expect("numbers");
        values.into_iter().map(f64::to_bits).collect()
    };
    let row = |(name, tensor): &(String, Tensor)| {
        (name.clone(), format!("{:?}", tensor.kind()), of(tensor))
    };
    named.iter().map(row).collect()
}

/// The third replica has none of two samples, or none of a window's first mini-batch.
#[test]
fn a_replica_without_a_sample_has_the_gradients_of_all_to_the_last_bit() {
    in_ranks(3, |world| {
        for (kind, locations) in [
            (Kind::Float, Offload::Device),
            (Kind::BFloat16, Offload::Device),
            (Kind::BFloat16, Offload::Host),
        ] {
            let what = format!("{kind:?}, {locations:?}");
            let builder = builder(&MLP, &world, 1).kind(kind).offload(locations).replicas(3);
            let mut pipe = built(builder.micro_batches(MicroBatches::Count(2)), &what);
            let mut optimizer = pipe.optimizer(Adam::new(0.01)).expect("an optimizer");
            let loss = |out: Tensor, _: &()| Loss::ratio(out.square().sum(Kind::Float), 7.0);
            let x = |samples: usize| part(&world, 3, &MLP.data(samples, 0).0.to_kind(kind));
            for windowed in [false, true] {
                if windowed {
                    pipe.accumulate(&x(2), &(), loss).expect("a part");
                    pipe.accumulate(&x(5), &(), loss).expect("another");
                    pipe.commit().expect("a step");
                } else {
                    pipe.backward(&x(2), &(), loss).expect("a step");
                }
                // In ranks after the first, each has its own gradients.
                let gradients = bits(&pipe.gradients().expect("gradients"));
                let all = world.share("gradients", &gradients).expect("shared");
                assert!(all.iter().all(|one| *one == all[0]), "{what}, windowed: {windowed}");
                optimizer.update();
            }
            let values = bits(&pipe.variables().expect("variables"));
            let all = world.share("values", &values).expect("shared");
            assert!(all.iter().all(|one| *one == all[0]), "{what}: models drift apart");
        }
    });
}

#[test]
fn any_loss_on_the_outputs_of_the_whole_mini_batch() {
    in_ranks(2, |world| {
        for (case, replicas) in [(&MLP, 1), (&U_NET, 1), (&MLP, 2), (&U_NET, 2)] {
            let mut pipe = builder(case, &world, 1)
                .replicas(replicas)
                .micro_batches(MicroBatches::Count(3))
                .build()
                .expect("a pipeline");
            let values = pipe.variables().expect("variables");
            let mut expected = None;
            let (x, _) = case.data(7, 0);
            let own = part(&world, replicas, &x);
            let out = pipe.forward(&own).expect("a forward");
            assert_eq!(out.size()[0], 7, "the outputs of all replicas");
            of_all(&out).backward();
            pipe.backward_from(out).expect("a backward");
            let gradients = pipe.gradients().expect("gradients");
            if world.rank() == 0 {
                let plain = Plain::with(&(case.layers)(), values);
                let all = plain.model.forward_t(&x.to_device(test_device()), true);
                of_all(&all).backward();
                assert_close(&gradients, &plain.gradients(), case.name);
                expected = Some((all.detach(), of_all(&all).double_value(&[])));
            }

            // As one step, and with a loss that fails on one of the ranks.
            pipe.zero_grad().expect("cleared");
            let rank = world.rank() as f64;
            let failed = pipe.backward_whole(&own, |out| of_all(out) / (1.0 - rank));
            failed.expect_err("it is not finite on the second");
            assert!(pipe.gradients().expect("gradients").is_empty());
            let step = pipe.backward_whole(&own, |out| of_all(out)).expect("a step");
            assert_close(&pipe.gradients().expect("gradients"), &gradients, case.name);
            assert_eq!((step.samples, &step.terms[..]), (7, &[step.loss][..]));
            if let Some((outputs, value)) = expected {
                assert!((step.loss - value).abs() < 1e-9, "{} not {value}", step.loss);
                assert_all_close(&step.outputs, &outputs, case.name);
            }
        }
    });
}

/// Runs some steps of training with clipping and one group with its own settings.
fn train(pipe: &mut Pipeline, optimizer: &mut Optimizer, steps: std::ops::Range<i64>) {
    for number in steps {
        let (x, y) = GPT.data(9, number);
        pipe.backward(&x, &y, GPT.loss).expect("a step");
        let norm = optimizer.clip_gradient_norm(0.05).expect("clipped").value().expect("a number");
        assert!(norm > 0.05, "it has something to clip");
        optimizer.update();
    }
}

fn optimizer(pipe: &mut Pipeline) -> Optimizer {
    let mut optimizer = pipe.optimizer(Adam::new(0.01)).expect("an optimizer");
    optimizer.decay_only_matrices().expect("biases of all ranks");
    // Only in one stage's rank.
    optimizer.group("table", |name| name.starts_with("wte"), Adam::new(0.1)).expect("a group");
    optimizer.set_group_learning_rate("table", 0.02).expect("known to one rank");
    optimizer
}

fn folder(world: &World) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("world_pipeline_saved");
    if world.rank() == 0 {
        fs::create_dir_all(&path).expect("a folder");
    }
    world.agree("the folder", &path.display()).expect("all are here");
    path
}

/// Trains the same way in one process: two steps, a save, two more from the saved state.
#[test]
fn saved_by_three_ranks_and_resumed_by_one_process() {
    in_ranks(3, |world| {
        let folder = folder(&world);
        let (model, state) = (folder.join("model.safetensors"), folder.join("state.safetensors"));
        tch::manual_seed(5);
        let mut pipe = piped(&GPT, &world, 1, 3);
        let first = copies(&pipe.variables().expect("variables"));
        let mut opt = optimizer(&mut pipe);
        train(&mut pipe, &mut opt, 0..2);
        pipe.save(&model).expect("saved");
        opt.save(&state).expect("saved");
        train(&mut pipe, &mut opt, 2..4);
        let expected = copies(&pipe.variables().expect("variables"));
        // All ranks go back to the saved state.
        pipe.load(&model).expect("loaded");
        opt.load(&state).expect("loaded");
        train(&mut pipe, &mut opt, 2..4);
        assert_close(&pipe.variables().expect("variables"), &expected, "resumed by three");
        if world.rank() > 0 {
            return;
        }
        let mut alone = builder(&GPT, &World::alone(), 2)
            .micro_batches(MicroBatches::Count(3))
            .build()
            .expect("built");
        alone.set_variables(first).expect("the first values");
        let mut opt = optimizer(&mut alone);
        train(&mut alone, &mut opt, 0..4);
        assert_close(&alone.variables().expect("variables"), &expected, "never interrupted");
        alone.load(&model).expect("loaded");
        opt.load(&state).expect("loaded");
        train(&mut alone, &mut opt, 2..4);
        assert_close(&alone.variables().expect("variables"), &expected, "resumed by one");
    });
}

#[test]
fn frozen_layers_and_what_no_rank_has() {
    in_ranks(2, |world| {
        let mut pipe = piped(&MLP, &world, 1, 2);
        assert_fails(pipe.freeze(|name| name == "nothing"), &["of 10 is 'fc1.bias'"]);
        pipe.freeze(|name| name.starts_with("fc1")).expect("one rank has it");
        let (x, y) = MLP.data(4, 0);
        pipe.backward(&x, &y, MLP.loss).expect("a step");
        let gradients = pipe.gradients().expect("gradients");
        assert!(gradients.iter().all(|(name, _)| !name.starts_with("fc1")));
        assert_eq!(gradients.len(), if world.rank() == 0 { 8 } else { 6 });
    });
}

/// The traffic of a step is the activations and gradients at the cut, and little else.
#[test]
fn traffic_is_what_the_cut_needs() {
    in_ranks(2, |world| {
        let layers = Layers::new()
            .add("in", |p| nn::linear(p, 16, 256, Default::default()))
            .add("out", |p| nn::linear(p, 256, 4, Default::default()));
        let mut pipe = Pipeline::builder(layers)
            .devices([DeviceSpec::cpu().threads(1)])
            .micro_batches(MicroBatches::Count(4))
            .world(&world)
            .build()
            .expect("a pipeline");
        let x = Tensor::ones([64, 16], (Kind::Float, Device::Cpu));
        let before = world.traffic().expect("counted");
        let sum = |out: Tensor, _: &()| Loss::mean(out.square().mean(Kind::Float));
        pipe.backward(&x, &(), sum).expect("a step");
        let sent = world.traffic().expect("counted").sent.0 - before.sent.0;
        assert_eq!(sent, 64 * 256 * 4, "one way from each rank");
    });
}

#[test]
fn automatic_sizes_are_agreed() {
    in_ranks(2, |world| {
        tch::manual_seed(3);
        // The rank with less memory decides.
        let limit = [512 << 10, 160 << 10][world.rank()];
        let arena = Arena::limited("cpu", limit).expect("an arena");
        let layers = Layers::new()
            .add("in", |p| nn::linear(p, 64, 64, Default::default()))
            .add_fn("tanh", |x| x.tanh())
            .add("middle", |p| nn::linear(p, 64, 64, Default::default()))
            .add_fn("tanh_too", |x| x.tanh())
            .add("out", |p| nn::linear(p, 64, 4, Default::default()));
        let mut pipe = Pipeline::builder(layers)
            .devices([DeviceSpec::cpu().threads(1).arena(arena)])
            .micro_batches(MicroBatches::Largest)
            .world(&world)
            .build()
            .expect("a pipeline");
        let x = Tensor::ones([512, 64], (Kind::Float, Device::Cpu));
        for _ in 0..6 {
            let loss = |out: Tensor, _: &()| Loss::mean(out.square().mean(Kind::Float));
            let step = pipe.backward(&x, &(), loss).expect("a step");
            let found = world.share("sizes", &(step.sizes, step.retries)).expect("shared");
            assert_eq!(found[0], found[1]);
            assert!(found[0].0.len() > 1, "the mini-batch does not fit at once");
            pipe.zero_grad().expect("cleared");
        }
    });
}

#[test]
fn what_differs_is_told_to_every_rank() {
    in_ranks(2, |world| {
        let schedule = [Schedule::GPipe, Schedule::OneFOneB][world.rank()];
        let built = builder(&MLP, &world, 1).schedule(schedule).build();
        let words = [
            "the pipeline must be the same on all ranks, but is gpipe of ",
            " on rank 0 and 1f1b of ",
            " on rank 1",
        ];
        assert_fails(built, &words);
        let error = builder(&MLP, &world, 1).replicas(3).build().expect_err("does not divide");
        assert_eq!(error, WorldError::DoesNotDivide { ranks: 2, replicas: 3 }.into());
        let error = builder(&MLP, &world, 1).balance([8]).build().expect_err("one stage");
        assert_eq!(error, WorldError::TooManyRanks { ranks: 2, workers: 1 }.into());

        let mut pipe = piped(&MLP, &world, 1, 2);
        let (x, y) = MLP.data(4, world.rank() as i64);
        let error = pipe.backward(&x, &y, MLP.loss).expect_err("other samples");
        assert!(error.to_string().starts_with("the mini-batch must be the same"), "{error}");
        let (x, y) = MLP.data(4, 0);
        pipe.backward(&x, &y, MLP.loss).expect("the same samples");
    });
}

/// A rank that cannot plan takes part in the handshake, so no rank waits for it.
#[test]
fn automatic_offload_on_one_rank_is_told_to_all() {
    in_ranks(2, |world| {
        let offload = match world.rank() {
            0 => Offload::Device,
            _ => Offload::Auto { gpu: None, host: None },
        };
        let built = builder(&MLP, &world, 1).offload(offload).build();
        assert_fails(built, &["Offload::Auto plans one pipeline in one process"]);
        builder(&MLP, &world, 1).build().expect("ranks that agree");
    });
}

#[test]
fn pipelines_that_train_different_parameters_are_all_reported() {
    in_ranks(2, |world| {
        let pipe =
            builder(&MLP, &world, 1).replicas(2).micro_batches(MicroBatches::Count(2)).build();
        let mut pipe = pipe.expect("two pipelines");
        let (x, y) = MLP.data(8, 0);
        let (x, y) = (part(&world, 2, &x), part(&world, 2, &y));
        let freeze = |pipe: &Pipeline, frozen: bool| {
            let variables = pipe.variables().expect("variables").into_iter();
            let biases = variables.filter(|(name, _)| name.ends_with("bias"));
            biases.for_each(|(_, variable)| drop(variable.set_requires_grad(!frozen)));
        };
        freeze(&pipe, world.rank() == 1);
        for error in [
            pipe.backward(&x, &y, MLP.loss).map(drop),
            pipe.backward_whole(&x, |out| out.mean(Kind::Double)).map(drop),
        ] {
            let error = error.expect_err("two models").to_string();
            assert!(error.contains("what is trained must be the same on all ranks"), "{error}");
            assert!(error.contains("on rank 0 and") && error.contains("on rank 1"), "{error}");
        }
        assert!(pipe.gradients().expect("gradients").is_empty());
        freeze(&pipe, true);
        pipe.backward(&x, &y, MLP.loss).expect("both train the same");
    });
}

/// Fails before the ranks have exchanged anything, or within a call outside of steps.
#[test]
fn what_keeps_one_rank_from_a_call_is_told_to_all() {
    in_ranks(2, |world| {
        let mut pipe = piped(&MLP, &world, 1, 2);
        let (x, y) = MLP.data(4, 0);
        let second = world.rank() == 1;
        let reported = |error: brimful::Error, words: &str| {
            let by_the_other =
                matches!(error, brimful::Error::World(WorldError::RankFailed { rank: 1, .. }));
            assert!(by_the_other != second && error.to_string().contains(words), "{error}");
        };
        let traced = x.copy().set_requires_grad(second);
        for error in [
            pipe.backward(&traced, &y, MLP.loss).map(drop),
            pipe.accumulate(&traced, &y, MLP.loss).map(drop),
            pipe.backward_whole(&traced, |out| out.mean(Kind::Double)).map(drop),
            pipe.forward(&traced).map(drop),
        ] {
            reported(error.expect_err("a gradient of an input"), "gradient");
        }
        let old = pipe.forward(&x).expect("a forward");
        let new = pipe.forward(&x).expect("another");
        let (wrong, right) = if second { (old, new) } else { (new, old) };
        reported(pipe.backward_from(wrong).map(drop).expect_err("old outputs"), "earlier forward");
        drop(right);
        pipe.backward(&x, &y, MLP.loss).expect("the next step");

        let mut optimizer = pipe.optimizer(Adam::new(0.01)).expect("an optimizer");
        let max_norm = if second { -1.0 } else { 1.0 };
        reported(
            optimizer.clip_gradient_norm(max_norm).map(drop).expect_err("below 0"),
            "max_norm",
        );
        let plain = nn::VarStore::new(Device::Cpu);
        (MLP.layers)().build(&plain.root()).expect("built");
        let plain_optimizer = Optimizer::new(&plain, Adam::new(0.01)).expect("an optimizer");
        let (none, texts) = plain_optimizer.state().expect("a state");
        let foreign =
            || vec![("foreign.momentum".to_owned(), Tensor::zeros([1], tch::kind::FLOAT_CPU))];
        let state = if second { foreign() } else { none };
        let error = optimizer.load_state(&state, &texts).expect_err("not its own");
        reported(error, "foreign");
        let decay = if second { 2.0 } else { 0.9 };
        reported(pipe.ema(decay).map(drop).expect_err("no decay"), "decay");
        let mut ema = pipe.ema(0.9).expect("averages");
        let (mut averages, texts) =
            Ema::new(&plain, 0.9).expect("averages").state().expect("a state");
        averages.extend(second.then(foreign).into_iter().flatten());
        let error = ema.load_state(&averages, &texts).expect_err("not its own");
        reported(error, "foreign");
        let before = copies(&pipe.variables().expect("variables"));
        let error = pipe.set_variables(foreign()).expect_err("others");
        assert!(error.to_string().contains("fc1.bias"), "{error}");
        assert_same("refused", &before, &pipe.variables().expect("variables"));
        let values = if second { foreign() } else { copies(&before) };
        reported(pipe.set_variables(values).expect_err("others on one rank"), "missing");
        assert_same("refused", &before, &pipe.variables().expect("variables"));
        let name = if second { "nothing" } else { "fc1.weight" };
        let error = optimizer.group("own", |other| other == name, Adam::new(0.1));
        reported(error.expect_err("an empty group on one rank"), "own");
        let rate = if second { -1.0 } else { 0.1 };
        let error = optimizer.group("own", |other| other == "fc1.weight", Adam::new(rate));
        reported(error.expect_err("a rate below 0 on one rank"), "rate");
        reported(pipe.freeze(|other| other == name).expect_err("no such on one rank"), "fc1.bias");
        assert!(pipe.variables().expect("variables").iter().all(|(_, v)| v.requires_grad()));
        optimizer.step().expect("the next call");
    });
}

/// Holds even if ranks compute different values: here one replica's gradients are twice the other's.
#[test]
fn replicas_clip_by_one_norm() {
    in_ranks(2, |world| {
        let mut pipe = built(
            builder(&MLP, &world, 1).replicas(2).micro_batches(MicroBatches::Count(2)),
            "two",
        );
        let mut optimizer = pipe.optimizer(Adam::new(0.01)).expect("an optimizer");
        let (x, y) = MLP.data(8, 0);
        pipe.backward(&part(&world, 2, &x), &part(&world, 2, &y), MLP.loss).expect("a step");
        // All ranks take part; each has its own gradients.
        for (_, mut gradient) in pipe.gradients().expect("gradients") {
            let _itself = gradient.g_mul_scalar_(1.0 + world.rank() as f64);
        }
        let norm = optimizer.clip_gradient_norm(0.05).expect("clipped").value().expect("a number");
        let all = world.share("norms", &norm).expect("shared");
        assert_eq!(all[0], all[1]);
    });
}

/// Each rank allocates host memory for its own stages; if one cannot, all get an error.
#[test]
fn every_rank_looks_for_free_memory_on_its_own_host() {
    in_ranks(2, |world| {
        if test_device() != Device::Cpu {
            return;
        }
        let layers = || Layers::new().add("one", linear(64, 64)).add("two", linear(64, 64));
        // Weights and gradients in f64.
        let needed = 16 * layers().parameter_count().expect("a model") / 2;
        let build = |room: u64| {
            let host = Arena::limited("host", room).expect("a limit");
            pipeline_cases::builder(layers(), 1)
                .world(&world)
                .offload(Offload::Host)
                .host(host)
                .build()
        };
        // Memory is taken in whole pages.
        let room = needed + needed / 2;
        build(room).expect("each has room for one stage");
        let second = world.rank() == 1;
        let error = build(if second { needed - 1 } else { room }).expect_err("too little memory");
        assert!(error.to_string().contains("1 offloaded stages need"), "{error}");
        let is_told =
            matches!(error, brimful::Error::World(WorldError::RankFailed { rank: 1, .. }));
        assert_eq!(is_told, !second, "{error}");
    });
}
