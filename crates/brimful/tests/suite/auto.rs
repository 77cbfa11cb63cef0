//! Automatic sizes: they find a size that fits, recover from out of memory, and do not change the step.

use std::cell::Cell;

use crate::support::state::{Net, samples, state};
use crate::support::{assert_fails, assert_same, logged, test_device};
use brimful::auto::Why;
use brimful::memory::{Arena, Memory};
use brimful::optim::{Adam, Optimizer};
use brimful::{Error, Loss, MicroBatcher, MicroBatches, StepReport};
use tch::nn::{self, Module, ModuleT};
use tch::{Device, Kind, Tensor};

const SAMPLES: i64 = 24;

fn batch() -> Tensor {
    samples(SAMPLES)
}

fn limited(name: &str, bytes: u64) -> Memory {
    Memory::Arena(Arena::limited(name, bytes).expect("a limit"))
}

fn arena_of(memory: &str) -> (Arena, Memory) {
    let arena = Arena::new(memory);
    (arena.clone(), Memory::Arena(arena))
}

/// Returns a `MicroBatcher` that runs two micro-batches per step because memory ran out once.
fn settled(net: &Net, arena: &Arena) -> MicroBatcher {
    let mut micro =
        MicroBatcher::new(&net.store, MicroBatches::Largest).memory(Memory::Arena(arena.clone()));
    let mut step = || micro.backward(&batch(), |x| net.loss(&x)).expect("a step").sizes;
    assert_eq!([step(), step()].last(), Some(&vec![24]));
    arena.fail_nth_allocation(20);
    assert_eq!([step(), step()], [[12, 12], [12, 12]]);
    micro
}

#[test]
fn the_n_th_allocation_fails_once_and_the_step_is_the_undisturbed_one() {
    let (arena, _) = arena_of("faulty");
    let mut sizes = Vec::new();
    for n in 1.. {
        let net = Net::with_dropout();
        let mut micro = settled(&net, &arena);
        let before = net.snapshot();
        arena.fail_nth_allocation(n);
        let step = micro.backward(&batch(), |x| net.loss(&x)).expect("it fails once");
        arena.fail_nth_allocation(0);
        let after = state(&net.store);

        net.restore(&before);
        let size = *step.sizes.first().expect("a micro-batch");
        let mut plain = MicroBatcher::new(&net.store, MicroBatches::Samples(size));
        let expected = plain.backward(&batch(), |x| net.loss(&x)).expect("an undisturbed step");
        assert_eq!((expected.loss, &expected.sizes), (step.loss, &step.sizes), "allocation {n}");
        assert_same(&format!("allocation {n}"), &state(&net.store), &after);
        if step.retries == 0 {
            break;
        }
        assert_eq!(step.retries, 1, "allocation {n}");
        sizes.push(size);
    }
    assert!(sizes.len() > 100, "only {} allocations", sizes.len());
}

#[test]
fn when_all_allocations_fail_from_the_n_th_on_nothing_has_changed() {
    let (arena, _) = arena_of("full");
    for n in 1.. {
        let net = Net::with_dropout();
        let mut micro = settled(&net, &arena);
        let before = state(&net.store);
        arena.fail_from_nth_allocation(n);
        let result = micro.backward(&batch(), |x| net.loss(&x));
        arena.fail_nth_allocation(0);
        match result {
            Err(Error::DoesNotFit { .. }) => {
                assert_same(&format!("allocation {n}"), &before, &state(&net.store));
            }
            Err(other) => panic!("allocation {n}: {other}"),
            Ok(_) => {
                assert!(n > 100, "only {n} allocations");
                break;
            }
        }
        micro.backward(&batch(), |x| net.loss(&x)).expect("the next step");
    }
}

