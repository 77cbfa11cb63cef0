//! A CUDA graph never replaces a closure that has changed: other closures of one type, changed host numbers,
//! moved variables and effects outside the store are all detected.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0 … -- --test-threads=1` on a GPU. On a CPU everything runs eagerly and must give
//! the same results.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::support::{Named, assert_within, fill, numbers_there, test_device, variables};
use brimful::{DeviceSpec, Loss, MicroBatcher, MicroBatches, Replicas};
use brimful_torch::autograd::set_gradient;
use tch::nn::{self, Module, ModuleT};
use tch::{Device, Kind, Tensor};

fn replays() -> bool {
    test_device().is_cuda()
}

/// Two layers with fixed values.
struct TwoLayers {
    store: nn::VarStore,
    one: nn::Linear,
    two: nn::Linear,
}

impl TwoLayers {
    fn new(kind: Kind) -> Self {
        let mut store = nn::VarStore::new(test_device());
        let (one, two) = layers(&store.root());
        store.set_kind(kind);
        fill(&store);
        Self { store, one, two }
    }

    fn outputs(&self, x: &Tensor) -> Tensor {
        self.two.forward(&self.one.forward(x).tanh())
    }

    fn square(&self, x: &Tensor) -> Loss {
        Loss::mean(self.outputs(x).square().mean(x.kind()))
    }

    fn sine(&self, x: &Tensor) -> Loss {
        Loss::mean(self.outputs(x).sin().mean(x.kind()))
    }

    fn gradients(&self) -> Named {
        gradients(&self.store)
    }
}

fn layers(root: &nn::Path) -> (nn::Linear, nn::Linear) {
    let one = nn::linear(root / "one", 5, 7, Default::default());
    (one, nn::linear(root / "two", 7, 3, Default::default()))
}

/// Returns all gradients by name, and clears them.
fn gradients(store: &nn::VarStore) -> Named {
    let mut all = variables(store);
    all.retain(|(_, variable)| variable.requires_grad());
    let take = |(name, mut variable): (String, Tensor)| {
        let gradient = variable.grad();
        set_gradient(&mut variable, None).expect("none");
        (name, if gradient.defined() { gradient.copy() } else { variable.zeros_like() })
    };
    all.into_iter().map(take).collect()
}

fn assert_alike(got: &Named, expected: &Named, what: &str) {
    let part = if got[0].1.kind() == Kind::Double { 1e-11 } else { 1e-5 };
    assert_within(got, expected, part, what);
}

fn micro(net: &TwoLayers, cuda_graphs: bool) -> MicroBatcher {
    MicroBatcher::new(&net.store, MicroBatches::Samples(4)).cuda_graphs(cuda_graphs)
}

/// Runs both over the same mini-batches, and compares after each; returns the number of replayed ones.
fn side_by_side(
    steps: i64,
    kind: Kind,
    mut run: impl FnMut(&mut MicroBatcher, &TwoLayers, &Tensor, i64) -> usize,
) -> (MicroBatcher, usize) {
    let [eager, replayed] = [(); 2].map(|()| TwoLayers::new(kind));
    let (mut one, mut two, mut count) = (micro(&eager, false), micro(&replayed, true), 0);
    for step in 0..steps {
        let x = numbers_there(&[24, 5], step).to_kind(kind);
        run(&mut one, &eager, &x, step);
        count += run(&mut two, &replayed, &x, step);
        assert_alike(&replayed.gradients(), &eager.gradients(), &format!("step {step}"));
    }
    (two, count)
}

type BoxedLoss<'a> = Box<dyn FnMut(Tensor) -> Loss + 'a>;

#[test]
fn closures_behind_one_type_are_not_taken_for_each_other() {
    let (boxed, _) = side_by_side(6, Kind::Double, |micro, net, x, step| {
        let loss: BoxedLoss = match step % 2 {
            0 => Box::new(|x| net.square(&x)),
            _ => Box::new(|x| net.sine(&x)),
        };
        micro.backward(x, loss).expect("a step").replayed
    });
    let (borrowed, _) = side_by_side(6, Kind::Double, |micro, net, x, step| {
        let (mut square, mut sine) = (|x: Tensor| net.square(&x), |x: Tensor| net.sine(&x));
        let loss: &mut dyn FnMut(Tensor) -> Loss =
            if step % 2 == 0 { &mut square } else { &mut sine };
        micro.backward(x, loss).expect("a step").replayed
    });
    for micro in [boxed, borrowed] {
        let cause = micro.eager_cause().expect("it is said why they run eagerly");
        assert!(!replays() || cause.contains("dyn"), "{cause}");
    }
}

