//! Ranks that fail, are killed or are stopped: the others end with an error that names them, none hangs, the last
//! saved model is complete, and training resumes from it without a difference.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{env, fs};

use crate::support::pipeline_cases::GPT;
use crate::support::ranks::{
    Launcher, SOCKETS, as_process_or, as_rank_or, in_ranks, reported, text,
};
use crate::support::{Named, assert_close, copies};
use brimful::optim::Adam;
use brimful::optim::Optimizer;
use brimful::world::WorldError;
use brimful::{
    DeviceSpec, Error, Layers, Loss, MicroBatcher, MicroBatches, NonFinitePolicy, Pipeline, World,
    save,
};
use brimful_torch::mpi::{Buffer, Mpi, MpiLine};
use tch::{Device, Kind, Tensor, nn};

/// Longest silence of a rank in these tests, and longest time until the others end.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(3);
const LIMIT: Duration = Duration::from_secs(60);
/// Lets the other ranks live when a rank dies, instead of killing them.
const RECOVERY: [&str; 3] = ["--mca", "orte_enable_recovery", "1"];

/// Number of times a layer runs before it fails.
static CALLS: AtomicUsize = AtomicUsize::new(usize::MAX);

fn faulty(x: &Tensor) -> Tensor {
    if CALLS.fetch_sub(1, Ordering::Relaxed) == 0 {
        panic!("the layer gives up");
    }
    x * 1.0
}

fn model() -> Layers {
    Layers::new()
        .add("in", |p| nn::linear(p, 4, 8, Default::default()))
        .add_fn("first", faulty)
        .add("middle", |p| nn::linear(p, 8, 8, Default::default()))
        .add_fn("second", faulty)
        .add("out", |p| nn::linear(p, 8, 2, Default::default()))
        .add_fn("third", faulty)
}

/// Builds the model over three ranks.
fn three_stages(world: &World) -> Pipeline {
    Pipeline::builder(model())
        .devices([DeviceSpec::cpu().threads(1)])
        .balance([2, 2, 2])
        .kind(Kind::Double)
        .micro_batches(MicroBatches::Count(4))
        .world(world)
        .build()
        .expect("a pipeline")
}

fn step(pipe: &mut Pipeline) -> brimful::Result<brimful::StepReport> {
    let x = Tensor::arange(32, (Kind::Double, Device::Cpu)).view([8, 4]).sin();
    pipe.backward(&x, &(), |out: Tensor, _: &()| Loss::mean(out.square().mean(Kind::Double)))
}

/// Panics in each rank, in each of its calls: every rank gets an error that names it, and the next step is
/// unaffected.
#[test]
fn a_panic_in_one_rank_is_everyones_error() {
    in_ranks(3, |world| {
        let mut pipe = three_stages(&world);
        step(&mut pipe).expect("an undisturbed step");
        let expected = copies(&pipe.gradients().expect("gradients"));
        pipe.zero_grad().expect("cleared");
        for (rank, call) in (0..3).flat_map(|rank| (0..4).map(move |call| (rank, call))) {
            if world.rank() == rank {
                CALLS.store(call, Ordering::Relaxed);
            }
            let error = step(&mut pipe).expect_err("one rank panics");
            CALLS.store(usize::MAX, Ordering::Relaxed);
            assert!(error.to_string().contains("the layer gives up"), "{error}");
            match error {
                Error::World(WorldError::RankFailed { rank: named, .. }) => assert_eq!(named, rank),
                Error::Stage { .. } => assert_eq!(world.rank(), rank, "only the rank's own"),
                other => panic!("{other}"),
            }
            assert!(pipe.gradients().expect("gradients").is_empty());
            step(&mut pipe).expect("the next one works");
            assert_close(&pipe.gradients().expect("gradients"), &expected, "after the panic");
            pipe.zero_grad().expect("cleared");
        }
    });
}

/// The error carries a value, not only words: callers on any rank can suggest a remedy.
#[test]
fn a_loss_that_is_no_number_in_one_rank_is_known_to_all() {
    in_ranks(2, |world| {
        let store = nn::VarStore::new(Device::Cpu);
        let weight = store.root().ones("weight", &[1]);
        let micro = MicroBatcher::new(&store, MicroBatches::Samples(2));
        let mut micro = micro.join(&world).expect("a world");
        let x = Tensor::full([4], world.rank() as f64, (Kind::Float, Device::Cpu));
        let run = |x: Tensor| Loss::mean((x.log().abs() * &weight).mean(Kind::Float));
        let error = micro.backward(&x, run).expect_err("rank 0 takes the logarithm of 0");
        assert_eq!(error.non_finite(), Some("the loss is inf".into()), "{error}");
        assert_eq!(error.out_of_memory(), None);
    });
}