#[test]
fn an_optimizer_step_that_runs_out_of_memory_is_taken_once_or_not_at_all() {
    let (arena, memory) = arena_of("faulty");
    let prepared = || {
        let net = Net::plain();
        let mut micro =
            MicroBatcher::new(&net.store, MicroBatches::Samples(8)).memory(memory.clone());
        micro.backward(&batch(), |x| net.loss(&x)).expect("a step");
        let optimizer = Optimizer::new(&net.store, Adam::new(0.1)).expect("an optimizer");
        (net, micro, optimizer)
    };
    let expected = {
        let (net, micro, mut optimizer) = prepared();
        micro.retry_on_oom(|| optimizer.step()).expect("an update");
        state(&net.store)
    };
    for n in 1.. {
        let (net, micro, mut optimizer) = prepared();
        let before = (state(&net.store), arena.refusals());
        arena.fail_nth_allocation(n);
        micro.retry_on_oom(|| optimizer.step()).expect("once is survived");
        arena.fail_nth_allocation(0);
        assert_same(&format!("allocation {n}"), &expected, &state(&net.store));
        if arena.refusals() == before.1 {
            break;
        }
        let (net, micro, mut optimizer) = prepared();
        arena.fail_from_nth_allocation(n);
        let error = micro.retry_on_oom(|| optimizer.step()).expect_err("all of them fail");
        arena.fail_nth_allocation(0);
        assert!(matches!(error, Error::OutOfMemory(_)), "{error}");
        assert_same(&format!("from allocation {n}"), &before.0, &state(&net.store));
        micro.retry_on_oom(|| optimizer.step()).expect("the next try");
        assert_same(&format!("after allocation {n}"), &expected, &state(&net.store));
    }
}

