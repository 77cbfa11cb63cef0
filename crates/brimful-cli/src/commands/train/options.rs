//! Command line of `brimful train`: its flags by subject, and what they mean for ranks, devices and files.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;
use std::{env, fmt};

use anyhow::Result;
use brimful::internal::is_offloadable;
use brimful::schedule::{Recompute, Schedule};
use brimful::{Bytes, MicroBatches, World, device};
use clap::{Args, ValueEnum};
use tch::{Device, Kind};

use super::checkpoints::kept_beside;
use super::offload::OffloadArgument;
use super::recipe::Recipe;
use crate::config::run_flags::GivenFlags;
use crate::exit::{ensure_unsaid, ensure_use};
use crate::files::{self, FileUse, FlagFile};
use crate::log_files;
use crate::model::{FineTuneOptions, is_folder};
use crate::setting::{
    self, ANY_MODEL, ANY_MODELS, ModelSource, NormStatistics, NumberType, shown_as_given, words,
};

/// Default number of samples in a mini-batch.
const BATCH_SIZE: usize = 128;

/// Values of `--dtype`, in its long help.
const DTYPES: &str = ": f64, f32, tf32 (f32 with TF32 matrix products on CUDA) or bf16";

/// Examples of `brimful train -h`.
const EXAMPLES: &str = "\
Examples:
  brimful train                                       the shipped digits, an mlp
  brimful train --model resnet18 --batch-size all --memory-limit 256MiB
  brimful train --model gpt --data book.txt --device cuda --dtype bf16 --save book.safetensors
  brimful train --resume book.safetensors             continue an interrupted run
  brimful train --model ./llama --data book.txt --lora 16 --save llama-book";

/// Examples of `brimful train --help`.
const ALL_EXAMPLES: &str = "\
Examples:
  brimful train                                       the shipped digits, an mlp
  brimful train --model resnet18 --batch-size all --memory-limit 256MiB
                                                      the whole training set as one mini-batch
  brimful train --model gpt --data book.txt --device cuda --dtype bf16
  brimful train --model gpt --data synthetic --stages 4 -m 16 --memory-limit 64MiB --device cpu
                                                      a pipeline over four devices of 64 MiB each
  brimful train --model resnet18 --stages 4 --schedule interleaved-2 --recompute except-last \\
                --num-micro-batches 16 --report report.html   two stages per device; a timeline
  brimful train --model gpt --data book.txt --offload all --num-micro-batches 16 --memory-limit 8GB
                                                      weights and optimizer state in host memory
  brimful train --model resnet50 --data flowers --batch-size 256 --save flowers.safetensors
                                                      a folder of images, one subfolder per class
  brimful train --data ~/fashion-mnist --save model.safetensors
  brimful train --resume model.safetensors            continue an interrupted run
  brimful train --model gpt --data book.txt --max-steps 2000 --warmup 100 --clip-norm 1 \\
                --learning-rate-decay cosine --eval-every 200 --save book.safetensors \\
                --save-every 100 --keep best --log book.csv      a longer run, and its log
  brimful train --model resnet50 --replicas 4 --device cuda
                                                      data parallel on four GPUs
  mpirun -n 4 brimful train --model gpt --stages 2 --replicas 2
                                                      two pipelines of two processes each
  brimful train --model ./llama --data book.txt --dtype bf16 --lora 16 --save llama-book
                                                      fine-tuning of a Hugging Face folder
  brimful train --model ./llama --data notes.txt --adapter llama-book --save llama-notes
                                                      trains a saved adapter further
  brimful train --model ./llama --data book.txt --dtype bf16 --offload all --memory-limit 16GB \\
                --save llama-whole                    full fine-tuning, offloaded to the host
  brimful train --config run.toml --epochs 20         flags from a file, one of them changed";