/// f16 overflows at 65,504, which no rank's own gradient reaches.
#[test]
fn a_sum_over_ranks_that_is_not_finite_is_refused_on_all() {
    in_ranks(2, |world| {
        let mut store = nn::VarStore::new(Device::Cpu);
        let weight = store.root().ones("weight", &[1]);
        store.half();
        let micro = MicroBatcher::new(&store, MicroBatches::Samples(1))
            .non_finite(NonFinitePolicy::RefuseGradients);
        let mut micro = micro.join(&world).expect("a world");
        let x = Tensor::full([1, 1], 4e4, (Kind::Half, Device::Cpu));
        let run = |x: Tensor| Loss::sum((x * &weight).to_kind(Kind::Float).sum(Kind::Float));
        let error = micro.backward(&x, run).expect_err("not finite");
        assert_eq!(
            error.non_finite(),
            Some("a gradient is infinite or no number".into()),
            "{error}"
        );
        assert!(!weight.grad().defined());
        micro.backward(&(x / 2.0), run).expect("the next step");
        assert_eq!(weight.grad().double_value(&[0]), 4e4);
    });
}

const STEPS: usize = 24;
const FILE: &str = "saved.safetensors";
/// Prefix of an optimizer's state names, which models skip.
const STATE: &str = "optimizer.";

/// Trains from the last save to the last step, and saves after every second one.
fn train(world: &World, folder: &Path) -> brimful::Result<()> {
    world.set_heartbeat_timeout(HEARTBEAT_TIMEOUT)?;
    let file = folder.join(FILE);
    tch::manual_seed(11);
    let mut pipe = Pipeline::builder((GPT.layers)())
        .devices([DeviceSpec::cpu().threads(1)])
        .kind(Kind::Double)
        .micro_batches(MicroBatches::Count(3))
        .world(world)
        .build()?;
    let mut optimizer = pipe.optimizer(Adam::new(0.01))?;
    let first = resume(&file, &mut pipe, &mut optimizer)?;
    fs::write(folder.join(format!("pid{}", world.rank())), process::id().to_string())
        .expect("reported");
    for number in first..STEPS {
        let (x, y) = GPT.data(9, number as i64);
        pipe.backward(&x, &y, GPT.loss)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        if number % 2 == 1 {
            store(&file, world, &pipe, &optimizer, number + 1)?;
        }
    }
    Ok(())
}

/// Saves model, optimizer and progress in one file, so that they are consistent.
fn store(
    file: &Path,
    world: &World,
    pipe: &Pipeline,
    optimizer: &Optimizer,
    done: usize,
) -> brimful::Result<()> {
    let mut all = pipe.variables()?;
    let (state, mut texts) = optimizer.state()?;
    all.extend(state.into_iter().map(|(name, t)| (format!("{STATE}{name}"), t)));
    texts.insert("done".into(), done.to_string());
    let written = if world.rank() == 0 { save::write(file, &all, &texts) } else { Ok(()) };
    world.vote("saved", written, Duration::ZERO).map(drop)
}

fn resume(file: &Path, pipe: &mut Pipeline, optimizer: &mut Optimizer) -> brimful::Result<usize> {
    if !file.exists() {
        return Ok(0);
    }
    let (all, mut texts) = save::read(file)?;
    let done = texts.remove("done").and_then(|text| text.parse().ok()).expect("a number");
    let state = all.iter().filter_map(|(name, t)| Some((name.strip_prefix(STATE)?, t)));
    let state = state.map(|(name, t)| (name.to_owned(), t.shallow_clone()));
    optimizer.load_state(&state.collect::<Named>(), &texts)?;
    pipe.set_variables(all)?;
    Ok(done)
}

/// Makes a new folder for a test.
fn fresh(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).expect("a folder");
    path
}

