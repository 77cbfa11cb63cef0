//! Out of memory, with the same tests on a CPU arena and on a GPU.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0` selects the GPU; then use `--test-threads=1`, because all threads share its
//! statistics.

use brimful::internal::devices;
use brimful::internal::{self, Caught};
use brimful::memory::OutOfMemory;
use brimful::memory::{Arena, Memory};
use brimful::{Bytes, Error, device};
use tch::{Device, Kind, TchError, Tensor};

/// Returns the memory under test: a requested GPU, else an arena of 64 MiB.
fn memory() -> Memory {
    match std::env::var("BRIMFUL_TEST_DEVICE") {
        Ok(name) => Memory::of(device::find(&name).expect("the device asked for")).expect("memory"),
        Err(_) => Memory::Arena(Arena::limited("64 MiB", 64 << 20).expect("a limit")),
    }
}

fn arena_of(memory: &Memory) -> Option<&str> {
    match memory {
        Memory::Arena(arena) => Some(arena.name()),
        Memory::Accelerator(_) => None,
    }
}

/// Returns more floats than the memory holds.
fn too_much(memory: &Memory) -> i64 {
    let limit = memory.usage().expect("usage").limit.expect("a limit");
    i64::try_from(limit.0 / 4 + 1024).expect("a size")
}

fn out_of_memory<T>(result: Result<T, Caught<TchError>>) -> OutOfMemory {
    match result {
        Err(Caught::OutOfMemory(oom)) => oom,
        Err(other) => panic!("another end: {other:?}"),
        Ok(_) => panic!("it fitted"),
    }
}

#[test]
fn an_error_and_a_panic_are_recognised_and_the_next_call_works() {
    let memory = memory();
    let _inside = memory.enter();
    let options = (Kind::Float, memory.device());
    let (size, before) = (too_much(&memory), memory.usage().expect("usage").current);

    let by_error = out_of_memory(internal::catch(|| Tensor::f_empty([size], options)));
    let by_panic = out_of_memory(internal::catch(|| Ok(Tensor::empty([size], options))));
    for oom in [by_error, by_panic] {
        assert_eq!(oom.arena(), arena_of(&memory));
        let asked = oom.asked.expect("the size is reported").0 as f64;
        assert!((asked / (size * 4) as f64 - 1.0).abs() < 0.01, "{oom}");
        assert!(!oom.message.contains("frame #"), "{oom}");
    }
    assert_eq!(memory.usage().expect("usage").current, before);

    let small = Tensor::ones([1000], options);
    assert_eq!(small.sum(Kind::Float).double_value(&[]), 1000.0);
}

#[test]
fn a_training_step_that_runs_out_leaves_nothing_behind_and_a_smaller_one_works() {
    let memory = memory();
    let _inside = memory.enter();
    let options = (Kind::Float, memory.device());
    let weight = Tensor::ones([64, 64], options).set_requires_grad(true);
    let step = |samples: i64| -> Result<f64, TchError> {
        let x = Tensor::f_ones([samples, 64], options)?;
        let mut hidden = x;
        for _ in 0..4 {
            hidden = hidden.f_matmul(&weight)?.f_tanh()?;
        }
        hidden.f_mean(Kind::Float)?.f_double_value(&[])
    };
    // The very first step also allocates cuBLAS's permanent workspace.
    step(8).expect("8 samples fit");
    let before = memory.usage().expect("usage").current;
    // One operand fits twice; the whole graph does not.
    let limit = memory.usage().expect("usage").available.expect("a limit").0;
    let large = i64::try_from(limit / 3 / (64 * 4)).expect("a size");
    out_of_memory(internal::catch(|| step(large)));
    memory.empty_cache().expect("empty");
    assert_eq!(memory.usage().expect("usage").current, before);
    assert!(step(1000).expect("1,000 samples fit").is_finite());
    assert_eq!(memory.usage().expect("usage").current, before);
}

