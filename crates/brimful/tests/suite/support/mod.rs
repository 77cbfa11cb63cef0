//! Shared test support: serialisation, numbers, closeness, names, state, the log, threads, ranks, and the cases
//! that engines are compared on.

#![allow(dead_code, unused_imports, unused_macros, reason = "each test file uses its part")]

pub mod close;
pub mod full_batch;
pub mod named;
pub mod pipeline_cases;
#[cfg(feature = "mpi")]
pub mod ranks;
pub mod state;
pub mod threads;
pub mod transformer;

use std::any::Any;
use std::fmt::Display;
use std::io;
use std::sync::{Arc, Mutex};

use brimful::{MicroBatcher, MicroBatches, device};
use brimful_torch::kernels::pretend_failure;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

pub use close::{
    TOLERANCE, assert_all_close, assert_all_within, assert_close, assert_near, assert_same,
    assert_within, near,
};
pub use named::{Named, Update, clear, copies, fill, gradients, set_values, variables};
pub use threads::{Watchdog, assert_threads, threads};

/// Generates a test for each name, which runs the expression after it.
macro_rules! tests {
    ($($name:ident => $run:expr,)*) => {
        $(#[test]
        fn $name() {
            $run;
        })*
    };
}
pub(crate) use tests;

/// Returns the device of the tests: the CPU, or the one named by `BRIMFUL_TEST_DEVICE`.
pub fn test_device() -> Device {
    match std::env::var("BRIMFUL_TEST_DEVICE") {
        Ok(name) => device::find(&name).expect("the device asked for"),
        Err(_) => Device::Cpu,
    }
}

/// Makes a micro-batcher; `BRIMFUL_TEST_CUDA_GRAPHS=1` turns CUDA graphs on.
pub fn micro_batcher(store: &VarStore, size: MicroBatches) -> MicroBatcher {
    MicroBatcher::new(store, size)
        .cuda_graphs(std::env::var_os("BRIMFUL_TEST_CUDA_GRAPHS").is_some())
}

/// Runs `f` with each launch of a custom kernel failing in turn, and finally with none; `f` receives a
/// description. Without a GPU there are no launches.
pub fn with_each_launch_failing(mut f: impl FnMut(&str)) {
    if !test_device().is_cuda() {
        return;
    }
    for launch in 0.. {
        pretend_failure(Some(launch)).expect("CUDA");
        f(&format!("launch {launch} fails"));
        if pretend_failure(None).expect("CUDA") {
            return;
        }
    }
}

/// Returns pseudo-random numbers between -1 and 1, the same on every thread and device; in host memory.
pub fn numbers(shape: &[i64], seed: i64) -> Tensor {
    let count = shape.iter().product::<i64>();
    let index = Tensor::arange(count, (Kind::Double, Device::Cpu)) + seed as f64;
    (index.square() * 12.9898).sin().view(shape)
}

/// Returns [`numbers`] on the tested device.
pub fn numbers_there(shape: &[i64], seed: i64) -> Tensor {
    numbers(shape, seed).to_device(test_device())
}

/// Checks that a call fails with these words.
#[track_caller]
pub fn assert_fails<T, E: Display>(result: Result<T, E>, words: &[&str]) {
    let error = result.err().expect("it fails").to_string();
    assert!(words.iter().all(|word| error.contains(word)), "{words:?}: {error}");
}

/// Returns the words of a panic, if it has any.
pub fn words_of(panic: &(dyn Any + Send)) -> Option<String> {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
}

/// Returns the text that `f` logs on this thread.
pub fn logged(f: impl FnOnce()) -> String {
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);
    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("one writer").write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber =
        tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).finish();
    tracing::subscriber::with_default(subscriber, f);
    let bytes = lines.0.lock().expect("no writer left").clone();
    String::from_utf8(bytes).expect("text")
}