/// Error with another one as its source.
#[derive(Debug, thiserror::Error)]
#[error("in the middle of it")]
struct Around(#[source] Error);

#[test]
fn running_out_is_known_under_whatever_is_said_around_it() {
    let net = Net::plain();
    let (arena, memory) = arena_of("faulty");
    let mut micro = MicroBatcher::new(&net.store, MicroBatches::Largest).memory(memory.clone());
    let armed = Cell::new(false);
    let forward = |x: &Tensor| -> Result<Loss, Around> {
        if armed.replace(false) {
            arena.fail_nth_allocation(1);
        }
        let held = Tensor::f_zeros([64], (Kind::Float, Device::Cpu));
        let _held = held.map_err(|error| Around(error.into()))?;
        Ok(net.loss(x))
    };
    micro.backward(&batch(), |x| forward(&x)).expect("a step");
    let log = logged(|| {
        armed.set(true);
        let step = micro.backward(&batch(), |x| forward(&x)).expect("it is run again");
        assert_eq!(step.retries, 1);
        armed.set(true);
        let held = || forward(&batch()).map(drop);
        brimful::retry_on_oom(&memory, held).expect("it is tried again");
        // Fails before the closure is called.
        arena.fail_nth_allocation(1);
        let step = micro.backward(&batch(), |x| forward(&x)).expect("it is run again");
        assert_eq!(step.retries, 1);
    });
    for words in ["free): the mini-batch is run again", "outside a step", "before the first"] {
        assert_eq!(log.matches(words).count(), 1, "{words}: {log}");
    }
}

/// Two samples take nearly all of a small memory, but most of that may be independent of the samples.
#[test]
fn what_every_size_needs_is_not_taken_for_the_samples() {
    // If all of it belonged to the samples, only two would fit. The search for the fastest size beyond that
    // depends on timing.
    for (size, most) in [(MicroBatches::Auto, 2), (MicroBatches::Largest, 8)] {
        let mut store = nn::VarStore::new(Device::Cpu);
        let layer = nn::linear(store.root(), 16, 4, Default::default());
        store.set_kind(Kind::Double);
        let mut micro = MicroBatcher::new(&store, size).memory(limited("tight", 5 << 20));
        let batch = Tensor::ones([600, 16], (Kind::Double, Device::Cpu));
        let mut step = || {
            micro.backward(&batch, |x| {
                // Four MiB for any number of samples, and 16 KiB for each.
                let fixed = Tensor::empty([4 << 20], (Kind::Uint8, Device::Cpu));
                let own = Tensor::empty([x.size()[0] << 14], (Kind::Uint8, Device::Cpu));
                drop((fixed, own));
                Loss::mean(layer.forward(&x).square().mean(Kind::Double))
            })
        };
        let steps = (0..6).map(|_| step().expect("a step"));
        let decisions: Vec<_> = steps.flat_map(|step| step.decisions).collect();
        let largest = decisions.iter().map(|decision| decision.size).max();
        assert!(largest > Some(most), "{size:?}: {decisions:?}");
    }
}

#[test]
fn a_guarded_closure_keeps_its_own_errors() {
    let (_, memory) = arena_of("cpu");
    let error = brimful::retry_on_oom(&memory, || Err::<(), _>("my own")).expect_err("its error");
    assert_eq!(error.to_string(), "my own");
}

#[test]
fn an_evaluation_that_runs_out_of_memory_counts_every_sample_once() {
    let (arena, memory) = arena_of("faulty");
    let evaluate = |micro: &mut MicroBatcher, net: &Net| {
        let forward = |x: Tensor| {
            let out = net.layers.forward_t(&x, false);
            (Loss::mean(out.square().mean(Kind::Double)), out)
        };
        micro.evaluate(&batch(), forward).expect("it fails once")
    };
    let net = Net::with_dropout();
    let expected = evaluate(&mut MicroBatcher::new(&net.store, MicroBatches::Count(1)), &net);
    let before = state(&net.store);
    for n in 1.. {
        let mut micro = MicroBatcher::new(&net.store, MicroBatches::Auto).memory(memory.clone());
        arena.fail_nth_allocation(n);
        let step = evaluate(&mut micro, &net);
        arena.fail_nth_allocation(0);
        assert!((step.loss - expected.loss).abs() < 1e-12, "{} {}", step.loss, expected.loss);
        let difference = (&step.outputs - &expected.outputs).abs().max().double_value(&[]);
        assert!(difference < 1e-12, "{difference}");
        assert_eq!(step.samples as i64, SAMPLES);
        assert_same(&format!("allocation {n}"), &before, &state(&net.store));
        if step.retries == 0 {
            assert!(n > 20, "only {n} allocations");
            break;
        }
    }
}

#[test]
fn a_mapping_and_a_whole_loss_survive_too() {
    let (arena, memory) = arena_of("faulty");
    let net = Net::plain();
    let whole = net.layers.forward_t(&batch(), false);
    for n in [1, 5, 20] {
        let mut micro = MicroBatcher::new(&net.store, MicroBatches::Auto).memory(memory.clone());
        arena.fail_nth_allocation(n);
        let mapped = micro.map(&batch(), |x| net.layers.forward_t(&x, false)).expect("a mapping");
        assert!((mapped - &whole).abs().max().double_value(&[]) < 1e-12);
        arena.fail_nth_allocation(n);
        let forward = |x: Tensor| net.layers.forward_t(&x, true);
        let step = micro.backward_whole(&batch(), forward, |z| z.square().mean(Kind::Double));
        let step = step.expect("a whole loss");
        assert_eq!((step.retries, step.samples as i64), (1, SAMPLES));
        arena.fail_nth_allocation(0);
    }
}

/// Model whose memory is mostly its micro-batches' activations.
struct Wide {
    store: nn::VarStore,
    layers: nn::SequentialT,
}

impl Wide {
    fn new() -> Self {
        tch::manual_seed(3);
        let store = nn::VarStore::new(Device::Cpu);
        let root = store.root();
        let layers = nn::seq_t()
            .add(nn::linear(&root / "in", 64, 256, Default::default()))
            .add_fn(|x| x.relu())
            .add(nn::linear(&root / "out", 256, 8, Default::default()));
        Self { store, layers }
    }

    fn step(&self, micro: &mut MicroBatcher, samples: i64) -> brimful::Result<StepReport> {
        let batch = Tensor::ones([samples, 64], (Kind::Float, Device::Cpu));
        micro.backward(&batch, |x| {
            Loss::mean(self.layers.forward_t(&x, true).square().mean(Kind::Float))
        })
    }
}

#[test]
fn the_largest_size_is_found_with_at_most_one_failure() {
    for limit in [300 << 10, 1 << 20, 5 << 20] {
        // Larger sizes need more memory.
        let sizes: Vec<usize> = (1..=2000).collect();
        let fits = |&size: &usize| {
            let wide = Wide::new();
            let mut micro = MicroBatcher::new(&wide.store, MicroBatches::Samples(size))
                .memory(limited("given", limit));
            (0..2).all(|_| wide.step(&mut micro, 4 * size as i64).is_ok())
        };
        let feasible = sizes.partition_point(fits);
        assert!(feasible > 0, "{limit}: one sample fits");
        let larger = sizes[feasible..].iter().step_by(61).find(|size| fits(size));
        assert_eq!(larger, None, "{limit}: {feasible} is not the largest");
        let wide = Wide::new();
        let mut micro =
            MicroBatcher::new(&wide.store, MicroBatches::Largest).memory(limited("auto", limit));
        let steps: Vec<StepReport> =
            (0..4).map(|_| wide.step(&mut micro, 8000).expect("a step")).collect();
        let found = steps.last().and_then(|step| step.decisions.last()).expect("a size").size;
        let failed: usize = steps.iter().map(|step| step.retries).sum();
        assert!(found * 100 >= feasible * 95, "{limit}: {found} of {feasible}");
        assert!(failed <= 1, "{limit}: {failed} failed");
    }
}

#[test]
fn the_size_follows_a_limit_that_is_lowered_and_raised_with_a_log_line_each_time() {
    let wide = Wide::new();
    let arena = Arena::limited("shared", 2 << 20).expect("a limit");
    let mut micro =
        MicroBatcher::new(&wide.store, MicroBatches::Largest).memory(Memory::Arena(arena.clone()));
    (0..3).for_each(|_| drop(wide.step(&mut micro, 4000).expect("a step")));
    let mut size_and_log = || {
        let mut step = None;
        let log = logged(|| step = Some(wide.step(&mut micro, 4000).expect("a step")));
        let step = step.expect("it ran");
        (step.decisions[0].size, step.decisions[0].why, log)
    };
    let (full, _, _) = size_and_log();
    let other = {
        let _inside = arena.enter();
        Tensor::zeros([300_000], (Kind::Float, Device::Cpu))
    };
    let (less, why, log) = size_and_log();
    assert!(less < full && why == Why::LessMemory, "{less} of {full}: {why}");
    assert!(log.contains("INFO") && log.contains("less memory"), "{log}");
    drop(other);
    let (again, why, log) = size_and_log();
    assert!(again > less && why == Why::MoreMemory, "{again} after {less}: {why}");
    assert!(log.contains("more memory"), "{log}");
    let (_, _, log) = size_and_log();
    assert!(!log.contains("INFO"), "a calm step is silent: {log}");
}

#[test]
fn a_new_shape_is_predicted_from_the_known_ones() {
    tch::manual_seed(4);
    let store = nn::VarStore::new(Device::Cpu);
    let conv = nn::conv1d(store.root(), 3, 16, 3, Default::default());
    let mut micro =
        MicroBatcher::new(&store, MicroBatches::Largest).memory(limited("small", 4 << 20));
    let mut step = |length: i64| {
        let batch = Tensor::ones([3000, 3, length], (Kind::Float, Device::Cpu));
        let run = |x: Tensor| Loss::mean(conv.forward(&x).relu().square().mean(Kind::Float));
        micro.backward(&batch, run).expect("a step")
    };
    (0..3).for_each(|_| drop(step(64)));
    let longer = step(128);
    assert_eq!((longer.decisions[0].why, longer.retries), (Why::Predicted, 0));
    let (short, long) = (step(64).decisions[0].size, step(128).decisions[0].size);
    assert!(short > long * 17 / 10 && short < long * 23 / 10, "{short} and {long}");
}

#[test]
fn a_limit_that_one_sample_exceeds_ends_with_the_numbers() {
    let wide = Wide::new();
    for (limit, tried) in [(100, "before the first one was run"), (80 << 10, "tried 2 and 1")] {
        let mut micro =
            MicroBatcher::new(&wide.store, MicroBatches::Auto).memory(limited("tiny", limit));
        let parts = [tried, " free; recompute", "out of memory in arena 'tiny'"];
        assert_fails(wide.step(&mut micro, 100), &parts);
        assert!(wide.store.trainable_variables().iter().all(|v| !v.grad().defined()));
    }
}

#[test]
fn without_a_limit_the_machine_s_memory_is_the_budget() {
    let wide = Wide::new();
    let mut micro = MicroBatcher::new(&wide.store, MicroBatches::Largest);
    let steps: Vec<_> = (0..3).map(|_| wide.step(&mut micro, 500).expect("a step")).collect();
    let last = steps.last().expect("a step");
    assert_eq!((last.sizes.as_slice(), last.retries), ([500].as_slice(), 0));
    let host = brimful::internal::devices().expect("the machine's memory")[0].total;
    assert!(last.decisions[0].available <= host);
}

#[test]
fn files_that_are_not_remembered_sizes_are_warned_of_and_left_as_they_are() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("sizes.json");
    for foreign in ["{\"format\": \"something else\", \"sizes\": []}", "not even {", "[]"] {
        std::fs::write(&path, foreign).expect("written");
        let log = logged(|| {
            let wide = Wide::new();
            let micro = MicroBatcher::new(&wide.store, MicroBatches::Largest);
            let mut micro = micro.memory(limited("cpu", 1 << 20)).remember(&path);
            let step = wide.step(&mut micro, 4000).expect("a step");
            assert_eq!(step.decisions[0].why, Why::Probe);
        });
        assert!(log.contains("WARN") && log.contains("are not used"), "{log}");
        assert_eq!(std::fs::read_to_string(&path).expect("read"), foreign, "it is left as it is");
    }
}