#[test]
fn the_figures_of_a_memory_follow_a_tensor() {
    let memory = memory();
    let _inside = memory.enter();
    memory.reset_peak().expect("reset");
    let before = memory.usage().expect("usage");
    let tensor = Tensor::zeros([1 << 20], (Kind::Float, memory.device()));
    let with = memory.usage().expect("usage");
    assert_eq!(with.current.0 - before.current.0, 4 << 20);
    assert!(with.peak >= with.current && with.limit == before.limit);
    assert!(with.available <= before.available);
    drop(tensor);
    let after = memory.usage().expect("usage");
    assert_eq!(after.current, before.current);
    assert!(after.peak >= with.current);
    memory.reset_peak().expect("reset");
    assert_eq!(memory.usage().expect("usage").peak, after.current);
}

#[test]
fn a_limit_makes_a_device_as_small_as_wanted_and_can_be_lifted() {
    let memory = memory();
    let _inside = memory.enter();
    let all = memory.usage().expect("usage").limit.expect("a limit");
    // A GPU's allocator takes 20 MiB and more at a time.
    let unit = if memory.device() == Device::Cpu { 1 << 20 } else { 16 << 20 };
    let block = |units: i64| {
        internal::catch(|| Tensor::f_empty([units * unit], (Kind::Uint8, memory.device())))
    };
    let kept = block(8).expect("it fits");
    let limit = memory.usage().expect("usage").current.0 + 24 * unit as u64;
    memory.set_limit(Some(limit)).expect("a limit");
    let usage = memory.usage().expect("usage");
    assert_eq!(usage.limit, Some(Bytes(limit)));
    assert!(usage.available <= Some(Bytes(24 * unit as u64)), "{usage:?}");

    let refused = out_of_memory(block(28));
    assert_eq!(refused.arena(), arena_of(&memory));
    let reported = refused.limit.expect("the limit is reported").0 as f64;
    assert!((reported / limit as f64 - 1.0).abs() < 0.01, "{refused}");
    drop(block(20).expect("it fits"));

    let refused = |bytes| memory.set_limit(Some(bytes)).expect_err("a limit that cannot be");
    assert!(matches!(refused(0), Error::LimitOfZero { .. }));
    assert!(matches!(refused(1 << 20), Error::LimitBelowUse { .. }));
    assert_eq!(memory.usage().expect("usage").limit, usage.limit);

    memory.set_limit(Some(all.0)).expect("the old limit");
    assert_eq!(memory.usage().expect("usage").limit, Some(all));
    drop((kept, block(40).expect("it fits again")));
}

#[test]
fn a_device_that_is_not_here_is_an_error_that_names_those_that_are() {
    for asked in ["cuda:99", "cuda:x", "tpu", ""] {
        let error = device::find(asked).expect_err(asked);
        assert!(
            matches!(&error, Error::NoDevice { available, .. } if available.starts_with("cpu"))
        );
        assert!(error.to_string().starts_with(&format!("there is no device '{asked}' here")));
    }
    assert!(Memory::of(Device::Cuda(99)).is_err());
    assert_eq!(device::find("cpu"), Ok(Device::Cpu));
    assert!(device::spread("tpu", 0..2).is_err());
}

#[test]
fn places_are_spread_over_the_devices_of_a_name() {
    assert_eq!(device::spread("cpu", 1..3), Ok(vec![Device::Cpu; 2]));
    let accelerators = devices().expect("devices").len() - 1;
    if accelerators > 0 {
        let round = (0..2 * accelerators).map(|place| Device::Cuda(place % accelerators));
        assert_eq!(device::spread("cuda", 0..2 * accelerators), Ok(round.collect()));
        assert_eq!(device::spread("cuda:0", 5..7), Ok(vec![Device::Cuda(0); 2]));
    }
}

#[test]
fn every_device_says_its_memory() {
    let all = devices().expect("devices");
    assert_eq!(all[0].name, "cpu");
    for info in all {
        assert!(info.total > Bytes(0) && info.free <= info.total, "{info:?}");
        assert_eq!(device::find(&info.name), Ok(info.device));
    }
}