/// Returns the process id of a rank, once it has begun to train.
fn pid(folder: &Path, rank: usize) -> String {
    let (file, start) = (folder.join(format!("pid{rank}")), Instant::now());
    loop {
        match fs::read_to_string(&file) {
            Ok(pid) if !pid.is_empty() => return pid,
            _ => sleep(Duration::from_millis(5)),
        }
        assert!(start.elapsed() < LIMIT, "the ranks did not start");
    }
}

fn signal(name: &str, pid: &str) {
    let _ = Command::new("kill").args([name, pid]).status();
}

/// Ends this rank with a message.
#[allow(clippy::print_stdout)] // The test reads it.
fn end(world: World, error: &Error) -> ! {
    println!("rank {} ends: {error}", world.rank());
    drop(world);
    process::exit(3);
}

/// Checks that these ranks have ended with these words about another one.
#[track_caller]
fn assert_given_up(said: &str, ranks: &[usize], other: usize, words: &str) {
    for rank in ranks {
        let named = format!("rank {rank} ends: rank {other} on ");
        assert!(said.contains(&named) && said.contains(words), "{said}");
    }
}

/// Trains in the folder that the test has named.
fn rank(world: World) {
    if let Err(error) = train(&world, Path::new(&reported())) {
        end(world, &error);
    }
}

