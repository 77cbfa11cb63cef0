//! Ranks that each run their part of a mini-batch give the plain model's results on all of it.

use std::panic::{self, AssertUnwindSafe};

use crate::support::full_batch::{
    Batch, CASES, Case, Classifier, MEAN, OVER_TOKENS, SEVERAL_WITH_A_SUM, assert_gradients,
    assert_loss, batch, distance, losses, plain,
};
use crate::support::ranks::in_ranks;
use crate::support::state::state;
use crate::support::{Update, assert_fails, assert_same, clear, numbers_there, test_device, tests};
use brimful::StepError;
use brimful::batch::{BatchError, Sequences};
use brimful::memory::{Arena, Memory};
use brimful::micro::MemoryFormat;
use brimful::nn::{BatchNormConfig, BatchNormPolicy, batch_norm1d};
use brimful::optim::{AdamW, Method, Optimizer, Sgd};
use brimful::world::WorldError;
use brimful::{DeviceSpec, Error, Loss, MicroBatcher, MicroBatches, Replicas, StepRng, World};
use tch::nn::{self, Module, ModuleT};
use tch::{Device, Kind, Tensor};

/// Returns the number of samples of each rank; if uneven, the first of several ranks has none.
fn parts(world: &World, samples: usize, uneven: bool) -> Vec<usize> {
    let ranks = world.size();
    let mut parts: Vec<usize> =
        (0..ranks).map(|rank| samples / ranks + usize::from(rank < samples % ranks)).collect();
    if uneven && ranks > 1 {
        let first = std::mem::take(&mut parts[0]);
        parts[ranks - 1] += first;
    }
    parts
}

fn rows((x, y, tokens): &Batch, start: usize, count: usize) -> Batch {
    let rows = |t: &Tensor| t.narrow(0, start as i64, count as i64);
    (rows(x), rows(y), rows(tokens))
}

fn part(world: &World, parts: &[usize], whole: &Batch) -> Batch {
    rows(whole, parts[..world.rank()].iter().sum(), parts[world.rank()])
}

/// Cuts this rank's part of a mini-batch into this many mini-batches.
fn window(world: &World, whole: &Batch, count: usize) -> Vec<Batch> {
    let samples = whole.0.size()[0] as usize;
    let own = part(world, &parts(world, samples, false), whole);
    let cut = brimful_plan::split::by_count(own.0.size()[0] as usize, count).expect("a cut");
    cut.into_iter().map(|range| rows(&own, range.start, range.len())).collect()
}

fn net(root: &nn::Path) -> Classifier {
    Classifier::after(nn::seq_t().add(batch_norm1d(root / "norm", 6, Default::default())), root)
}

fn full_batch_gradients(world: World) {
    let (plain_store, plain_net) = plain(net);
    // Ranks begin with different values, and receive the first one's.
    let (store, model) = plain(net);
    if world.rank() > 0 {
        tch::no_grad(|| store.variables().into_values().for_each(|mut v| v.copy_(&(&v * 3.0))));
    }
    for size in [MicroBatches::Samples(2), MicroBatches::Count(3), MicroBatches::Samples(1000)] {
        let mut micro = MicroBatcher::new(&store, size).join(&world).expect("one model");
        for (samples, uneven) in [(1, false), (13, false), (13, true)] {
            for Case { name, full, micro: loss } in &CASES {
                let what = format!("{name}, {samples} samples, {size:?}, uneven: {uneven}");
                let whole = batch(samples as i64);
                clear(&plain_store);
                clear(&store);
                let expected = full(&plain_net, &whole);
                expected.backward();
                let parts = parts(&world, samples, uneven);
                let own = part(&world, &parts, &whole);
                let step = micro.backward(&own, |batch| loss(&model, &batch)).expect(&what);
                assert_loss(step.loss, &expected, &what);
                assert_eq!(step.samples, samples, "{what}");
                assert_eq!(step.sizes.iter().sum::<usize>(), parts[world.rank()], "{what}");
                assert_gradients(&what, &plain_store, &store);
                let step = micro.evaluate(&own, |batch| loss(&model, &batch)).expect(&what);
                assert_loss(step.loss, &expected, &format!("{what}, evaluated"));
            }
        }
    }
}

