//! A panic, error or out-of-memory in any stage at any action ends the step with an error that names the
//! location. Nothing is left behind, no thread hangs, and the next step is unaffected.

use std::panic;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use std::thread;

use crate::support::{Named, Watchdog, assert_close, assert_threads, copies, threads};
use brimful::loss::LossError;
use brimful::memory::Arena;
use brimful::nn::batch_norm1d;
use brimful::pipeline::PipelineError;
use brimful::schedule::{Action, ActionKind, Recompute, Schedule};
use brimful::{DeviceSpec, Error, Layers, Loss, MicroBatches, Pipeline, is_recomputing};
use tch::nn;
use tch::{Device, Kind, Tensor};

const STAGES: usize = 3;
const MICRO_BATCHES: usize = 4;

/// Fault of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Panic,
    /// libtorch refuses the forward.
    Refused,
    /// libtorch refuses the backward of this forward.
    RefusedInBackward,
}

/// Planned fault: its stage, whether it is in a recompute, and the number of calls before it.
static FAULT: Mutex<Option<(usize, bool, usize, Fault)>> = Mutex::new(None);

/// Keeps the workers' hundreds of panics off standard error.
fn quiet_workers() {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let shown = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let current = thread::current();
            if !current.name().is_some_and(|name| name.starts_with("brimful ")) {
                shown(info);
            }
        }));
    });
}

fn plan_fault(fault: Option<(usize, bool, usize, Fault)>) {
    *FAULT.lock().unwrap_or_else(PoisonError::into_inner) = fault;
}

/// Returns the fault if this call is the one that fails.
fn due(stage: usize) -> Option<Fault> {
    let mut planned = FAULT.lock().unwrap_or_else(PoisonError::into_inner);
    let (_, _, left, fault) =
        planned.as_mut().filter(|(at, again, ..)| *at == stage && *again == is_recomputing())?;
    let fault = *fault;
    if *left == 0 {
        *planned = None;
        return Some(fault);
    }
    *left -= 1;
    None
}

fn faulty(stage: usize) -> impl Fn(&Tensor) -> Tensor + Send + Sync {
    move |x| match due(stage) {
        None => x * 1.0,
        Some(Fault::Panic) => panic!("the layer of stage {stage} gives up"),
        Some(Fault::Refused) => x.matmul(&Tensor::zeros([17, 17], (Kind::Double, Device::Cpu))),
        Some(Fault::RefusedInBackward) => {
            let y = x.exp();
            let z = &y * &y;
            let _changed = y.detach().fill_(0.0);
            z
        }
    }
}

fn layers() -> Layers {
    (0..STAGES).fold(Layers::new(), |layers, j| {
        let stage = Layers::new()
            .add("fc", |p| nn::linear(p, 4, 4, Default::default()))
            .add("bn", |p| batch_norm1d(p, 4, Default::default()))
            .add_fn("fault", faulty(j))
            .add_fn_t("drop", |x, train| x.dropout(0.2, train));
        let layers = if j == 0 { layers.stash("skip") } else { layers };
        let layers = layers.add_layers(format!("s{j}"), stage);
        if j == 2 { layers.pop("join", "skip", |x, skip| x + skip) } else { layers }
    })
}

fn pipeline(schedule: Schedule, recompute: Recompute, arenas: &[Arena]) -> Pipeline {
    let device = |arena: &Arena| DeviceSpec::cpu().threads(1).arena(arena.clone());
    Pipeline::builder(layers())
        .devices(arenas.iter().map(device))
        .balance([5, 4, 5])
        .micro_batches(MicroBatches::Count(MICRO_BATCHES))
        .schedule(schedule)
        .recompute(recompute)
        .kind(Kind::Double)
        .build()
        .expect("a pipeline")
}

fn arenas() -> Vec<Arena> {
    (0..STAGES).map(|j| Arena::new(&format!("stage {j}"))).collect()
}

/// Runs one step on fixed data; returns its loss, the gradients, and the variables after it.
fn step(pipe: &mut Pipeline) -> Result<(f64, Named, Named), Error> {
    let x = Tensor::arange(44, (Kind::Double, Device::Cpu)).sin().view([11, 4]);
    let step =
        pipe.backward(&x, &x, |out: Tensor, y| Loss::mean((out - y).square().mean(Kind::Double)))?;
    Ok((step.loss, pipe.gradients()?, values(pipe)))
}

