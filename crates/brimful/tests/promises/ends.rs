//! No hang: a failure in one part ends the call, and threads end with their engine.

use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;

use brimful::{MicroBatches, World};

use crate::kinds::{LossFn, Make};
use crate::plain::{DROPPED, MEAN, engine, samples};
use crate::support::{Watchdog, assert_threads, threads};

pub fn holds(make: Make, world: &World) {
    let before = threads();
    for failure in 0..3 {
        let mut engine = engine(make, DROPPED, MicroBatches::Samples(2), world);
        let name = engine.about().name;
        assert_threads(before + engine.about().threads);
        let watchdog = Watchdog::new(format!("{name}, failure {failure}"));
        let batch = samples(12, 10);
        let gives_up: LossFn = Arc::new(|_, _| panic!("at once"));
        for memory in &engine.about().arenas {
            if failure == 1 {
                memory.fail_from_nth_allocation(5);
            }
        }
        let loss = if failure == 0 { gives_up } else { MEAN.loss() };
        let mut run = || engine.backward(&batch, &loss).map(drop);
        let ended = panic::catch_unwind(AssertUnwindSafe(&mut run));
        assert_eq!(matches!(ended, Ok(Ok(()))), failure == 2, "{name}");
        for memory in &engine.about().arenas {
            memory.fail_nth_allocation(0);
        }
        assert_threads(before + engine.about().threads);
        engine.backward(&batch, &MEAN.loss()).expect("the next step");
        drop(engine);
        assert_threads(before);
        drop(watchdog);
    }
}