#[test]
fn pointers_to_functions_are_not_taken_for_each_other() {
    thread_local!(static NET: Cell<Option<&'static TwoLayers>> = const { Cell::new(None) });
    fn net() -> &'static TwoLayers {
        NET.get().expect("a model")
    }
    fn square(x: Tensor) -> Loss {
        net().square(&x)
    }
    fn sine(x: Tensor) -> Loss {
        net().sine(&x)
    }
    let [eager, replayed] = [(); 2].map(|()| &*Box::leak(Box::new(TwoLayers::new(Kind::Double))));
    let (mut one, mut two) = (micro(eager, false), micro(replayed, true));
    for step in 0..6 {
        let x = numbers_there(&[24, 5], step);
        let loss: fn(Tensor) -> Loss = if step % 2 == 0 { square } else { sine };
        for (micro, net) in [(&mut one, eager), (&mut two, replayed)] {
            NET.set(Some(net));
            micro.backward(&x, loss).expect("a step");
        }
        assert_alike(&replayed.gradients(), &eager.gradients(), &format!("step {step}"));
    }
    assert!(two.eager_cause().is_some());
    // Two functions passed directly have two types, and are captured.
    let mut count = 0;
    for step in 0..6 {
        let x = numbers_there(&[24, 5], step);
        for (micro, net) in [(&mut one, eager), (&mut two, replayed)] {
            NET.set(Some(net));
            let step =
                if step % 2 == 0 { micro.backward(&x, square) } else { micro.backward(&x, sine) };
            count += step.expect("a step").replayed;
        }
        assert_alike(&replayed.gradients(), &eager.gradients(), &format!("step {step}"));
    }
    assert_eq!(count > 0, replays());
}

/// Replicas of the same model, on the tested device.
fn replicated() -> Replicas<(nn::Linear, nn::Linear)> {
    let device = DeviceSpec::from(test_device());
    let mut replicas = Replicas::new([device], MicroBatches::Samples(4), layers).expect("replicas");
    replicas.store_mut().double();
    fill(replicas.store());
    replicas
}

type Layers = (nn::Linear, nn::Linear);

fn outputs((one, two): &Layers, x: &Tensor) -> Tensor {
    two.forward(&one.forward(x).tanh())
}

#[test]
fn replicas_that_alternate_two_losses_replay_each_as_itself() {
    let net = TwoLayers::new(Kind::Double);
    let (mut one, mut replicas) = (micro(&net, false), replicated().cuda_graphs(true));
    let mut count = 0;
    for step in 0..6 {
        let x = numbers_there(&[24, 5], step);
        let done = if step % 2 == 0 {
            one.backward(&x, |x| net.square(&x)).expect("a step");
            replicas.backward(&x, |model, x: Tensor| {
                Loss::mean(outputs(model, &x).square().mean(Kind::Double))
            })
        } else {
            one.backward(&x, |x| net.sine(&x)).expect("a step");
            replicas.backward(&x, |model, x: Tensor| {
                Loss::mean(outputs(model, &x).sin().mean(Kind::Double))
            })
        };
        count += done.expect("a step").replayed;
        let got = gradients(replicas.store());
        assert_alike(&got, &net.gradients(), &format!("step {step}"));
    }
    assert_eq!(count > 0, replays(), "{:?}", replicas.eager_cause());
}

#[test]
fn replicas_that_draw_on_the_host_are_not_replayed() {
    let mut replicas = replicated().cuda_graphs(true);
    for step in 0..4 {
        let done = replicas.backward(&numbers_there(&[24, 5], step), |model, x: Tensor| {
            let drawn = Tensor::rand([1], (Kind::Double, Device::Cpu)).double_value(&[0]);
            Loss::mean(outputs(model, &x).square().mean(Kind::Double)) * (1.0 + drawn)
        });
        assert_eq!(done.expect("a step").replayed, 0);
    }
    let cause = replicas.eager_cause().expect("reported").expect("a cause");
    assert!(!replays() || cause.contains("host"), "{cause}");
}

