//! `brimful train`: trains a model on data, in micro-batches, inside a memory limit.

mod advice;
mod display;
mod engine;
mod options;
mod pipelined;
mod ranks;
mod rate;
mod records;
mod resume;
mod running;
mod saved;
mod stages;
mod trainer;
mod whole_model;

use std::ops::ControlFlow;

use anyhow::{Context, Result, ensure};
use brimful::report::Ended;

use crate::exit::{Exit, wrong_use};
use crate::interrupt::Interrupt;
use crate::{output, progress};
use display::Display;
use options::BatchSize;
pub use options::TrainOptions;
pub use ranks::RankOptions;
pub use rate::Decay;
pub use trainer::{Epoch, Trainer};

/// Trains, and reports each epoch.
pub(crate) fn run(options: &TrainOptions) -> Result<Exit> {
    check(options)?;
    let mut trainer = Trainer::new(options)?;
    if let Some(path) = &options.resume {
        saved::load(path, &mut trainer, options)
            .with_context(|| format!("cannot go on from {}", path.display()))?;
    }
    let trained = train(&mut trainer, options);
    let ended = match &trained {
        Ok(Exit::Done) => Ended::Finished,
        Ok(_) => Ended::Stopped,
        Err(error) => Ended::Failed(output::causes(error)),
    };
    let written = match trainer.is_first() {
        true => records::write(&trainer.recorder, ended, options),
        false => Ok(()),
    };
    trained.and_then(|exit| written.map(|()| exit))
}

/// The epochs that are still to come, until somebody interrupts.
fn train(trainer: &mut Trainer, options: &TrainOptions) -> Result<Exit> {
    let (interrupt, world) = (Interrupt::listen()?, trainer.world.clone());
    let display = Display::new(options, trainer)?;
    while trainer.epoch() < options.epochs {
        let mut exit = Ok(None);
        let epoch = trainer.run_epoch(|step| {
            display.step(step);
            exit = ranks::asked(&world, &interrupt);
            if matches!(exit, Ok(None)) {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        })?;
        let exit = exit?;
        if let Some(path) = &options.save {
            saved::store(path, trainer, options)?;
        }
        if let Some(epoch) = epoch {
            display.finished(&epoch, trainer.epoch() == options.epochs)?;
        }
        if let Some(exit) = exit.filter(|_| trainer.epoch() < options.epochs) {
            drop(display);
            if trainer.is_first() {
                let story = resume::story(trainer, options.save.as_deref());
                progress::say(&format!("brimful: {story}"));
            }
            return Ok(exit);
        }
    }
    Ok(Exit::Done)
}

/// Refuses what would fail later, after work was put into it.
fn check(options: &TrainOptions) -> Result<()> {
    options.stages.check()?;
    if let Some(rate) = options.learning_rate {
        ensure!(
            rate.is_finite() && rate >= 0.0,
            wrong_use(format!("--learning-rate {rate}: give it a number from 0 on"))
        );
    }
    let files = [
        ("save", &options.save),
        ("record", &options.record),
        ("report", &options.report),
        ("trace", &options.stages.trace),
    ];
    let mut given = files.into_iter().filter_map(|(flag, path)| Some((flag, path.as_ref()?)));
    given.try_for_each(|(flag, path)| output::check_place(flag, path))
}