tests! {
    one_rank_leaves_the_full_batchs_gradient => in_ranks(1, full_batch_gradients),
    two_ranks_leave_the_full_batchs_gradient => in_ranks(2, full_batch_gradients),
    four_ranks_leave_the_full_batchs_gradient => in_ranks(4, full_batch_gradients),
}

#[test]
fn steps_leave_the_plain_parameters_and_statistics() {
    in_ranks(2, |world| {
        for method in [Method::from(Sgd::new(0.1).momentum(0.9)), AdamW::new(0.01).into()] {
            let ((plain_store, plain_net), (store, model)) = (plain(net), plain(net));
            let mut micro =
                MicroBatcher::new(&store, MicroBatches::Samples(3)).join(&world).expect("one");
            let mut one = Optimizer::new(&plain_store, method).expect("an optimizer");
            let mut other = Optimizer::new(&store, method).expect("an optimizer");
            for step in 0..3 {
                let whole = batch(12 + step);
                let parts = parts(&world, 12 + step as usize, step == 1);
                (SEVERAL_WITH_A_SUM.full)(&plain_net, &whole).backward();
                // The first layer's statistics, which do not depend on the micro-batch size.
                let _training = plain_net.layers.forward_t(&whole.0, true);
                let own = part(&world, &parts, &whole);
                let run = |batch: Batch| {
                    let _training = tch::no_grad(|| model.layers.forward_t(&batch.0, true));
                    (SEVERAL_WITH_A_SUM.micro)(&model, &batch)
                };
                micro.backward(&own, run).expect("a step");
                for optimizer in [&mut one, &mut other] {
                    optimizer.clip_gradient_norm(0.5).expect("clipped");
                    optimizer.update();
                }
            }
            let others = store.variables();
            for (name, variable) in plain_store.variables() {
                let off = distance(&variable, &others[&name]);
                assert!(off < 1e-9, "{method:?}: {name} is {off} off");
            }
        }
    });
}

#[test]
fn dropout_belongs_to_step_rank_and_micro_batch() {
    in_ranks(2, |world| {
        let net = |root: &nn::Path| {
            Classifier::after(nn::seq_t().add_fn_t(|x, train| x.dropout(0.5, train)), root)
        };
        let ((plain_store, plain_net), (store, model)) = (plain(net), plain(net));
        let mut micro =
            MicroBatcher::new(&store, MicroBatches::Samples(2)).join(&world).expect("one model");
        let whole = batch(9);
        let parts = parts(&world, 9, false);
        let loss = |net: &Classifier, (x, y, _): &Batch| {
            losses(&net.layers.forward_t(x, true), y).sum(Kind::Double)
        };
        // The state of the ranks' own generators does not matter.
        tch::manual_seed(7 + world.rank() as i64);
        let own = part(&world, &parts, &whole);
        let step = micro.backward(&own, |batch| Loss::sum(loss(&model, &batch))).expect("a step");
        let seed = step.seed.expect("a world's step has one");
        let mut start = 0;
        for (rank, samples) in parts.iter().enumerate() {
            let cut = brimful_plan::split::by_size(*samples, 2).expect("a cut");
            for (i, range) in cut.into_iter().enumerate() {
                tch::manual_seed(StepRng::new(seed, i).seed(rank) as i64);
                loss(&plain_net, &rows(&whole, start + range.start, range.len())).backward();
            }
            start += samples;
        }
        assert_gradients("dropout", &plain_store, &store);
    });
}