#[test]
fn a_factor_that_grows_a_little_at_every_step_is_followed() {
    for kind in [Kind::Double, Kind::Float] {
        let (micro, _) = side_by_side(40, kind, |micro, net, x, step| {
            let factor = 1.0 + 1e-4 * step as f64;
            let run = |x: Tensor| Loss::mean((net.outputs(&x) * factor).square().mean(kind));
            micro.backward(x, run).expect("a step").replayed
        });
        let cause = micro.eager_cause().expect("a cause");
        assert!(!replays() || cause.contains("aten::mul"), "{cause}");
        // As a factor of the loss, and as the denominator of a mean.
        let (micro, _) = side_by_side(40, kind, |micro, net, x, step| {
            let factor = 1.0 + 1e-4 * step as f64;
            micro.backward(x, |x: Tensor| net.square(&x) * factor).expect("a step").replayed
        });
        assert!(micro.eager_cause().is_some());
        let (micro, _) = side_by_side(40, kind, |micro, net, x, step| {
            let run = |x: Tensor| {
                let mean = net.outputs(&x).square().mean(kind);
                Loss::mean_over(mean, 100 + step) + net.sine(&x)
            };
            micro.backward(x, run).expect("a step").replayed
        });
        assert!(micro.eager_cause().is_some());
    }
}

#[test]
fn a_flag_that_changes_after_many_steps_is_found_out_and_captured_anew() {
    let kind = Kind::Double;
    let [eager, replayed] = [(); 2].map(|()| TwoLayers::new(kind));
    let (mut one, mut two) = (micro(&eager, false), micro(&replayed, true));
    let (mut wrong, mut replayed_after) = (Vec::new(), 0);
    for step in 0..700_i64 {
        let x = numbers_there(&[8, 5], step % 5);
        let changed = step >= 100;
        let run = |micro: &mut MicroBatcher, net: &TwoLayers| {
            let loss = |x: Tensor| if changed { net.sine(&x) } else { net.square(&x) };
            micro.backward(&x, loss).expect("a step").replayed
        };
        run(&mut one, &eager);
        let count = run(&mut two, &replayed);
        let (got, expected) = (replayed.gradients(), eager.gradients());
        let off = |a: &Tensor, b: &Tensor| (a - b).abs().max().double_value(&[]) > 1e-9;
        if got.iter().zip(&expected).any(|((_, a), (_, b))| off(a, b)) {
            wrong.push(step);
        }
        replayed_after += if step >= 500 { count } else { 0 };
    }
    // A wrong result persists for at most 256 steps, and the report says how many steps may be affected.
    assert!(wrong.len() < 256 && wrong.iter().all(|step| (100..356).contains(step)), "{wrong:?}");
    assert_eq!(replayed_after > 0, replays(), "{:?}", two.eager_cause());
    if let (true, Some(cause)) = (replays(), two.eager_cause()) {
        let reported = cause.split("the last ").nth(1).and_then(|rest| rest.split(' ').next());
        let reported: usize =
            reported.and_then(|number| number.parse().ok()).expect("a number of steps");
        assert!(reported >= wrong.len(), "{cause}: {wrong:?}");
    }
}

#[test]
fn long_runs_are_checked_in_fewer_than_one_percent_of_their_micro_batches() {
    let net = TwoLayers::new(Kind::Float);
    let mut micro = micro(&net, true);
    let calls = AtomicU64::new(0);
    let steps = if replays() { 2000 } else { 20 };
    let mut late = 0;
    for step in 0..steps {
        let before = calls.load(Ordering::Relaxed);
        let x = numbers_there(&[8, 5], step % 7).to_kind(Kind::Float);
        let count = |x: Tensor| {
            calls.fetch_add(1, Ordering::Relaxed);
            net.square(&x)
        };
        micro.backward(&x, count).expect("a step");
        net.gradients();
        late += if step >= steps / 2 { calls.load(Ordering::Relaxed) - before } else { 0 };
    }
    assert!(!replays() || late * 100 < 1000 * 2, "{late} of {} ran eagerly", 1000 * 2);
}

#[test]
fn effects_outside_the_store_happen_once() {
    let kind = Kind::Double;
    let config = nn::BatchNormConfig { ws_init: nn::Init::Const(1.0), ..Default::default() };
    let worlds = [(); 2].map(|()| {
        let mut other = nn::VarStore::new(test_device());
        let norm = nn::batch_norm1d(other.root(), 5, config);
        other.set_kind(kind);
        other.freeze();
        let counter = Tensor::zeros([4], (kind, test_device()));
        (TwoLayers::new(kind), other, norm, counter)
    });
    let mut micros = [micro(&worlds[0].0, false), micro(&worlds[1].0, true)];
    let mut count = 0;
    for step in 0..8 {
        let x = numbers_there(&[24, 5], step);
        for (micro, (net, _, norm, counter)) in micros.iter_mut().zip(&worlds) {
            let run = |x: Tensor| {
                let mut place = counter.narrow(0, 1, 2);
                let _ = tch::no_grad(|| place.g_add_scalar_(1.0));
                net.square(&norm.forward_t(&x, true))
            };
            count += micro.backward(&x, run).expect("a step").replayed;
        }
        let [(a, other_a, _, counter_a), (b, other_b, _, counter_b)] = &worlds;
        assert_alike(&b.gradients(), &a.gradients(), &format!("step {step}"));
        assert_eq!(counter_a, counter_b, "step {step}");
        for (name, expected) in other_a.variables() {
            let off = (&other_b.variables()[&name] - expected).abs().max().double_value(&[]);
            assert!(off < 1e-12, "step {step}: {name} is off by {off}");
        }
    }
    assert_eq!(count > 0, replays(), "{:?}", micros[1].eager_cause());
}