/// Options of `brimful train`.
#[derive(Debug, Clone, Args)]
#[command(after_help = EXAMPLES, after_long_help = ALL_EXAMPLES)]
pub struct TrainOptions {
    #[command(flatten)]
    pub(crate) given: GivenFlags,
    #[arg(long, default_value = "mlp", value_name = "MODEL", help_heading = "Model")]
    #[arg(help = ANY_MODEL, long_help = ANY_MODELS)]
    pub(crate) model: ModelSource,
    #[arg(long, value_enum, help_heading = "Model")]
    #[arg(help = format!("{} [default: f32, or a folder's own]", words::DTYPE))]
    #[arg(long_help = format!("{}{DTYPES} [default: f32, or a folder's own]", words::DTYPE))]
    #[arg(hide_possible_values = true)]
    pub(crate) dtype: Option<NumberType>,
    #[command(flatten)]
    pub(crate) fine_tune: FineTuneOptions,
    #[arg(long, value_enum, value_name = "WHICH", help = words::BATCH_NORM)]
    #[arg(help_heading = "Model", hide_short_help = true)]
    pub(crate) batch_norm: Option<NormStatistics>,
    #[arg(long, default_value = "digits", value_name = "DATA", help_heading = "Data")]
    #[arg(help = words::DATA, long_help = words::DATA_FORMS)]
    pub(crate) data: String,
    /// Tokens per sequence [default: 64; when fine-tuning, 2048 at most]
    ///
    /// When fine-tuning, the default is the smallest of 2048, the model's context and the text's length
    #[arg(long, value_name = "N", value_parser = words::count, help_heading = "Data")]
    pub(crate) sequence: Option<usize>,
    /// Image size in pixels [default: 224]
    ///
    /// Images of a folder are resized to this height and width. Below 64 pixels, a ResNet uses a first convolution
    /// suited to small images
    #[arg(long, value_name = "PIXELS", value_parser = words::count, help_heading = "Data")]
    pub(crate) image: Option<usize>,
    /// Samples per mini-batch: N or all [default: 128; when fine-tuning, as many as make 16384 tokens]
    #[arg(long, value_name = "N", help_heading = "Data")]
    pub(crate) batch_size: Option<BatchSize>,
    #[command(flatten)]
    pub(crate) recipe: Recipe,
    #[command(flatten)]
    pub(crate) length: Length,
    /// Random seed
    ///
    /// Dropout masks, and BatchNorm unless it is exact or frozen, also depend on the micro-batch size. Two runs are equal
    /// if they have the same --seed and the same --micro-batch-size N
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = words::seed)]
    #[arg(help_heading = "Optimizer")]
    pub(crate) seed: u64,
    /// Samples per micro-batch: a number, auto or largest
    ///
    /// `auto` finds the fastest size that fits; `largest` the largest. Two runs with `auto` may use different sizes. The
    /// gradient depends on the size only through dropout (see --seed), and BatchNorm unless it is exact or frozen
    #[arg(long, default_value = "auto", value_name = "N", help_heading = "Memory")]
    #[arg(value_parser = words::micro_batch)]
    pub(crate) micro_batch_size: MicroBatches,
    #[arg(long, short = 'm', value_name = "M", value_parser = words::count)]
    #[arg(conflicts_with = "micro_batch_size", help = words::MICRO_BATCHES)]
    #[arg(help_heading = "Memory")]
    pub(crate) num_micro_batches: Option<usize>,
    /// Memory limit of each device, such as 96MiB or 16GB
    ///
    /// Units are KB, MB, GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (powers of 1024; K, M, G, T for short).
    /// Everything that the run keeps on the device counts: weights, gradients, optimizer state, activations and, on a
    /// GPU, memory cached by libtorch. Memory of other programs does not count
    #[arg(long, value_name = "BYTES", help_heading = "Memory")]
    pub(crate) memory_limit: Option<Bytes>,
    #[command(flatten)]
    pub(crate) stages: Stages,
    /// Device: cpu, cuda or cuda:1 [default: cuda if there is a GPU]
    ///
    /// With `cuda`, each device of a pipeline and each rank of a machine takes a separate GPU
    #[arg(long, value_name = "NAME", help_heading = "Devices")]
    pub(crate) device: Option<String>,
    #[command(flatten)]
    pub(crate) ranks: RankOptions,
    /// Do not capture and replay micro-batches as CUDA graphs
    #[arg(long, help_heading = "Devices", hide_short_help = true)]
    pub(crate) no_cuda_graphs: bool,
    #[command(flatten)]
    pub(crate) files: RunFiles,
    #[arg(long, help = words::JSON_LINES, help_heading = "Output", hide_short_help = true)]
    pub(crate) json: bool,
}