#[test]
fn what_fails_on_one_rank_has_failed_on_all() {
    in_ranks(3, |world| {
        let (store, model) = plain(net);
        let mut micro =
            MicroBatcher::new(&store, MicroBatches::Samples(3)).join(&world).expect("one model");
        let own = part(&world, &parts(&world, 20, false), &batch(20));
        micro.backward(&own, |batch| (MEAN.micro)(&model, &batch)).expect("an earlier step");
        let before = state(&store);
        let unchanged = |what: &str| assert_same(what, &before, &state(&store));

        let is_first = world.rank() == 1;
        let error = micro.backward(&own, |batch| {
            if is_first { Err("no more") } else { Ok((MEAN.micro)(&model, &batch)) }
        });
        let error = error.expect_err("an error").to_string();
        assert!(error.contains("no more"), "{error}");
        assert!(is_first || error.contains("rank 1"), "{error}");
        unchanged("an error");

        let result = panic::catch_unwind(AssertUnwindSafe(|| {
            micro.backward(&own, |batch| {
                assert!(!is_first, "a panic of one");
                (MEAN.micro)(&model, &batch)
            })
        }));
        match result {
            Err(payload) => {
                assert!(is_first);
                assert_eq!(payload.downcast_ref::<&str>(), Some(&"a panic of one"));
            }
            Ok(ended) => {
                let error = ended.expect_err("the other's").to_string();
                assert!(error.contains("rank 1") && error.contains("a panic of one"), "{error}");
            }
        }
        unchanged("a panic");
    });
}

#[test]
fn an_automatic_size_is_agreed_and_the_smallest_memory_decides() {
    in_ranks(2, |world| {
        let mut store = nn::VarStore::new(Device::Cpu);
        let model = nn::linear(store.root() / "wide", 500, 500, Default::default());
        store.float();
        let limit = if world.rank() == 0 { 200 << 20 } else { 8 << 20 };
        let arena = Arena::limited("rank", limit).expect("a limit");
        let mut micro = MicroBatcher::new(&store, MicroBatches::Largest)
            .memory(Memory::Arena(arena.clone()))
            .join(&world)
            .expect("one model");
        let own = Tensor::ones([1500, 500], (Kind::Float, Device::Cpu));
        let run = |x: Tensor| Loss::mean(model.forward(&x).square().mean(Kind::Float));
        for _ in 0..4 {
            let step = micro.backward(&own, run).expect("it fits in parts");
            let sizes = world.share("sizes", &step.sizes).expect("shared");
            assert_eq!(sizes[0], sizes[1]);
            assert!(sizes[0][0] < 1500);
        }
        // One rank's failure shrinks the size on all.
        if world.rank() == 1 {
            arena.fail_nth_allocation(3);
        }
        let step = micro.backward(&own, run).expect("again, smaller");
        assert_eq!(step.retries, 1);
        // No rank hangs if nothing fits.
        if world.rank() == 1 {
            arena.set_limit(Some(arena.current() + 500)).expect("a limit");
        }
        let error = micro.backward(&own, run).expect_err("not even one sample fits");
        assert!(matches!(error, Error::DoesNotFit { .. }), "{error}");
    });
}

/// Sequences of these lengths.
fn sequences(lengths: &[i64]) -> Sequences {
    let row = |length: &i64| numbers_there(&[*length], *length);
    Sequences::new(&lengths.iter().map(row).collect::<Vec<_>>(), 0.0).expect("sequences")
}

/// The first rank's longest sequence is shorter than the least token count of a micro-batch over all ranks.
#[test]
fn ranks_with_unlike_sequences_give_up_at_the_same_try() {
    in_ranks(2, |world| {
        let store = nn::VarStore::new(Device::Cpu);
        let weight = store.root().ones("weight", &[]);
        let arena = Arena::new("rank");
        let mut micro = MicroBatcher::new(&store, MicroBatches::Largest)
            .memory(Memory::Arena(arena.clone()))
            .join(&world)
            .expect("one model");
        let own = sequences([[60, 50], [120, 100]][world.rank()].as_slice());
        let run = |x: Sequences| Loss::sum((&*x * &weight).square().sum(Kind::Float));
        micro.backward(&own, run).expect("a step");
        for failing in 0..2 {
            if world.rank() == failing {
                arena.set_limit(Some(arena.current() + 1)).expect("a limit");
            }
            let error = micro.backward(&own, run).expect_err("not even one sample fits");
            assert!(matches!(error, Error::DoesNotFit { .. }), "{error}");
            arena.set_limit(None).expect("no limit");
            micro.backward(&own, run).expect("the next step");
        }
    });
}

