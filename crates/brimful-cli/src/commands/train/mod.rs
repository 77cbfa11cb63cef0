//! `brimful train`: trains a model on data, in micro-batches, inside a memory limit.

mod advice;
mod checkpoints;
mod display;
mod engine;
mod moved;
mod offload;
mod options;
mod recipe;
mod records;
mod run_state;
mod saved;
mod trainer;

use anyhow::{Context, Result};
use brimful::World;
use brimful::save::Metadata;
use brimful_report::Ended;

use crate::config::run_flags;
use crate::exit::{self, Exit, ensure_use, wrong_use};
use crate::log_files::{LogFiles, StepFigures};
use crate::setting::NormStatistics;
use crate::{output, progress};
use checkpoints::Checkpoints;
use display::Display;
use options::{BatchSize, RunFiles, is_due};

pub(crate) use checkpoints::place_of_run;
pub(crate) use options::GradientDtype;
pub use options::{RankOptions, TrainOptions};
pub use recipe::{Decay, OptimizerState};
pub(crate) use recipe::{OptimizerName, Recipe};
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
        Some(path) => saved::initialize(path, options.files.init_partial, trainer),
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
        // This call comes first, because a resumed run may still have to test and save after its last step.
        look(trainer, &mut display, &mut checkpoints, &mut logs)?;
        if trainer.is_over() {
            break;
        }
        let learning_rate = trainer.learning_rate();
        let step = trainer.step(Some(display.ticker()))?;
        display.step(&step, trainer);
        let (number, epoch) = (trainer.steps_done(), trainer.state.epoch + 1);
        if let Some(logs) = &mut logs {
            logs.step(&StepFigures { step: number, epoch, learning_rate, record: &step });
        }
        trainer.record(step);
        if let Some(exit) = asked(&trainer.world)? {
            if let Some(checkpoints) = &mut checkpoints {
                checkpoints.save(trainer)?;
                checkpoints.finish(trainer)?;
            }
            drop(display);
            if trainer.is_first() {
                progress::say(&format!("brimful: {}", display::story(trainer)));
            }
            return Ok(exit);
        }
    }
    checkpoints.iter_mut().try_for_each(|checkpoints| checkpoints.finish(trainer))?;
    Ok(Exit::Done)
}

/// Returns the exit code if any rank was interrupted.
fn asked(world: &World) -> brimful::Result<Option<Exit>> {
    let here = exit::asked();
    if world.size() == 1 {
        return Ok(here);
    }
    let signal = here.map(|exit| exit.code() - 128);
    let all = world.share("interrupt", &signal)?;
    Ok(all.into_iter().flatten().next().map(|signal| Exit::Interrupted { signal }))
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

/// Tests if a test is due after the last step, and saves if a save is due.
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

/// Refuses exact BatchNorms on several devices, because they need all samples on one device.
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

/// Refuses updates in the backward on several devices.
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

/// Refuses options that the ranks cannot run together, before any rank builds its part of the model.
fn check_ranks(world: &World, options: &TrainOptions) -> Result<()> {
    let (ranks, replicas) = (world.size(), options.ranks.replicas);
    if ranks == 1 {
        return Ok(());
    }
    check_same(world, options)?;
    ensure_use!(
        ranks.is_multiple_of(replicas) || replicas.is_multiple_of(ranks),
        "--replicas {replicas}: {ranks} ranks cannot be divided into {replicas} replicas of equal size: start a \
         multiple of {replicas}, as in mpirun -n {replicas}, or srun"
    );
    ensure_use!(
        options.batch_norm != Some(NormStatistics::Exact),
        "--batch-norm exact is for one device, but there are {ranks} ranks: start one, or give --batch-norm \
             deferred"
    );
    Ok(())
}

/// Refuses ranks with different options, which would train different models.
fn check_same(world: &World, options: &TrainOptions) -> Result<()> {
    let all = world.share("the flags of the run", &run_flags::shared_metadata(options))?;
    // Paths may differ between the machines of the ranks.
    let is_place = |flag: &str| ["adapter", "data", "model"].contains(&flag);
    let flags = || all.iter().flat_map(|told| told.keys()).filter(|flag| !is_place(flag));
    let differing = all.iter().enumerate().find_map(|(rank, told)| {
        let flag = flags().find(|flag| told.get(*flag) != all[0].get(*flag))?;
        let shown = |told: &Metadata| run_flags::shown(flag, told.get(flag).map(String::as_str));
        Some((flag, rank, [told, &all[0]].map(shown)))
    });
    match differing {
        Some((flag, rank, [there, first])) => Err(wrong_use(format!(
            "rank {rank} has {there}, but rank 0 has {first}: give all ranks the same --{flag}"
        ))),
        None => Ok(()),
    }
}