impl TrainOptions {
    /// Lists the given files and folders that the run reads and writes, each with its flag.
    pub(crate) fn files(&self) -> Vec<FlagFile> {
        let is_new = !self.files.overwrite && self.files.resume.is_none();
        let trace = files::written("--trace", self.stages.trace.as_ref());
        let model = match &self.model {
            ModelSource::Folder(folder) => Some(folder),
            ModelSource::Named(_) => None,
        };
        let read = [
            files::read_data(&self.data),
            files::read("--model", model),
            files::read("--adapter", self.fine_tune.adapter.as_ref()),
        ];
        let mut files = self.files.flag_files(self.saved_folder().is_some());
        files.extend(trace.map(|trace| FlagFile { is_new, ..trace }));
        files.extend(read.into_iter().flatten());
        files
    }

    /// Returns the folder of `--save`, if the model is from a folder. Returns none if the path looks like a file:
    /// the run is then saved to that file.
    pub(super) fn saved_folder(&self) -> Option<&Path> {
        let is_folders = matches!(self.model, ModelSource::Folder(_));
        self.files.save.as_deref().filter(|path| is_folders && is_folder(path))
    }

    /// Returns whether this rank takes part in saves. Saves are collective: with several ranks, each takes part,
    /// because another rank may have `--save`.
    pub(super) fn takes_part_in_saves(&self, world: &World) -> bool {
        self.files.save.is_some() || world.size() > 1
    }

    /// Returns whether any record of the run is requested.
    pub(super) fn is_recorded(&self) -> bool {
        let files = [&self.stages.trace, &self.files.record, &self.files.report];
        files.into_iter().any(Option::is_some)
    }

    /// Returns the dtype of parameters and activations.
    pub(crate) fn dtype(&self) -> NumberType {
        self.dtype.unwrap_or(NumberType::F32)
    }

    /// Returns the size of a mini-batch.
    pub(crate) fn batch_size(&self) -> BatchSize {
        self.batch_size.unwrap_or(BatchSize::Samples(BATCH_SIZE))
    }

    /// Returns the micro-batch size.
    pub(super) fn size(&self) -> MicroBatches {
        self.num_micro_batches.map_or(self.micro_batch_size, MicroBatches::Count)
    }

    /// Returns the number of samples in the largest micro-batch, if the options give it.
    pub(super) fn given_micro_batch(&self, batch_size: usize) -> Option<usize> {
        match self.size() {
            MicroBatches::Samples(size) => Some(size.min(batch_size)),
            MicroBatches::Count(count) => Some(batch_size.div_ceil(count)),
            _ => None,
        }
    }

    /// Returns the number of samples in the largest micro-batch. If the size is automatic, returns a guess, to
    /// measure layers with.
    pub(super) fn guessed_micro_batch(&self, batch_size: usize) -> usize {
        self.given_micro_batch(batch_size).unwrap_or_else(|| batch_size.div_ceil(8))
    }

    /// Returns `count` devices for this rank, prepared for the dtype.
    pub(super) fn devices(&self, world: &World, count: usize) -> Result<Vec<Device>> {
        let before = world.rank_on_host();
        let name = self.device.as_deref().unwrap_or_else(|| setting::best_devices());
        let devices = device::spread(name, before * count..(before + 1) * count)?;
        devices.iter().try_for_each(|device| self.dtype().prepare(*device))?;
        Ok(devices)
    }
}

