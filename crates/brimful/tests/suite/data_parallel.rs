//! Ranks that each run their part of a mini-batch give the plain model's results on all of it.

use crate::support::full_batch::{
    Batch, Classifier, MEAN, OVER_TOKENS, SEVERAL_WITH_A_SUM, assert_gradients, assert_loss, batch,
    losses, plain,
};
use crate::support::ranks::in_ranks;
use crate::support::state::state;
use crate::support::{assert_fails, assert_same, clear, numbers_there, test_device};
use brimful::StepError;
use brimful::batch::{BatchError, Sequences};
use brimful::memory::{Arena, Memory};
use brimful::micro::MemoryFormat;
use brimful::nn::{BatchNormConfig, BatchNormPolicy, batch_norm1d};
use brimful::world::WorldError;
use brimful::{DeviceSpec, Error, Loss, MicroBatcher, MicroBatches, Replicas, World};
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

#[test]
fn ranks_with_unlike_first_values_of_which_one_has_no_sample_leave_the_full_batchs_gradient() {
    in_ranks(4, |world| {
        let ((plain_store, plain_net), (store, model)) = (plain(net), plain(net));
        // Ranks receive the first one's values.
        let factor = 1.0 + world.rank() as f64;
        tch::no_grad(|| store.variables().into_values().for_each(|mut v| v.copy_(&(&v * factor))));
        let mut micro =
            MicroBatcher::new(&store, MicroBatches::Samples(2)).join(&world).expect("one model");
        let whole = batch(13);
        let expected = (SEVERAL_WITH_A_SUM.full)(&plain_net, &whole);
        expected.backward();
        let own = part(&world, &parts(&world, 13, true), &whole);
        let run = |batch: Batch| (SEVERAL_WITH_A_SUM.micro)(&model, &batch);
        let step = micro.backward(&own, run).expect("a step");
        assert_loss(step.loss, &expected, "four ranks");
        assert_gradients("four ranks", &plain_store, &store);
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