/// Fails before the ranks have exchanged anything.
#[test]
fn what_keeps_one_rank_from_a_step_is_told_to_all() {
    in_ranks(2, |world| {
        let store = nn::VarStore::new(Device::Cpu);
        let weight = store.root().ones("weight", &[]);
        let mut micro =
            MicroBatcher::new(&store, MicroBatches::Tokens(256)).join(&world).expect("one");
        let own = sequences(&[60, 120]);
        let run = |x: Sequences| Loss::sum((&*x * &weight).square().sum(Kind::Float));
        let second = world.rank() == 1;
        // The second rank has no memory to sort them.
        let arena = Arena::new("full");
        if second {
            arena.fail_from_nth_allocation(1);
        }
        let inside = arena.enter();
        let error = micro.backward(&own, run).expect_err("no memory");
        drop(inside);
        assert!(error.out_of_memory().is_some(), "{error}");
        assert_eq!(matches!(error, Error::World(WorldError::RankFailed { rank: 1, .. })), !second);
        // The second rank has uncommitted mini-batches.
        if second {
            micro.accumulate(&own, run).expect("its own part");
        }
        let error = micro.backward(&own, run).expect_err("a window is open");
        let is_own = matches!(error, Error::Step(StepError::WindowOpen { samples: 2 }));
        assert!(is_own == second && error.to_string().contains("commit"), "{error}");
        micro.commit().expect_err("the first has nothing");
        micro.backward(&own, run).expect("the next step");
    });
}

#[test]
fn ranks_with_different_models_samples_or_sizes_are_all_reported() {
    in_ranks(2, |world| {
        let differs = |error: Error, words: &str| {
            let Error::World(error @ WorldError::Differs { .. }) = error else { panic!("{error}") };
            let text = error.to_string();
            assert!(text.contains(words) && text.contains("rank 1"), "{text}");
        };
        let rank = world.rank() as i64;
        let other = nn::VarStore::new(test_device());
        let _other = nn::linear(other.root(), 2 + rank, 2, Default::default());
        let error = MicroBatcher::new(&other, MicroBatches::Samples(1))
            .join(&world)
            .expect_err("two models");
        differs(error, "the model");
        let (store, model) = plain(net);
        let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(1 + world.rank()))
            .join(&world)
            .expect("one");
        let run = |x: Tensor| Loss::mean(model.logits(&x).mean(Kind::Double));
        let error = micro.backward(&numbers_there(&[4, 6], 0), run).expect_err("two sizes");
        differs(error, "the micro-batch size");
        let mut micro =
            MicroBatcher::new(&store, MicroBatches::Samples(2)).join(&world).expect("one");
        let error = micro.backward(&numbers_there(&[4, 6 + rank], 0), run).expect_err("two shapes");
        differs(error, "a sample");
        let empty = numbers_there(&[4, 6], 0).narrow(0, 0, 0);
        let error = micro.backward(&empty, run).expect_err("no sample anywhere");
        assert_eq!(error, Error::Batch(BatchError::Empty));
        let whole =
            micro.backward_whole(&numbers_there(&[4, 6], 0), |x| x, |x| x.mean(Kind::Double));
        assert!(matches!(
            whole.expect_err("all in one"),
            Error::Step(StepError::NotOverRanks { ranks: 2 })
        ));
        micro.backward(&numbers_there(&[4, 6], 0), run).expect("the next step");
    });
}

/// Freezes the variables whose name has this prefix, or unfreezes them.
fn freeze(store: &nn::VarStore, prefix: &str, frozen: bool) {
    let variables = store.variables().into_iter().filter(|(name, _)| name.starts_with(prefix));
    variables.for_each(|(_, variable)| drop(variable.set_requires_grad(!frozen)));
}