/// Batch normalisation of two samples differs from that of many.
#[test]
fn a_few_samples_are_not_trained_with_for_the_sake_of_learning() {
    let memory = limited("small", 64 << 20);
    let mut store = nn::VarStore::new(Device::Cpu);
    let layer = nn::linear(store.root(), 16, 4, Default::default());
    store.set_kind(Kind::Double);
    let batch = Tensor::arange(600 * 16, (Kind::Double, Device::Cpu)).sin().view([600, 16]);
    let normalised = |x: &Tensor| {
        let y = layer.forward(x);
        let y = (&y - y.mean_dim(0, true, None)) / (y.var_dim(0, false, true) + 1e-5).sqrt();
        (y - 1.0).pow_tensor_scalar(4).mean(None)
    };
    for size in [MicroBatches::Auto, MicroBatches::Largest] {
        let mut ran = 0;
        let mut micro = MicroBatcher::new(&store, size).memory(memory.clone());
        let step = micro.backward(&batch, |x| {
            ran += x.size()[0];
            let _held = Tensor::empty([x.size()[0] << 18], (Kind::Uint8, Device::Cpu));
            Loss::mean(normalised(&x))
        });
        let StepReport { sizes, retries, .. } = step.expect("a step");
        assert_eq!((sizes.iter().sum::<usize>(), retries), (600, 0));
        assert!(sizes.iter().all(|&size| size >= 8), "{sizes:?}");
        assert!((604..630).contains(&ran), "{ran}");
        let got = layer.ws.grad().copy();

        store.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
        let mut start = 0;
        for size in sizes {
            let (rows, share) = (batch.narrow(0, start, size as i64), size as f64 / 600.0);
            (normalised(&rows) * share).backward();
            start += size as i64;
        }
        let error = (layer.ws.grad() - got).abs().max().double_value(&[]);
        assert!(error < 1e-12, "{error}");
        store.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
    }
}

