//! Command line of `brimful train`.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use anyhow::Result;
use brimful::{Bytes, MicroBatches, World, device};
use clap::Args;
use tch::Device;

use super::given_flags::GivenFlags;
use super::length::Length;
use super::ranks::RankOptions;
use super::recipe::Recipe;
use super::run_files::RunFiles;
use super::stages::Stages;
use crate::files::{self, FlagFile};
use crate::fine_tune::{FineTuneOptions, is_folder};
use crate::setting::{self, ANY_MODEL, ANY_MODELS, ModelSource, NormStatistics, NumberType, words};

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
  brimful train --model llama --data book.txt --lora 16 --save llama-book";

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
  brimful train --model llama --data book.txt --dtype bf16 --lora 16 --save llama-book
                                                      fine-tuning of a Hugging Face folder
  brimful train --model llama --data notes.txt --adapter llama-book --save llama-notes
                                                      trains a saved adapter further
  brimful train --model llama --data book.txt --dtype bf16 --offload all --memory-limit 16GB \\
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

    /// Returns the folder to save a folder's model to. `None` if the path looks like a file: the run is then saved to
    /// that file.
    pub(super) fn saved_folder(&self) -> Option<&Path> {
        let is_folders = matches!(self.model, ModelSource::Folder(_));
        self.files.save.as_deref().filter(|path| is_folders && is_folder(path))
    }

    /// Returns whether the run is saved, or may be by another rank: saves are collective.
    pub(super) fn takes_part_in_saves(&self, world: &World) -> bool {
        self.files.save.is_some() || world.size() > 1
    }

    /// Returns whether any record of the run is requested.
    pub(super) fn is_recorded(&self) -> bool {
        let files = [&self.stages.trace, &self.files.record, &self.files.report];
        files.into_iter().any(Option::is_some)
    }

    /// Returns the dtype of parameters and activations.
    pub(super) fn dtype(&self) -> NumberType {
        self.dtype.unwrap_or(NumberType::F32)
    }

    /// Returns the size of a mini-batch.
    pub(super) fn batch_size(&self) -> BatchSize {
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

    /// Returns the number of samples in the largest micro-batch. An automatic size is guessed, to measure layers with.
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