/// Number of samples in a mini-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BatchSize {
    All,
    Samples(usize),
}

impl BatchSize {
    /// Returns the number of samples in a mini-batch, out of `samples` in all.
    pub(super) fn of(self, samples: usize) -> usize {
        match self {
            Self::All => samples,
            Self::Samples(wanted) => wanted.min(samples),
        }
    }
}

impl fmt::Display for BatchSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Samples(samples) => samples.fmt(f),
        }
    }
}

impl FromStr for BatchSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "all" => Ok(Self::All),
            _ => words::counted(text, "give a number from 1 on, or all").map(Self::Samples),
        }
    }
}

/// Default number of epochs.
const EPOCHS: usize = 10;
/// Default number of epochs for fine-tuning pretrained weights.
const TUNING_EPOCHS: usize = 3;

/// Length of a training, and how often it tests.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Optimizer")]
pub struct Length {
    #[arg(long, value_name = "N", value_parser = words::count_or_none)]
    #[arg(help = format!("{} [default: 10; when fine-tuning, 3]", words::EPOCHS))]
    pub(crate) epochs: Option<usize>,
    /// Number of steps, in place of --epochs
    #[arg(long, value_name = "STEPS", value_parser = words::count, conflicts_with = "epochs")]
    pub(crate) max_steps: Option<usize>,
    /// Evaluate every N steps, as well as after each epoch
    #[arg(long, value_name = "N", value_parser = words::count, hide_short_help = true)]
    pub(crate) eval_every: Option<usize>,
    /// Stop early after N evaluations in a row without a new lowest loss
    #[arg(long, value_name = "N", value_parser = words::count, hide_short_help = true)]
    pub(crate) stop_after: Option<usize>,
    /// True if pretrained weights are fine-tuned.
    #[arg(skip)]
    pub(super) tunes: bool,
}

impl Length {
    /// Returns the total number of steps, for epochs of `in_epoch` steps.
    pub(super) fn steps(&self, in_epoch: usize) -> usize {
        let usual = if self.tunes { TUNING_EPOCHS } else { EPOCHS };
        self.max_steps.unwrap_or_else(|| self.epochs.unwrap_or(usual).saturating_mul(in_epoch))
    }

    /// Returns the number of epochs of `in_epoch` steps. The last epoch may be incomplete.
    pub(super) fn epochs(&self, in_epoch: usize) -> usize {
        self.steps(in_epoch).div_ceil(in_epoch.max(1))
    }
}

/// Returns whether `every` is given and `steps` is a multiple of it.
pub(super) fn is_due(every: Option<usize>, steps: usize) -> bool {
    every.is_some_and(|every| steps.is_multiple_of(every))
}