/// Returns the number of kills of a rank: four, or the number in this variable.
fn kills() -> usize {
    std::env::var("BRIMFUL_TEST_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(4)
}

/// Returns an unpredictable number.
fn surprise(below: u64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    u64::from(now.subsec_nanos()) / 1000 % below
}

/// Ends the ranks by killing one at a random time, and returns their output.
fn kill(
    launcher: &Launcher,
    folder: &Path,
    options: &[&str],
    ranks: usize,
    victim: usize,
) -> String {
    for rank in 0..ranks {
        let _ = fs::remove_file(folder.join(format!("pid{rank}")));
    }
    let launched = launcher.start(ranks, options, &folder.display().to_string());
    let pid = pid(folder, victim);
    sleep(Duration::from_millis(surprise(150)));
    signal("-KILL", &pid);
    text(&launched.wait(LIMIT))
}

fn read(folder: &Path) -> Named {
    save::read(folder.join(FILE)).expect("whole").0
}

/// Returns the steps of the last saved model, if there is one; it must be complete.
fn done(folder: &Path) -> Option<usize> {
    let file = folder.join(FILE);
    file.exists().then(|| save::read(file).expect("whole").1["done"].parse().expect("a number"))
}

/// Covers ranks that survive, and ranks that `mpirun` ends: no hang, and the same parameters as without a kill.
#[test]
fn killed_again_and_again_it_comes_to_the_same_end() {
    as_rank_or(rank, |launcher| {
        let ranks = 3;
        let calm = fresh("not_killed");
        let output = launcher.start(ranks, &[], &calm.display().to_string()).wait(LIMIT);
        assert!(output.status.success(), "{}", text(&output));
        let here = fresh("killed");
        for number in 0..kills() {
            let victim = number % ranks;
            let options = if number % 2 == 0 { &RECOVERY[..] } else { &[] };
            let said = kill(launcher, &here, options, ranks, victim);
            let others = (0..ranks).filter(|rank| *rank != victim);
            let blamed = format!("rank {victim} on ");
            for rank in others {
                // Ranks that mpirun ends, or that had finished, print nothing.
                let words =
                    said.lines().find(|line| line.starts_with(&format!("rank {rank} ends")));
                assert!(words.is_none_or(|words| words.contains(&blamed)), "{victim}: {said}");
            }
            if done(&here) == Some(STEPS) {
                assert_close(&read(&here), &read(&calm), "killed and resumed");
                fs::remove_file(here.join(FILE)).expect("removed, to begin anew");
            }
        }
        // Finishes with another number of ranks.
        let output = launcher.start(2, &[], &here.display().to_string()).wait(LIMIT);
        assert!(output.status.success(), "{}", text(&output));
        assert_close(&read(&here), &read(&calm), "killed and resumed");
    });
}

/// The others name a stopped rank and end; once it continues, it learns that it was given up.
#[test]
fn a_stopped_rank_is_given_up() {
    as_rank_or(rank, |launcher| {
        let here = fresh("stopped");
        let launched = launcher.start(3, &RECOVERY, &here.display().to_string());
        let stopped = pid(&here, 1);
        signal("-STOP", &stopped);
        sleep(HEARTBEAT_TIMEOUT + Duration::from_secs(3));
        signal("-CONT", &stopped);
        assert_given_up(&text(&launched.wait(LIMIT)), &[0, 2], 1, "has sent no heartbeat for");
    });
}

/// The others wait for a slow rank, longer than its heartbeat timeout.
#[test]
fn a_slow_rank_is_not_given_up() {
    in_ranks(2, |world| {
        world.set_heartbeat_timeout(Duration::from_secs(1)).expect("set");
        if world.rank() == 1 {
            sleep(Duration::from_secs(3));
        }
        assert_eq!(world.share("a number", &world.rank()).expect("shared"), [0, 1]);
    });
}

/// Runs steps; the last rank does not take part in the second.
fn rank_that_hangs(world: World) {
    world.set_heartbeat_timeout(HEARTBEAT_TIMEOUT).expect("set");
    world.set_timeout(HEARTBEAT_TIMEOUT).expect("set");
    let mut pipe = three_stages(&world);
    step(&mut pipe).expect("an undisturbed step");
    if world.rank() == 2 {
        sleep(3 * HEARTBEAT_TIMEOUT);
    }
    let error = step(&mut pipe).expect_err("the last rank is away");
    drop(pipe);
    end(world, &error);
}

/// A rank that sends heartbeats but does not do its part is named in the error of every rank: its own, and
/// those of ranks that wait for it only indirectly.
#[test]
fn a_rank_that_hangs_is_given_up() {
    as_rank_or(rank_that_hangs, |launcher| {
        let said = text(&launcher.start(3, &RECOVERY, "").wait(LIMIT));
        assert_given_up(&said, &[0, 1, 2], 2, "has kept others waiting for");
    });
}

/// Encodes a value that a rank shares with all others, as a world does.
fn value<T: serde::Serialize>(number: u64, what: &str, value: &T) -> Vec<u8> {
    const VALUE: u32 = 1;
    let bytes = postcard::to_stdvec(value).expect("bytes");
    postcard::to_stdvec(&(VALUE, number, what, bytes)).expect("bytes")
}

/// Greets the others as a world does, announces a value that no MPI sends before its receiver asks for it, and
/// then makes no MPI call until the file exists.
fn halt_within_a_message(mut mpi: Mpi, over: &Path) {
    let greeting = value(1, "greeting", &(env!("CARGO_PKG_VERSION"), mpi.host()));
    let large = value(2, "a large value", &"x".repeat(1 << 24));
    let tell = |mpi: &mut Mpi, bytes: &Vec<u8>, to| {
        mpi.send(MpiLine::Control, Buffer::Bytes(bytes.clone()), to, 0).expect("sent")
    };
    let _greetings = [0, 2].map(|to| tell(&mut mpi, &greeting, to));
    let mut heard = BTreeSet::new();
    while heard.len() < 2 {
        heard.extend(mpi.incoming().expect("messages").map(|(from, _)| from));
    }
    let _announced = [0, 2].map(|to| tell(&mut mpi, &large, to));
    while !over.exists() {
        sleep(Duration::from_millis(5));
    }
    process::exit(0);
}

/// Waits for the large value.
fn wait_for_a_large_value(world: World) {
    world.set_heartbeat_timeout(HEARTBEAT_TIMEOUT).expect("set");
    let error = world.share("a large value", &String::new()).expect_err("one has halted");
    end(world, &error);
}

/// A rank that halts between a message's announcement and its bytes does not block everything: the others give it
/// up as they would any silent rank.
#[test]
fn a_rank_that_halts_within_a_message_is_given_up() {
    let rank = || {
        if env::var("OMPI_COMM_WORLD_RANK").as_deref() == Ok("1") {
            let mpi = Mpi::start(LIMIT).expect("MPI");
            return halt_within_a_message(mpi, Path::new(&reported()));
        }
        wait_for_a_large_value(World::start().expect("a world"));
    };
    as_process_or(rank, |launcher| {
        let over = fresh("halted").join("over");
        let path = over.display().to_string();
        let launched = launcher.start(3, &[&RECOVERY[..], &SOCKETS[..]].concat(), &path);
        // A rank that was given up does not continue.
        sleep(3 * HEARTBEAT_TIMEOUT);
        fs::write(&over, []).expect("reported");
        assert_given_up(&text(&launched.wait(LIMIT)), &[0, 2], 1, "has sent no heartbeat for");
    });
}
