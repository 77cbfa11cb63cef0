//! Records of a run: its run file, its report page, and the trace of its last step.

use anyhow::Result;
use brimful::schedule::Recompute;
use brimful::{MicroBatches, libtorch, save};
use brimful_report::{Device, Ended, Recorder};

use super::engine::Engine;
use super::{BatchSize, TrainOptions};
use crate::commands::report::write_page;
use crate::data::Dataset;
use crate::{calendar, shell};

/// Makes a recorder with the run's settings and devices.
pub(super) fn recorder(
    options: &TrainOptions,
    engine: &Engine,
    dataset: &Dataset,
    in_epoch: usize,
) -> Recorder {
    let mut recorder = Recorder::new(format!("{} {}", options.model, engine.place()));
    for (name, value) in settings(options, engine, dataset, in_epoch) {
        recorder.setting(name, value);
    }
    for Device { name, limit } in engine.devices() {
        recorder.device(name, limit);
    }
    recorder
}

fn settings(
    options: &TrainOptions,
    engine: &Engine,
    dataset: &Dataset,
    in_epoch: usize,
) -> Vec<(&'static str, String)> {
    let batch_size = match options.batch_size() {
        BatchSize::All => format!("all {}", dataset.train.len()),
        BatchSize::Samples(samples) => samples.to_string(),
    };
    let method = options.recipe.method();
    let mut settings = vec![
        ("command", shell::command()),
        ("started", calendar::now()),
        ("model", options.model.to_string()),
        ("data", format!("{} ({} samples)", options.data, dataset.train.len())),
        ("optimizer", method.name().to_owned()),
        ("learning rate", method.learning_rate().to_string()),
        ("learning rate decay", options.recipe.learning_rate_decay.to_string()),
        ("batch size", batch_size),
        ("micro-batch size", size(options.size())),
        ("dtype", options.dtype().to_string()),
        match options.length.max_steps {
            Some(steps) => ("steps", steps.to_string()),
            None => ("epochs", options.length.epochs(in_epoch).to_string()),
        },
        ("seed", options.seed.to_string()),
    ];
    let stages = &options.stages;
    settings.extend(options.memory_limit.map(|limit| ("memory limit", limit.to_string())));
    settings.extend(stages.stages.map(|count| ("stages", count.to_string())));
    if let Some(schedule) = engine.schedule() {
        settings.push(("schedule", schedule.to_string()));
        let recompute = match stages.recompute.unwrap_or_default() {
            // Offloaded stages always recompute activations, and an offload plan chooses for each of the other
            // stages.
            Recompute::Never | Recompute::ExceptLast if engine.uses_host() => {
                "chosen for each stage".into()
            }
            asked => asked.to_string(),
        };
        settings.push(("recompute", recompute));
        settings.push(("offload", stages.offload.to_string()));
    }
    settings.extend([
        ("threads", libtorch::threads().to_string()),
        ("libtorch", libtorch::version().unwrap_or_default()),
        ("brimful", env!("CARGO_PKG_VERSION").to_owned()),
    ]);
    settings
}

fn size(size: MicroBatches) -> String {
    match size {
        MicroBatches::Samples(samples) => format!("{samples} samples"),
        MicroBatches::Count(count) => format!("{count} in a mini-batch"),
        MicroBatches::Largest => "automatic: the largest that fits".into(),
        _ => "automatic: the fastest that fits".into(),
    }
}

/// Writes the requested files, as far as the run went.
pub(super) fn write(recorder: &Recorder, options: &TrainOptions, ended: Ended) -> Result<()> {
    if let (Some(path), Some(ran)) = (&options.stages.trace, recorder.last()) {
        save::replace(path, ran.trace().as_bytes())?;
    }
    if options.files.record.is_none() && options.files.report.is_none() {
        return Ok(());
    }
    let run = recorder.run(ended);
    if let Some(path) = &options.files.record {
        run.write(path)?;
    }
    if let Some(path) = &options.files.report {
        write_page(path, &run)?;
    }
    Ok(())
}