#[test]
fn ranks_that_train_different_parameters_are_all_reported() {
    in_ranks(3, |world| {
        let (store, model) = plain(net);
        let mut micro =
            MicroBatcher::new(&store, MicroBatches::Samples(3)).join(&world).expect("one model");
        let own = part(&world, &parts(&world, 20, false), &batch(20));
        let run = |batch: Batch| (MEAN.micro)(&model, &batch);
        micro.backward(&own, run).expect("an earlier step");
        let before = state(&store);
        let mut refused = |what: &str, words: &[&str]| {
            micro.accumulate(&own, run).expect("its own part");
            for error in [micro.commit(), micro.backward(&own, run)] {
                let error = error.expect_err(what).to_string();
                assert!(words.iter().all(|word| error.contains(word)), "{what}: {error}");
                assert_same(what, &before, &state(&store));
            }
        };
        if world.rank() == 1 {
            freeze(&store, "one", true);
        }
        let words = ["must be the same on all ranks", "8 parameters", "ranks 0, 2", "6 parameters"];
        refused("fewer parameters", &words);
        freeze(&store, "one.bias", world.rank() != 1);
        freeze(&store, "one.weight", false);
        freeze(&store, "norm.bias", world.rank() == 1);
        refused("as many, but others", &["must be the same on all ranks", "7 parameters"]);
        for prefix in ["one.bias", "norm.bias"] {
            freeze(&store, prefix, true);
        }
        micro.backward(&own, run).expect("all train the same");
    });
}

#[test]
fn a_window_of_mini_batches_is_one_step_of_all_ranks() {
    in_ranks(2, |world| {
        let ((plain_store, plain_net), (store, model)) = (plain(net), plain(net));
        let mut micro =
            MicroBatcher::new(&store, MicroBatches::Samples(2)).join(&world).expect("one model");
        let whole = batch(15);
        (OVER_TOKENS.full)(&plain_net, &whole).backward();
        // One rank in two mini-batches, the other in three.
        for batch in window(&world, &whole, 2 + world.rank()) {
            micro.accumulate(&batch, |batch| (OVER_TOKENS.micro)(&model, &batch)).expect("a part");
        }
        micro.commit().expect("all parts");
        assert_gradients("a window", &plain_store, &store);
    });
}

/// Two replicas per rank: on the tested device, and on a CPU.
fn replicas(world: &World) -> Replicas<Classifier> {
    tch::manual_seed(1);
    let devices = [test_device(), Device::Cpu].map(|d| DeviceSpec::from(d).threads(1));
    let replicas = Replicas::new(devices, MicroBatches::Samples(2), net).expect("replicas");
    let mut replicas = replicas.join(world).expect("one model");
    replicas.store_mut().double();
    replicas
}

#[test]
fn a_window_of_replicas_is_one_step_of_all_ranks() {
    in_ranks(2, |world| {
        let (plain_store, plain_net) = plain(net);
        let mut replicas = replicas(&world);
        let whole = batch(15);
        (OVER_TOKENS.full)(&plain_net, &whole).backward();
        for batch in window(&world, &whole, 2) {
            let run = |net: &Classifier, batch: Batch| (OVER_TOKENS.micro)(net, &batch);
            replicas.accumulate(&batch, run).expect("a part");
        }
        replicas.commit().expect("all parts");
        assert_gradients("a window", &plain_store, replicas.store());
        assert_fails(replicas.commit(), &["accumulate"]);
    });
}

/// Uses CUDA graphs on CUDA; runs eagerly elsewhere.
#[test]
fn replayed_micro_batches_of_ranks_leave_the_full_batchs_gradient() {
    in_ranks(2, |world| {
        let ((plain_store, plain_net), (store, model)) = (plain(net), plain(net));
        let micro = MicroBatcher::new(&store, MicroBatches::Samples(4)).cuda_graphs(true);
        let mut micro = micro.join(&world).expect("one model");
        let mut replayed = 0;
        for number in 0..6 {
            let (x, y, tokens) = batch(32);
            let whole = (x + f64::from(number), y, tokens);
            clear(&plain_store);
            clear(&store);
            (OVER_TOKENS.full)(&plain_net, &whole).backward();
            let own = part(&world, &parts(&world, 32, false), &whole);
            let step = micro.backward(&own, |batch| (OVER_TOKENS.micro)(&model, &batch));
            replayed += step.expect("a step").replayed;
            assert_gradients(&format!("step {number}"), &plain_store, &store);
        }
        assert_eq!(replayed > 0, test_device() != Device::Cpu, "{replayed} were replayed");
    });
}