/// Pipeline stages, offloading and recomputation.
#[derive(Debug, Clone, Args)]
pub(crate) struct Stages {
    /// Offload model state to host memory: auto, none or all
    ///
    /// Model state is the weights, gradients and optimizer state. With `auto`, it stays on the device if it fits;
    /// otherwise as many stages as needed are offloaded. If model state takes more than half of the memory, `auto`
    /// measures the layers first. With several ranks or replicas, with --schedule, and with exact BatchNorm, `auto`
    /// offloads all layers or none. With `all`, every layer is offloaded, and at most two at a time are on the device
    #[arg(long, value_enum, value_name = "WHICH", default_value = "auto")]
    #[arg(help_heading = "Memory", hide_possible_values = true)]
    pub(crate) offload: OffloadArgument,
    #[arg(long, value_name = "WHEN", value_parser = setting::recompute, help_heading = "Memory")]
    #[arg(help = format!("{} [default: never]", words::RECOMPUTE))]
    #[arg(long_help = format!("{} [default: never]", words::RECOMPUTE_LONG))]
    pub(crate) recompute: Option<Recompute>,
    /// Update offloaded weights during the backward, layer by layer
    ///
    /// Faster than an update after the backward. If a step fails, some weights are already updated: resume from the last
    /// --save
    #[arg(long, conflicts_with_all = ["clip_norm", "accumulate"])]
    #[arg(help_heading = "Memory", hide_short_help = true)]
    pub(crate) update_in_backward: bool,
    /// Dtype of offloaded gradients: f32, or bf16 for half the memory and transfers
    #[arg(long, value_enum, value_name = "DTYPE", default_value = "f32")]
    #[arg(conflicts_with = "update_in_backward")]
    #[arg(help_heading = "Memory", hide_short_help = true, hide_possible_values = true)]
    pub(crate) offload_gradients: GradientDtype,
    #[arg(long, short = 's', value_name = "S", value_parser = words::count, help = words::STAGES)]
    #[arg(long_help = words::STAGES_LONG, help_heading = "Devices")]
    pub(crate) stages: Option<usize>,
    #[arg(long, value_name = "NAME", value_parser = setting::schedule, help_heading = "Devices")]
    #[arg(help = format!("{} [default: 1f1b]", words::SCHEDULE))]
    #[arg(long_help = format!("{} [default: 1f1b; with --offload all, breadth-first]", words::SCHEDULES))]
    pub(crate) schedule: Option<Schedule>,
    /// Write a step's timeline for ui.perfetto.dev [the last step's]
    #[arg(long, value_name = "FILE", help_heading = "Output", hide_short_help = true)]
    pub(crate) trace: Option<PathBuf>,
}

/// Value of `--offload-gradients`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum GradientDtype {
    F32,
    Bf16,
}

shown_as_given!(GradientDtype);

impl GradientDtype {
    /// Refuses bf16 gradients of a model in another dtype.
    pub(crate) fn check(self, dtype: NumberType) -> Result<()> {
        ensure_use!(
            self == Self::F32 || dtype.kind() == Kind::BFloat16,
            "--offload-gradients bf16 needs a model in bf16, but it is in {dtype}: give --dtype bf16, or leave \
             --offload-gradients out"
        );
        Ok(())
    }
}

impl Stages {
    /// Refuses impossible combinations, and flags of a pipeline if there is no pipeline.
    pub(super) fn check(&self) -> Result<()> {
        let is_cut = self.stages.is_some() || self.offload == OffloadArgument::All;
        if !is_cut {
            let flags = [
                ("schedule", self.schedule.is_some()),
                ("recompute", self.recompute.is_some()),
                ("trace", self.trace.is_some()),
                ("update-in-backward", self.update_in_backward),
            ];
            let purpose = "a pipeline: give --stages or --offload all too";
            ensure_unsaid(&flags, purpose)?;
        }
        if self.offload == OffloadArgument::None {
            let flags = [
                ("update-in-backward", self.update_in_backward),
                ("offload-gradients", self.offload_gradients == GradientDtype::Bf16),
            ];
            ensure_unsaid(&flags, "offloaded weights: leave --offload none out")?;
        }
        let Some(schedule) = self.schedule else { return Ok(()) };
        ensure_use!(
            schedule.stages_per_device() > 0,
            "--schedule {schedule}: give at least 1 stage per device"
        );
        ensure_use!(
            self.offload != OffloadArgument::All || is_offloadable(schedule),
            "--schedule {schedule} splits the backward, which --offload all supports with at most 2 \
                 stages per device: give --schedule breadth-first-{}, or leave --offload all out",
            schedule.stages_per_device()
        );
        Ok(())
    }
}