#[test]
fn a_frozen_weight_or_a_statistic_that_moves_is_noticed() {
    let kind = Kind::Double;
    let pairs = [(); 2].map(|()| {
        let net = TwoLayers::new(kind);
        let scale = net.store.root().ones_no_train("scale", &[5]).to_kind(kind);
        let mut held = net.store.root().ones_no_train("held", &[5]);
        held.set_data(&scale);
        (net, held)
    });
    let mut micros = [micro(&pairs[0].0, false), micro(&pairs[1].0, true)];
    let mut count = 0;
    for step in 0..12 {
        let x = numbers_there(&[24, 5], step);
        for (micro, (net, held)) in micros.iter_mut().zip(&pairs) {
            if step % 4 == 3 {
                // Moves the variable to other memory; its old memory is reused.
                held.shallow_clone().set_data(&(held.detach() * 2.0));
                let _noise: Vec<Tensor> = (0..64).map(|i| numbers_there(&[5], i)).collect();
            }
            count +=
                micro.backward(&x, |x: Tensor| net.square(&(x * held))).expect("a step").replayed;
        }
        assert_alike(&pairs[1].0.gradients(), &pairs[0].0.gradients(), &format!("step {step}"));
    }
    assert_eq!(count > 0, replays(), "{:?}", micros[1].eager_cause());
}

#[test]
fn a_tensor_of_the_closures_that_is_replaced_is_noticed_at_once() {
    // In a step without a check, once early and once after many steps.
    for (steps, at) in [(12, 7), (120, 80)] {
        let (mut mask, mut noise) = (numbers_there(&[5], 3), Vec::new());
        let mut late = 0;
        let (micro, count) = side_by_side(steps, Kind::Double, |micro, net, x, step| {
            if step == at && noise.is_empty() {
                mask = &mask * -2.0;
                noise.extend((0..64).map(|i| numbers_there(&[5], i)));
            }
            let count = micro.backward(x, |x: Tensor| net.square(&(x * &mask))).expect("a step");
            late += if step > at { count.replayed } else { 0 };
            count.replayed
        });
        assert_eq!(count > 0, replays());
        assert_eq!(late > 0, replays() && at == 80, "{:?}", micro.eager_cause());
    }
}

#[test]
fn a_backward_that_reaches_another_store_is_not_captured() {
    let kind = Kind::Double;
    let [one, two] = [(); 2].map(|()| (TwoLayers::new(kind), TwoLayers::new(kind)));
    let mut micros = [micro(&one.0, false), micro(&two.0, true)];
    for step in 0..5 {
        let x = numbers_there(&[24, 5], step);
        for (micro, (net, critic)) in micros.iter_mut().zip([&one, &two]) {
            let run = |x: Tensor| {
                let seen =
                    critic.one.forward(&(net.outputs(&x).matmul(&numbers_there(&[3, 5], 1))));
                Loss::mean(seen.square().mean(kind))
            };
            micro.backward(&x, run).expect("a step");
        }
        assert_alike(&two.0.gradients(), &one.0.gradients(), &format!("step {step}"));
        assert_alike(&two.1.gradients(), &one.1.gradients(), &format!("critic, step {step}"));
    }
    let cause = micros[1].eager_cause().expect("a cause");
    assert!(!replays() || cause.contains("no parameter of the store"), "{cause}");
}

#[test]
fn a_closure_that_changes_the_copy_it_gets_is_replayed() {
    let mut count = 0;
    side_by_side(6, Kind::Double, |micro, net, x, _| {
        // From the host, so that each micro-batch is a copy.
        let x = x.to_device(Device::Cpu);
        let run = |mut x: Tensor| {
            // On a CPU it is not a copy.
            let x = if replays() { x.g_div_scalar_(255.0) } else { x / 255.0 };
            net.square(&x)
        };
        let replayed = micro.backward(&x, run).expect("a step").replayed;
        count += replayed;
        replayed
    });
    assert_eq!(count > 0, replays());
}