/// Memory use that no linear model predicts, on the CPU or on the device named by the environment.
#[test]
fn a_surprising_need_is_survived_on_any_device() {
    let device = test_device();
    let room = 2 << 30;
    let memory = match device {
        Device::Cpu => limited("small", room),
        device => Memory::Accelerator(device),
    };
    // Leaves the same free memory on any device, as on a GPU that others have nearly filled.
    let free = memory.usage().expect("figures").available.expect("a limit").0;
    let options = (Kind::Uint8, device);
    let ballast = Tensor::empty([free.saturating_sub(room) as i64], options);
    let mut store = nn::VarStore::new(device);
    tch::manual_seed(5);
    let layer = nn::linear(store.root(), 16, 4, Default::default());
    store.set_kind(Kind::Double);
    let batch = Tensor::arange(600 * 16, (Kind::Double, Device::Cpu)).sin().view([600, 16]);
    let run = |size: MicroBatches| {
        let mut micro = MicroBatcher::new(&store, size).memory(memory.clone());
        store.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
        let mut retries = 0;
        let mut losses = Vec::new();
        for _ in 0..3 {
            let step = micro.backward(&batch, |x| {
                let rows = x.size()[0];
                let surprise = if rows > 200 { rows << 23 } else { rows << 10 };
                let _held = Tensor::empty([surprise], (Kind::Uint8, device));
                Loss::mean(layer.forward(&x).square().mean(Kind::Double))
            });
            let step = step.expect("it is survived");
            retries += step.retries;
            losses.push(step.loss);
        }
        let gradient = layer.ws.grad().to_device(Device::Cpu);
        (gradient, losses, retries)
    };
    let (expected, losses, _) = run(MicroBatches::Samples(50));
    let (got, losses_too, retries) = run(MicroBatches::Largest);
    assert!((1..=2).contains(&retries), "{retries}");
    assert!((expected - got).abs().max().double_value(&[]) < 1e-12);
    for (one, other) in losses.iter().zip(&losses_too) {
        assert!((one - other).abs() < 1e-12);
    }
    drop(ballast);
}