/// Files of a run.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Output")]
pub struct RunFiles {
    /// Save model, optimizer and progress after every epoch and when interrupted
    ///
    /// PATH is a safetensors file. When fine-tuning, PATH is a folder for the model, or with --lora for the adapter,
    /// unless PATH ends in .safetensors. Until the run is done, the folder also holds the file that --resume needs
    #[arg(long, value_name = "PATH")]
    pub(crate) save: Option<PathBuf>,
    /// Also save every N steps, in the background
    #[arg(long, value_name = "N", value_parser = words::count, requires = "save")]
    #[arg(hide_short_help = true)]
    pub(crate) save_every: Option<usize>,
    /// Checkpoints to keep: the last; the last and the best; or the newest N
    ///
    /// `last` keeps the newest. `best` also keeps the one with the lowest test loss, as FILE.best. N keeps the newest N,
    /// as FILE.step-STEP
    #[arg(long, value_name = "last|best|N", default_value = "last", requires = "save")]
    #[arg(hide_short_help = true)]
    pub(crate) keep: Keep,
    /// Resume the run that --save has written, with its flags
    ///
    /// The resumed run saves to the same path. Flags of the command line override those of the run. With a fixed
    /// --micro-batch-size, the run ends with the same parameters as without the interruption
    #[arg(long, value_name = "PATH")]
    pub(crate) resume: Option<PathBuf>,
    /// Initialize the weights from this safetensors file, by name
    #[arg(long, value_name = "FILE", conflicts_with = "resume", hide_short_help = true)]
    pub(crate) init: Option<PathBuf>,
    /// Initialize only the weights that the file has in the same shape
    #[arg(long, requires = "init", hide_short_help = true)]
    pub(crate) init_partial: bool,
    /// Log each step to this CSV file, one line per step
    #[arg(long, value_name = "FILE")]
    pub(crate) log: Option<PathBuf>,
    /// Log each step to this folder, for TensorBoard
    #[arg(long, value_name = "FOLDER", hide_short_help = true)]
    pub(crate) events: Option<PathBuf>,
    /// Overwrite files that an earlier run wrote
    #[arg(long, hide_short_help = true)]
    pub(crate) overwrite: bool,
    /// Record the run in this file; `brimful report` makes a page from it
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(crate) record: Option<PathBuf>,
    /// Write an HTML page: timeline, memory, micro-batch sizes, loss
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
}

impl RunFiles {
    /// Lists the given files, each with its flag. `saves_folder` is true if `--save` names a folder.
    pub(super) fn flag_files(&self, saves_folder: bool) -> Vec<FlagFile> {
        let log = self.events.as_ref().map(|folder| log_files::events_file(folder));
        // A resumed run cuts its logs back to where it resumes, and overwrites its own files.
        let is_new = !self.overwrite && self.resume.is_none();
        let written = [
            files::written("--log", self.log.as_ref()),
            // A missing folder of events is created.
            files::written("--events", log.filter(|log| log.exists())),
            files::written("--record", self.record.as_ref()),
            files::written("--report", self.report.as_ref()),
        ];
        let written = written.into_iter().flatten().map(|file| FlagFile { is_new, ..file });
        let read = [
            files::read("--resume", self.resume.as_ref()),
            files::read("--init", self.init.as_ref()),
        ];
        let read = read.into_iter().flatten();
        self.saved_files(saves_folder).into_iter().chain(written).chain(read).collect()
    }

    /// Lists the files and folders that `--save` and `--keep` write.
    fn saved_files(&self, saves_folder: bool) -> Vec<FlagFile> {
        let Some(save) = &self.save else { return Vec::new() };
        let kept = kept_beside(save, self.keep);
        let goes_on = self.resume.as_ref().is_some_and(|from| {
            files::is_same(from, save) || kept.iter().any(|kept| files::is_same(from, kept))
        });
        let purpose = if saves_folder { FileUse::WritesFolder } else { FileUse::Writes };
        let is_new = !self.overwrite && !goes_on;
        let written = |flag, path| FlagFile { flag, path, purpose, is_new };
        let kept = kept.into_iter().map(|path| written("--keep", path));
        kept.chain([written("--save", save.clone())]).collect()
    }

