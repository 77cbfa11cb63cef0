//! The command line of `brimful train`.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use anyhow::Result;
use brimful::{Bytes, Size, World, device};
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
use crate::setting::{self, MODELS, ModelSource, NormStatistics, NumberType, words};

/// Default number of samples in a mini-batch.
const BATCH_SIZE: usize = 128;

/// Options of `brimful train`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  brimful train                                       the shipped digits, an mlp
  brimful train --model resnet18 --batch-size all --memory-limit 256MiB
                                                      the whole training set as one mini-batch
  brimful train --model gpt --data book.txt --device cuda --dtype bf16
  brimful train --model gpt --data synthetic --stages 4 --micro-batches 16 --memory-limit 64MiB \\
                --device cpu                              a model over four devices of 64 MiB each
  brimful train --model resnet18 --stages 4 --schedule interleaved-2 --recompute except-last \\
                --micro-batches 16 --report report.html   two stages on each; what they did when
  brimful train --model gpt --data book.txt --offload all --micro-batches 16 --memory-limit 8GB
                                                      a model that lives on the host
  brimful train --model resnet50 --data flowers --batch-size 256 --save flowers.safetensors
                                                      a folder of images, with a subfolder a class
  brimful train --data ~/fashion-mnist --save model.safetensors
  brimful train --resume model.safetensors            goes on with that run, if it was interrupted
  brimful train --model gpt --data book.txt --max-steps 2000 --warmup 100 --clip-norm 1 \\
                --learning-rate-decay cosine --eval-every 200 --save book.safetensors \\
                --save-every 100 --keep best --log book.csv      a longer run, and its log
  brimful train --model resnet50 --replicas 4 --device cuda
                                                      on four GPUs, each with a part of every batch
  mpirun -n 4 brimful train --model gpt --stages 2 --replicas 2
                                                      two pipelines of two processes each
  brimful train --model llama --data book.txt --dtype bf16 --lora 16 --save llama-book
                                                      a folder of Hugging Face's, fine-tuned
  brimful train --model llama --data notes.txt --adapter llama-book --save llama-notes
                                                      begins with the adapter of another training
  brimful train --model llama --data book.txt --dtype bf16 --offload all --memory-limit 16GB \\
                --save llama-whole                        all of its weights, from the host's memory
  brimful train --config run.toml --epochs 20         flags from a file, one of them changed")]
pub struct TrainOptions {
    #[command(flatten)]
    pub(crate) given: GivenFlags,
    #[arg(long, default_value = "mlp", value_name = "NAME|FOLDER")]
    #[arg(help = format!("{MODELS}; or a folder of Hugging Face's: gpt2, llama, mistral, qwen2"))]
    pub(crate) model: ModelSource,
    #[arg(long, default_value = "digits", value_name = "NAME|PATH", help = words::DATA)]
    pub(crate) data: String,
    /// Tokens in a sequence of a text [default: 64; of a folder's weights as many as the model takes and the
    /// text has, up to 2048]
    #[arg(long, value_name = "N", value_parser = words::count)]
    pub(crate) sequence: Option<usize>,
    #[arg(long, value_name = "PIXELS", value_parser = words::count, help = words::IMAGE)]
    pub(crate) image: Option<usize>,
    /// Samples in a mini-batch: a number, or all of the training set [default: 128; of a folder's weights
    /// as many as have at most 16384 tokens]
    #[arg(long, value_name = "N|all")]
    pub(crate) batch_size: Option<BatchSize>,
    /// Samples in a micro-batch: a number, auto (the fastest that fits) or largest (that fits). The
    /// gradient does not depend on it, but for what --seed says; what is the fastest may be another from run
    /// to run
    #[arg(long, default_value = "auto", value_name = "N|auto|largest")]
    #[arg(value_parser = words::micro_batch)]
    pub(crate) micro_batch: Size,
    #[arg(long, short = 'm', value_name = "M", value_parser = words::count)]
    #[arg(conflicts_with = "micro_batch", help = words::MICRO_BATCHES)]
    pub(crate) micro_batches: Option<usize>,
    /// Memory of each device, such as 96MiB, 16GB or 8G (GiB): model, gradients and activations take
    /// no more; on a GPU, of all that shares it
    #[arg(long, value_name = "BYTES")]
    pub(crate) memory_limit: Option<Bytes>,
    #[arg(long, value_name = "NAME", help = words::DEVICES)]
    pub(crate) device: Option<String>,
    /// Launch every micro-batch anew, instead of capturing it once and replaying it, which is for
    /// CUDA alone
    #[arg(long)]
    pub(crate) no_cuda_graphs: bool,
    #[arg(long, value_enum)]
    #[arg(help = format!("{} [default: f32; of a folder's weights as they are stored]", words::DTYPE))]
    pub(crate) dtype: Option<NumberType>,
    #[arg(long, value_enum, value_name = "WHAT", help = words::BATCH_NORM)]
    pub(crate) batch_norm: Option<NormStatistics>,
    /// Where all random numbers start: the masks of dropout, and BatchNorm where a micro-batch has its own,
    /// go by the micro-batches too: for the same numbers in every run give --micro-batch N
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = words::seed)]
    pub(crate) seed: u64,
    #[arg(long, help = words::JSON_LINES)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) recipe: Recipe,
    #[command(flatten)]
    pub(crate) length: Length,
    #[command(flatten)]
    pub(crate) files: RunFiles,
    #[command(flatten)]
    pub(crate) fine_tune: FineTuneOptions,
    #[command(flatten)]
    pub(crate) stages: Stages,
    #[command(flatten)]
    pub(crate) ranks: RankOptions,
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

    /// Returns the folder to save a folder's model to. A path that is named like a file gets the run's file instead.
    pub(super) fn saved_folder(&self) -> Option<&Path> {
        let is_folders = matches!(self.model, ModelSource::Folder(_));
        self.files.save.as_deref().filter(|path| is_folders && is_folder(path))
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
    pub(super) fn size(&self) -> Size {
        self.micro_batches.map_or(self.micro_batch, Size::Count)
    }

    /// Returns the number of samples in the largest micro-batch, if the options give it.
    pub(super) fn given_micro_batch(&self, batch_size: usize) -> Option<usize> {
        match self.size() {
            Size::Fixed(size) => Some(size.min(batch_size)),
            Size::Count(count) => Some(batch_size.div_ceil(count)),
            _ => None,
        }
    }

    /// Returns the number of samples in the largest micro-batch; for an automatic size a guess, to measure layers
    /// with.
    pub(super) fn guessed_micro_batch(&self, batch_size: usize) -> usize {
        self.given_micro_batch(batch_size).unwrap_or_else(|| batch_size.div_ceil(8))
    }

    /// Returns `each` devices for this rank, prepared for the dtype.
    pub(super) fn devices(&self, world: &World, each: usize) -> Result<Vec<Device>> {
        let before = world.rank_on_host();
        let name = self.device.as_deref().unwrap_or_else(|| setting::best_devices());
        let devices = device::spread(name, before * each..(before + 1) * each)?;
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