#[test]
fn replicas_of_several_ranks_are_one_step() {
    in_ranks(2, |world| {
        let (plain_store, plain_net) = plain(net);
        let mut replicas = replicas(&world);
        for (samples, uneven) in [(13, false), (13, true)] {
            for Case { name, full, micro } in &CASES {
                let whole = batch(samples as i64);
                clear(&plain_store);
                clear(replicas.store());
                let expected = full(&plain_net, &whole);
                expected.backward();
                let own = part(&world, &parts(&world, samples, uneven), &whole);
                let micro = *micro;
                let step = replicas.backward(&own, move |net, batch| micro(net, &batch));
                let step = step.expect(name);
                assert_loss(step.loss, &expected, name);
                assert_eq!(step.samples, samples);
                assert_gradients(name, &plain_store, replicas.store());
            }
        }
        let is_first = world.rank() == 1;
        let own = part(&world, &parts(&world, 13, false), &batch(13));
        let error = replicas.backward(&own, move |net, batch| {
            if is_first { Err("no more") } else { Ok((MEAN.micro)(net, &batch)) }
        });
        assert!(error.expect_err("an error").to_string().contains("no more"));
        replicas.backward(&own, |net, batch| (MEAN.micro)(net, &batch)).expect("the next step");
    });
}

/// If the replicas' devices differ, the gradient is first on another device than the parameter.
#[test]
fn a_parameter_that_a_later_replica_alone_reaches_gets_its_gradient() {
    in_ranks(2, |world| {
        let build = |root: &nn::Path| (root.ones("both", &[]), root.ones("later", &[]));
        let devices = [DeviceSpec::from(test_device()), DeviceSpec::cpu()];
        let devices = devices.map(|device| device.threads(1));
        let replicas = Replicas::new(devices, MicroBatches::Samples(1), build).expect("replicas");
        let mut replicas = replicas.join(&world).expect("a world");
        for step in 1..=2 {
            let x = Tensor::from_slice(&[1.0_f32, -2.0]);
            let step_done = replicas.backward(&x, |(both, later), x| {
                let reaches = x.double_value(&[0]) < 0.0;
                let value = if reaches { x * both * later } else { x * both };
                Loss::sum(value.sum(Kind::Float))
            });
            step_done.expect("a step");
            let gradient = |name: &str| replicas.store().variables()[name].grad();
            let step = f64::from(step);
            assert_eq!(gradient("both").double_value(&[]), -2.0 * step);
            assert_eq!(gradient("later").double_value(&[]), -4.0 * step);
            assert_eq!(gradient("later").device(), test_device());
        }
    });
}

/// Affects one rank only: none commits.
#[test]
fn a_sparse_gradient_of_one_rank_is_refused_by_all() {
    in_ranks(2, |world| {
        let store = nn::VarStore::new(test_device());
        let config = nn::EmbeddingConfig { sparse: world.rank() == 1, ..Default::default() };
        let table = nn::embedding(store.root() / "table", 5, 3, config);
        let linear = nn::linear(store.root() / "linear", 3, 3, Default::default());
        let mut micro =
            MicroBatcher::new(&store, MicroBatches::Samples(2)).join(&world).expect("one");
        let words = Tensor::arange(5, (Kind::Int64, Device::Cpu));
        let step = micro.backward(&words, |x| {
            Loss::mean(linear.forward(&table.forward(&x)).square().mean(Kind::Float))
        });
        assert_fails(step, &["'table.weight'", "sparse: false"]);
        assert!(store.variables().values().all(|variable| !variable.grad().defined()));
    });
}

#[test]
fn a_step_sends_what_a_sum_over_ranks_must() {
    in_ranks(4, |world| {
        let mut store = nn::VarStore::new(test_device());
        let root = store.root();
        let model = nn::seq()
            .add(nn::linear(&root / "one", 500, 2000, Default::default()))
            .add_fn(|x| x.relu())
            .add(nn::linear(&root / "two", 2000, 500, Default::default()));
        store.float();
        let mut micro =
            MicroBatcher::new(&store, MicroBatches::Samples(4)).join(&world).expect("one model");
        let own = Tensor::ones([8, 500], (Kind::Float, Device::Cpu));
        let before = world.traffic().expect("counted").sent.0;
        micro.backward(&own, |x| Loss::mean(model.forward(&x).mean(Kind::Float))).expect("a step");
        let sent = (world.traffic().expect("counted").sent.0 - before) as f64;
        let bytes: usize = store.trainable_variables().iter().map(|p| p.numel() * 4).sum();
        let least = 2.0 * 3.0 / 4.0 * bytes as f64;
        assert!((sent / least - 1.0).abs() < 0.05, "{sent} bytes were sent, {least} must be");
    });
}