    /// Refuses an `--events` path that is a file.
    pub(super) fn check(&self) -> Result<()> {
        if let Some(path) = &self.events {
            let (shown, is_file) = (path.display(), path.exists() && !path.is_dir());
            ensure_use!(!is_file, "--events {shown} is a file: name a folder");
        }
        Ok(())
    }
}

/// Value of `--keep`: which files of saves are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    Last,
    Best,
    Newest(usize),
}

impl FromStr for Keep {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "last" => Ok(Self::Last),
            "best" => Ok(Self::Best),
            _ => words::counted(text, "give last, best, or a number from 1 on").map(Self::Newest),
        }
    }
}

/// Environment variables that launchers set for the processes that they start.
const LAUNCHED: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMIX_RANK"];

/// Replicas, and timeouts of the ranks that mpirun or srun has started.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Devices")]
pub struct RankOptions {
    /// Data-parallel replicas, each with a part of every mini-batch
    ///
    /// In one process, each replica has its own devices. With mpirun or srun, ranks are divided equally among the replicas
    #[arg(long, value_name = "R", value_parser = words::count, default_value_t = 1)]
    pub(crate) replicas: usize,
    /// Seconds without a heartbeat after which a rank counts as lost
    #[arg(long, value_name = "SECONDS", default_value_t = 30, hide_short_help = true)]
    #[arg(value_parser = words::seconds)]
    pub(crate) heartbeat_timeout: u64,
    /// Seconds that a rank may keep the others waiting before the step fails
    #[arg(long, value_name = "SECONDS", default_value_t = 1800, hide_short_help = true)]
    #[arg(value_parser = words::seconds)]
    pub(crate) timeout: u64,
}

impl RankOptions {
    /// Returns the world that a launcher started this process in, or a world of one.
    pub fn world(&self) -> Result<World> {
        if !LAUNCHED.iter().any(|name| env::var_os(name).is_some()) {
            return Ok(World::alone());
        }
        let world = start()?;
        world.set_heartbeat_timeout(Duration::from_secs(self.heartbeat_timeout))?;
        world.set_timeout(Duration::from_secs(self.timeout))?;
        Ok(world)
    }

    /// Returns the number of replicas in each rank, if every rank holds at least one whole model.
    pub(super) fn whole_models(&self, world: &World) -> Option<usize> {
        let each = self.replicas / world.size();
        (each * world.size() == self.replicas).then_some(each)
    }

    /// Returns the number of parts into which the ranks divide a mini-batch. All ranks of a replica load the
    /// replica's part.
    pub(super) fn parts(&self, world: &World) -> usize {
        self.replicas.min(world.size())
    }

    /// Returns the number of devices in each pipeline.
    pub(super) fn devices_of_pipeline(&self, world: &World, stages: &Stages) -> usize {
        stages.stages.unwrap_or_else(|| self.ranks_of_pipeline(world))
    }

    /// Returns the number of ranks in each pipeline.
    fn ranks_of_pipeline(&self, world: &World) -> usize {
        (world.size() / self.replicas).max(1)
    }

    /// Returns the number of devices that this rank provides to the pipelines.
    pub(super) fn devices(&self, world: &World, stages: &Stages) -> Result<usize> {
        let devices = self.devices_of_pipeline(world, stages);
        if world.size() == 1 {
            return Ok(devices * self.replicas);
        }
        let ranks = self.ranks_of_pipeline(world);
        ensure_use!(
            devices.is_multiple_of(ranks),
            "--stages {devices}: {} ranks in {} replicas leave {ranks} ranks per replica: give a multiple of {ranks}",
            world.size(),
            self.replicas
        );
        Ok(devices / ranks)
    }
}

#[cfg(feature = "mpi")]
fn start() -> Result<World> {
    Ok(World::start()?)
}

#[cfg(not(feature = "mpi"))]
fn start() -> Result<World> {
    let reason = "it was started by mpirun or srun, but built without MPI: build it with \
                  --features mpi";
    Err(crate::exit::wrong_use(reason))
}
