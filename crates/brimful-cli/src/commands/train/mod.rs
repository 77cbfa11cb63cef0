//! `brimful train`: trains a model on data, in micro-batches, inside a memory limit.

mod advice;
mod checkpoints;
mod display;
mod engine;
mod epoch_cut;
mod given_flags;
mod init;
mod length;
mod moved;
mod offload;
mod options;
mod pipelined;
mod ranks;
mod recipe;
mod records;
mod resume;
mod run_files;
mod running;
mod saved;
mod stages;
mod tested;
mod trained_model;
mod trainer;
mod updates;
mod usual;
mod whole_model;

use anyhow::{Context, Result};
use brimful_report::Ended;

use crate::exit::{self, Exit, ensure_use};
use crate::log_files::{LogFiles, StepFigures};
use crate::setting::NormStatistics;
use crate::{output, progress};
use checkpoints::Checkpoints;
use display::Display;
use length::is_due;
use options::BatchSize;
use run_files::RunFiles;

pub(crate) use checkpoints::place_of_run;
pub use options::TrainOptions;
pub use ranks::RankOptions;
pub use recipe::{Decay, OptimizerState};
pub(crate) use recipe::{OptimizerName, Recipe};
pub(crate) use stages::GradientDtype;
pub use trainer::{Epoch, Trainer};

/// Trains, and reports each epoch.
pub(crate) fn run(options: &TrainOptions) -> Result<Exit> {
    check(options)?;
    let mut trainer = Trainer::new(options)?;
    let begins_anew = options.files.resume.is_none() && options.files.init.is_none();
    if let Some(notice) = options.model.notice().filter(|_| begins_anew && trainer.is_first()) {
        progress::say(&format!("brimful: {notice}"));
    }
    let left_out = trainer.folder.as_ref().and_then(|folder| folder.left_out());
    if let Some(notice) = left_out.filter(|_| trainer.is_first()) {
        progress::say(&format!("brimful: {notice}"));
    }
    begin(&mut trainer, options)?;
    let trained = train(&mut trainer);
    let ended = match &trained {
        Ok(Exit::Done) => Ended::Finished,
        Ok(_) => Ended::Stopped,
        Err(error) => Ended::Failed(output::causes(error)),
    };
    let written = match trainer.recorder.as_ref().filter(|_| trainer.is_first()) {
        Some(recorder) => records::write(recorder, &trainer.options, ended),
        None => Ok(()),
    };
    trained.and_then(|exit| written.map(|()| exit))
}

/// Loads the weights, or the whole run, that the training starts from.
fn begin(trainer: &mut Trainer, options: &TrainOptions) -> Result<()> {
    if let Some(path) = &options.files.resume {
        saved::load(path, trainer).with_context(|| format!("cannot resume {}", path.display()))?;
    } else if let Some(folder) = &trainer.folder {
        folder.load(&trainer.engine.variables()?)?;
    }
    match &options.files.init {
        Some(path) => init::load(path, options.files.init_partial, trainer),
        None => Ok(()),
    }
}

/// Trains until all steps are done or a signal interrupts.
fn train(trainer: &mut Trainer) -> Result<Exit> {
    exit::listen_for_signals()?;
    let mut display = Display::new(trainer)?;
    let mut checkpoints = trainer.takes_part_in_saves().then(|| Checkpoints::new(trainer));
    let mut logs = open_logs(trainer)?;
    loop {
        // Comes first, because a resumed run may still have to test and save after its last step.
        look(trainer, &mut display, &mut checkpoints, &mut logs)?;
        if trainer.is_over() {
            break;
        }
        let learning_rate = trainer.learning_rate();
        let step = trainer.step(Some(display.ticker()))?;
        display.step(&step, trainer);
        let (number, epoch) = (trainer.steps_done(), trainer.epoch + 1);
        if let Some(logs) = &mut logs {
            logs.step(&StepFigures { step: number, epoch, learning_rate, record: &step });
        }
        trainer.record(step);
        if let Some(exit) = ranks::asked(&trainer.world)? {
            if let Some(checkpoints) = &mut checkpoints {
                checkpoints.save(trainer)?;
                checkpoints.finish(trainer)?;
            }
            drop(display);
            if trainer.is_first() {
                progress::say(&format!("brimful: {}", resume::story(trainer)));
            }
            return Ok(exit);
        }
    }
    checkpoints.iter_mut().try_for_each(|checkpoints| checkpoints.finish(trainer))?;
    Ok(Exit::Done)
}

/// Opens the requested logs, cut back to the step that the run resumes from. Only the first rank has logs.
fn open_logs(trainer: &Trainer) -> Result<Option<LogFiles>> {
    let RunFiles { log, events, resume, .. } = &trainer.options.files;
    if !trainer.is_first() || (log.is_none() && events.is_none()) {
        return Ok(None);
    }
    let resumed = resume.as_ref().map(|_| trainer.steps_done());
    LogFiles::open(log.as_deref(), events.as_deref(), resumed).map(Some)
}

/// Tests and saves, if that is due after the last step.
fn look(
    trainer: &mut Trainer,
    display: &mut Display,
    checkpoints: &mut Option<Checkpoints>,
    logs: &mut Option<LogFiles>,
) -> Result<()> {
    let ends_epoch = trainer.is_epoch_over();
    let mut test = None;
    if ends_epoch {
        let (epoch, tested) = trainer.finish_epoch()?;
        display.finished(&epoch, trainer)?;
        test = Some(tested);
    } else if trainer.is_test_due() {
        let tested = trainer.test()?;
        display::tell(&tested, trainer)?;
        test = Some(tested);
    }
    if let Some(test) = test {
        logs.iter_mut().for_each(|logs| logs.test(&test));
        if let Some(checkpoints) = checkpoints.as_mut().filter(|_| test.best) {
            checkpoints.save_best(trainer)?;
        }
    }
    let steps = trainer.steps_done();
    let due = ends_epoch || is_due(trainer.options.files.save_every, steps) || trainer.is_over();
    match checkpoints.as_mut().filter(|_| due && steps > 0) {
        Some(checkpoints) => checkpoints.save(trainer),
        None => Ok(()),
    }
}

/// Refuses exact BatchNorms over several devices: they need all samples on one.
fn check_batch_norm(options: &TrainOptions) -> Result<()> {
    let is_exact = options.batch_norm == Some(NormStatistics::Exact);
    let stages = options.stages.stages.unwrap_or(1);
    let replicas = options.ranks.replicas;
    ensure_use!(
        !is_exact || stages.max(replicas) == 1,
        "--batch-norm exact is for one device, but --stages is {stages} and --replicas {replicas}: leave \
             both out, or give --batch-norm deferred"
    );
    Ok(())
}

/// Refuses updates in the backward over several devices.
fn check_updates(options: &TrainOptions) -> Result<()> {
    let stages = options.stages.stages.unwrap_or(1);
    let replicas = options.ranks.replicas;
    ensure_use!(
        !options.stages.update_in_backward || stages.max(replicas) == 1,
        "--update-in-backward is for one device, but --stages is {stages} and --replicas {replicas}: leave \
             --update-in-backward out, or give one device"
    );
    Ok(())
}

/// Refuses options that would fail later, after work was done.
fn check(options: &TrainOptions) -> Result<()> {
    options.stages.check()?;
    options.stages.offload_gradients.check(options.dtype())?;
    check_updates(options)?;
    check_batch_norm(options)?;
    options.recipe.check()?;
    options.files.check()
}