/// The first rank with a sample updates them, as the first replica of a process does.
#[test]
fn statistics_that_move_at_every_micro_batch_are_the_first_ranks_on_all() {
    in_ranks(2, |world| {
        let net = |root: &nn::Path| {
            let policy = BatchNormPolicy::PerMicroBatch;
            let ours = BatchNormConfig { policy, ..Default::default() };
            let layers = nn::seq_t()
                .add(batch_norm1d(root / "ours", 6, ours))
                .add(nn::batch_norm1d(root / "theirs", 6, Default::default()));
            Classifier::after(layers, root)
        };
        let ((plain_store, plain_net), (store, model)) = (plain(net), plain(net));
        let mut micro =
            MicroBatcher::new(&store, MicroBatches::Samples(3)).join(&world).expect("one model");
        let statistics = |store: &nn::VarStore| {
            let all = state(store).into_iter().filter(|(name, _)| name.contains("running"));
            all.collect::<Vec<_>>()
        };
        for uneven in [false, true] {
            let whole = batch(12);
            let parts = parts(&world, 12, uneven);
            let before = statistics(&store);
            micro
                .backward(&part(&world, &parts, &whole), |(x, y, _)| {
                    Loss::mean(losses(&model.layers.forward_t(&x, true), &y).mean(Kind::Double))
                })
                .expect("a step");
            let first = rows(&whole, 0, if uneven { 12 } else { parts[0] });
            for start in (0..first.0.size()[0] as usize).step_by(3) {
                let _moved = plain_net.layers.forward_t(&rows(&first, start, 3).0, true);
            }
            let after = statistics(&store);
            assert_eq!(after.len(), 4);
            assert!(before.iter().zip(&after).all(|((_, a), (_, b))| a != b), "they move");
            assert_same("the first rank's", &statistics(&plain_store), &after);
        }
        let failed = micro.backward(&batch(6), |(x, _, _)| {
            Loss::mean(model.layers.forward_t(&x, true).mean(Kind::Double) / 0.0)
        });
        failed.expect_err("not finite");
        assert_same("undone", &statistics(&plain_store), &statistics(&store));
        // Statistics do not change in an evaluation, even if the ranks have different ones.
        for (_, mut running) in store.variables().into_iter().filter(|(n, _)| n.contains("running"))
        {
            let _itself = running.fill_(1.0 + world.rank() as f64);
        }
        let before = statistics(&store);
        let evaluated = micro.evaluate(&batch(6), |(x, _, _)| {
            Loss::mean(model.layers.forward_t(&x, false).mean(Kind::Double))
        });
        evaluated.expect("a loss");
        assert_same("an evaluation's", &before, &statistics(&store));
    });
}

/// Holds on every rank, and on every replica of one.
#[test]
fn convolutions_of_all_ranks_and_replicas_have_their_channels_last() {
    in_ranks(2, |world| {
        let build = |root: &nn::Path| nn::conv2d(root, 3, 4, 3, Default::default());
        let run = |conv: &nn::Conv2D, x: Tensor| {
            let last = conv.ws.stride()[1] == 1;
            if last { Ok(Loss::mean(conv.forward(&x).mean(Kind::Float))) } else { Err("not last") }
        };
        let x = numbers_there(&[4, 3, 5, 5], 0).to_kind(Kind::Float);
        let store = nn::VarStore::new(test_device());
        let conv = build(&store.root());
        let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(1))
            .memory_format(MemoryFormat::ChannelsLast)
            .join(&world)
            .expect("one model");
        micro.backward(&x, |x| run(&conv, x)).expect("channels last");
        let devices = [test_device(), Device::Cpu].map(|d| DeviceSpec::from(d).threads(1));
        let replicas = Replicas::new(devices, MicroBatches::Samples(1), build).expect("replicas");
        let mut replicas =
            replicas.memory_format(MemoryFormat::ChannelsLast).join(&world).expect("one model");
        replicas.backward(&x, run).expect("channels last");
    });
}