fn values(pipe: &Pipeline) -> Named {
    copies(&pipe.variables().expect("variables"))
}

/// Pipeline, and the result of an undisturbed step.
struct Trial {
    pipe: Pipeline,
    initial: Named,
    expected: (f64, Named, Named),
}

impl Trial {
    fn new(mut pipe: Pipeline) -> Self {
        let initial = values(&pipe);
        tch::manual_seed(3);
        let expected = step(&mut pipe).expect("an undisturbed step");
        Self { pipe, initial, expected }
    }

    /// Runs one step that may fail, then one that must not, on a new thread; returns the first step's error.
    fn run(&mut self, what: &str) -> Option<Error> {
        let _watchdog = Watchdog::new(what.to_owned());
        let ended = thread::scope(|scope| scope.spawn(|| self.run_here(what)).join());
        ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    fn run_here(&mut self, what: &str) -> Option<Error> {
        self.pipe.zero_grad().expect("cleared");
        self.pipe.set_variables(copies(&self.initial)).expect("the same variables");
        tch::manual_seed(3);
        let mut outcome = step(&mut self.pipe);
        let error = outcome.as_ref().err().cloned();
        if error.is_some() {
            assert!(self.pipe.gradients().expect("gradients").is_empty(), "{what}: gradients");
            assert_close(&values(&self.pipe), &self.initial, &format!("{what}: left behind"));
            outcome = step(&mut self.pipe);
        }
        let (loss, gradients, variables) = outcome.expect("an undisturbed step");
        assert_eq!(loss, self.expected.0, "{what}");
        assert_close(&gradients, &self.expected.1, what);
        assert_close(&variables, &self.expected.2, what);
        error
    }
}

/// Returns the action, the layer and the cause of a stage's failure.
fn stage_error(error: Option<Error>, what: &str) -> (Action, Option<String>, Error) {
    match error {
        Some(Error::Stage { action, layer, cause }) => (action, layer, *cause),
        other => panic!("{what}: {other:?}"),
    }
}

const MODES: [(Schedule, Recompute); 6] = [
    (Schedule::GPipe, Recompute::Never),
    (Schedule::OneFOneB, Recompute::Never),
    (Schedule::OneFOneB, Recompute::ExceptLast),
    (Schedule::OneFOneB, Recompute::Always),
    (Schedule::ZeroBubbleH1, Recompute::Never),
    (Schedule::ZeroBubbleH1, Recompute::Always),
];

#[test]
fn a_layer_that_panics_or_is_refused_is_named_with_its_action() {
    quiet_workers();
    for (schedule, recompute) in MODES {
        let mut trial = Trial::new(pipeline(schedule, recompute, &arenas()));
        for (stage, call) in (0..STAGES).flat_map(|s| (0..MICRO_BATCHES).map(move |c| (s, c))) {
            for again in [false, true] {
                // Turns in which each stage and call meets both, in this pass or in its recompute.
                let panics = (stage + call + usize::from(again)) % 2 == 0;
                let fault = if panics { Fault::Panic } else { Fault::Refused };
                let what = format!("{schedule}, {recompute}, {stage} {again} {call} {fault:?}");
                plan_fault(Some((stage, again, call, fault)));
                let error = trial.run(&what);
                let met = FAULT.lock().unwrap_or_else(PoisonError::into_inner).is_none();
                if !met {
                    // The stage has fewer recomputes than that.
                    assert!(again && error.is_none(), "{what}: {error:?}");
                    continue;
                }
                let (action, layer, cause) = stage_error(error, &what);
                assert_eq!(action.stage.index(), stage, "{what}");
                assert_eq!(layer, Some(format!("s{stage}.fault")), "{what}");
                let Error::Pipeline(PipelineError::Panicked(words)) = &cause else {
                    panic!("{what}: {cause:?}")
                };
                let expected = if panics { "gives up" } else { "cannot be multiplied" };
                assert!(words.contains(expected), "{what}: {words}");
            }
        }
    }
    plan_fault(None);
}

#[test]
fn a_backward_that_is_refused_is_named_with_its_action() {
    quiet_workers();
    // The recompute spoils recomputed stages; the last stage runs only once.
    let modes = [0, 1, 4].map(|kept| (MODES[kept], false)).into_iter();
    let modes = modes.chain([3, 5].map(|recomputed| (MODES[recomputed], true)));
    for ((schedule, recompute), again) in modes {
        let mut trial = Trial::new(pipeline(schedule, recompute, &arenas()));
        for stage in 0..STAGES {
            for call in 0..MICRO_BATCHES {
                let what = format!("{schedule}, {recompute}, {stage} {call}");
                let again = again && stage + 1 < STAGES;
                plan_fault(Some((stage, again, call, Fault::RefusedInBackward)));
                let error = trial.run(&what);
                let (action, _, cause) = stage_error(error, &what);
                let expected = match stage {
                    _ if !schedule.splits_backward() => ActionKind::Backward,
                    // No stage needs the gradient of the model's input: all of it is in the weight part.
                    0 => ActionKind::WeightGradient,
                    _ => ActionKind::InputGradient,
                };
                assert_eq!(action.kind, expected, "{what}");
                assert_eq!(action.stage.index(), stage, "{what}");
                assert!(cause.to_string().contains("inplace operation"), "{what}: {cause}");
            }
        }
    }
    plan_fault(None);
}

#[test]
fn a_loss_that_fails_is_reported_as_it_was() {
    quiet_workers();
    let mut pipe = pipeline(Schedule::OneFOneB, Recompute::Never, &arenas());
    let x = Tensor::ones([8, 4], (Kind::Double, Device::Cpu));
    let error = pipe
        .backward(&x, &x, |_: Tensor, _| Err::<Loss, _>(std::fmt::Error))
        .expect_err("an error");
    let (action, layer, cause) = stage_error(Some(error), "error");
    assert!(matches!(cause, Error::Closure(_)), "{cause:?}");
    assert_eq!((action.stage.index(), layer), (2, None));
    let error =
        pipe.backward(&x, &x, |_: Tensor, _| -> Loss { panic!("no loss") }).expect_err("a panic");
    assert_eq!(
        error.to_string(),
        "stage 2 failed in the forward of micro-batch 0: it panicked: no loss"
    );
    let error = pipe.backward(&x, &x, |out: Tensor, _| Loss::mean(out.sum(Kind::Double) / 0.0));
    assert!(matches!(error, Err(Error::Loss(LossError::NonFinite { .. }))), "{error:?}");
}

/// A failing last stage stops the others before they have run everything that they could.
#[test]
fn the_others_stop_as_soon_as_they_can() {
    quiet_workers();
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let layers = Layers::new()
        .add("fc", |p| nn::linear(p, 2, 2, Default::default()))
        .add_fn("counts", |x| {
            CALLS.fetch_add(1, Ordering::Relaxed);
            x.shallow_clone()
        })
        .add_fn("fails", |_| panic!("at once"));
    let mut pipe = Pipeline::builder(layers)
        .devices((0..3).map(|_| DeviceSpec::cpu().threads(1)))
        .micro_batches(MicroBatches::Count(64))
        .build()
        .expect("a pipeline");
    let x = Tensor::ones([64, 2], (Kind::Float, Device::Cpu));
    let error = pipe
        .backward(&x, &x, |out: Tensor, _| Loss::mean(out.sum(Kind::Float)))
        .expect_err("a panic");
    assert!(error.to_string().ends_with("in layer 'fails': it panicked: at once"), "{error}");
    // One in the failing stage, one in each channel, one with each sender.
    assert!(CALLS.load(Ordering::Relaxed) <= 4, "{CALLS:?}");
}

#[test]
fn a_thousand_steps_leave_neither_memory_nor_threads() {
    quiet_workers();
    for schedule in [Schedule::OneFOneB, Schedule::ZeroBubbleH1] {
        let arenas = arenas();
        let mut pipe = pipeline(schedule, Recompute::ExceptLast, &arenas);
        let mut in_use = Vec::new();
        for number in 0..500 {
            step(&mut pipe).expect("a step");
            pipe.zero_grad().expect("cleared");
            if number % 100 == 99 {
                in_use.push((arenas.iter().map(Arena::current).collect::<Vec<_>>(), threads()));
            }
        }
        assert!(in_use.iter().all(|figures| *figures == in_use[0]), "{schedule}: {in_use:?}");
        assert_eq!(in_use[0].1, STAGES);
        drop(pipe);
        assert!(arenas.iter().all(|arena| arena.current() == 0), "{schedule}: {arenas:?}");
        assert_threads(0);
    }
}