#[test]
fn replicas_with_an_automatic_size_learn_what_replayed_work_needs() {
    if !replays() {
        return;
    }
    let wide = |root: &nn::Path| {
        let one = nn::linear(root / "one", 64, 4096, Default::default());
        (one, nn::linear(root / "two", 4096, 64, Default::default()))
    };
    let device = || [DeviceSpec::from(test_device())];
    let mut needs = Vec::new();
    for cuda_graphs in [false, true] {
        let replicas = Replicas::new(device(), MicroBatches::Largest, wide).expect("replicas");
        let mut replicas = replicas.cuda_graphs(cuda_graphs);
        let x = Tensor::randn([4096, 64], (Kind::Float, Device::Cpu));
        let mut last = None;
        for _ in 0..16 {
            let step = replicas.backward(&x, |(one, two): &Layers, x: Tensor| {
                let hidden = one.forward(&x).tanh().exp().sin().cos();
                Loss::mean(two.forward(&hidden).square().mean(Kind::Float))
            });
            let step = step.expect("a step");
            let decision = step.decisions.last().expect("a decision");
            if cuda_graphs == (step.replayed > 0) {
                last = decision.measured.map(|need| (decision.size, need.0, step.replayed));
            }
        }
        needs.push(last.expect("a measured need"));
    }
    let ((size, eager, _), (same, replayed, count)) = (needs[0], needs[1]);
    assert_eq!(size, same);
    let share = replayed as f64 / eager as f64;
    assert!(count > 0 && (0.8..1.3).contains(&share), "{needs:?}");
}

#[test]
fn options_that_are_loaded_count_in_replayed_steps_of_an_optimizer() {
    use brimful::optim::{Optimizer, Sgd};
    let file = tempfile::NamedTempFile::new().expect("a file");
    let saved = TwoLayers::new(Kind::Double);
    let decaying = Sgd::new(0.1).weight_decay(0.5);
    let optimizer = Optimizer::new(&saved.store, decaying).expect("an optimizer");
    optimizer.save(file.path()).expect("saved");
    let weights = [false, true].map(|cuda_graphs| {
        let net = TwoLayers::new(Kind::Double);
        let optimizer = Optimizer::new(&net.store, Sgd::new(0.1)).expect("an optimizer");
        let mut optimizer = optimizer.cuda_graphs(cuda_graphs);
        let kept: Vec<_> = net.store.trainable_variables();
        for mut variable in kept {
            let gradient = numbers_there(&variable.size(), 9);
            set_gradient(&mut variable, Some(&gradient)).expect("a gradient");
        }
        for step in 0..12 {
            if step == 8 {
                optimizer.load(file.path()).expect("loaded");
            }
            optimizer.step().expect("a step");
        }
        assert_eq!(optimizer.replayed() > 0, cuda_graphs && replays());
        net.store.variables()["one.weight"].copy()
    });
    let off = (&weights[0] - &weights[1]).abs().max().double_value(&[]);
    assert!(off < 1e-6, "off by {off}");
}

#[test]
fn a_tensor_that_is_another_one_at_every_step_is_caught_in_the_next() {
    let factors: Vec<Tensor> = (0..20)
        .map(|i| Tensor::full([1], 1.0 + 1e-4 * f64::from(i), (Kind::Float, test_device())))
        .collect();
    let (micro, _) = side_by_side(20, Kind::Float, |micro, net, x, step| {
        let run = |x: Tensor| {
            Loss::mean((net.outputs(&x) * &factors[step as usize]).square().mean(Kind::Float))
        };
        micro.backward(x, run).expect("a step").replayed
    });
    let cause = micro.eager_cause().expect("a cause");
    assert!(!replays() || cause.contains("another tensor"), "{cause}");
}

#[test]
fn threads_that_draw_on_the_host_are_left_alone() {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    if !replays() {
        return;
    }
    let over = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&over);
    tch::manual_seed(1);
    // Numbers drawn in sequence never repeat.
    let loader = std::thread::spawn(move || {
        let mut drawn = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let number = Tensor::rand([1], (Kind::Double, Device::Cpu)).double_value(&[0]);
            drawn.push(number.to_bits());
        }
        let count = drawn.len();
        drawn.sort_unstable();
        drawn.dedup();
        (count, drawn.len())
    });
    let net = TwoLayers::new(Kind::Double);
    let mut micro = micro(&net, true);
    for step in 0..40 {
        micro.backward(&numbers_there(&[24, 5], step), |x| net.square(&x)).expect("a step");
        net.gradients();
    }
    over.store(true, Ordering::Relaxed);
    let (count, distinct) = loader.join().expect("drawn");
    assert_eq!(micro.eager_cause(), None);
    assert_eq!(count, distinct);
}
