//! `brimful-bench finetune`: a folder's model, trained whole or by LoRA, on its device and offloaded.

mod fine_tuned;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Result, ensure};
use brimful::memory::Memory;
use brimful::{Bytes, Layers};
use brimful_cli::model::LoraFlag;
use brimful_cli::setting::{self, words};
use brimful_models::pretrained::Pretrained;
use brimful_torch::device as torch_device;
use clap::Args;
use serde::Serialize;
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::host_memory;
use crate::journal::{Journal, Output};
use crate::offload::OffloadArgument;
use crate::steady::{self, SteadySteps};
use crate::turns::TurnProgress;
use fine_tuned::{FineTuned, fine_tuned};

/// Options of `brimful-bench finetune`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful-bench finetune --model llama --lora 16 --device cuda:0
  brimful-bench finetune --model llama --offload host --memory-limit 16GB --device cuda:0
  brimful-bench finetune --model examples/tiny-llama --from-scratch --sequence 16 --batch-size 4 --micro-batch-size 2")]
pub(crate) struct FinetuneOptions {
    /// Model: a Hugging Face folder
    #[arg(long, value_name = "FOLDER")]
    model: PathBuf,
    #[arg(long, help = words::FROM_SCRATCH)]
    from_scratch: bool,
    #[arg(long, value_name = "RANK", help = words::LORA)]
    lora: Option<LoraFlag>,
    /// Offload model state to host memory: modes to compare: each is a contestant
    #[arg(long, value_name = "MODE,…", value_delimiter = ',', default_value = "device")]
    offload: Vec<OffloadArgument>,
    /// Tokens per sequence
    #[arg(long = "sequence", value_name = "N", default_value_t = 1024)]
    tokens: i64,
    #[arg(long, value_name = "N", default_value_t = 32, help = words::BATCH_SIZE)]
    #[arg(value_parser = words::count)]
    batch_size: usize,
    #[arg(long = "micro-batch-size", value_name = "N", default_value_t = 8, help = words::MICRO_BATCH)]
    #[arg(value_parser = words::count)]
    micro_batch: usize,
    /// Measured steps of each contestant
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = words::count)]
    repeats: usize,
    #[arg(long, value_name = "DEVICE", help = words::DEVICE)]
    device: Option<String>,
    #[arg(long, value_name = "BYTES", help = words::MEMORY_LIMIT)]
    memory_limit: Option<Bytes>,
    #[command(flatten)]
    output: Output,
}

/// Measures and prints.
pub(crate) fn run(options: &FinetuneOptions) -> Result<()> {
    let device = setting::device(options.device.as_deref())?;
    let folder = match options.from_scratch {
        true => Pretrained::without_weights(&options.model),
        false => Pretrained::open(&options.model),
    }?;
    let context = folder.config().context();
    ensure!(
        (1..=context).contains(&options.tokens),
        "--sequence {}: the model takes from 1 to {context} tokens",
        options.tokens
    );
    options.limit_gpu(device)?;
    let work = FinetuneWork { options, folder, device };
    let facts = json!({ "optimizer": "adamw", "dtype": "bf16" });
    let mut journal = Journal::begin("finetune", device, &options.output, facts)?;
    let progress = TurnProgress::new(options.offload.len() * steady::steps(options.repeats));
    for &offload in &options.offload {
        progress.row(offload.contestant());
        journal.enter(&work.measure(offload, &progress)?)?;
    }
    progress.done();
    journal.end()
}

impl FinetuneOptions {
    /// Limits a GPU's memory.
    fn limit_gpu(&self, device: Device) -> Result<()> {
        let Some(limit) = self.memory_limit else { return Ok(()) };
        ensure!(device != Device::Cpu, "--memory-limit is for a GPU here: give --device cuda");
        Ok(Memory::of(device)?.set_limit(Some(limit.0))?)
    }
}

/// Model, options and device of a fine-tuning.
struct FinetuneWork<'a> {
    options: &'a FinetuneOptions,
    folder: Pretrained,
    device: Device,
}

impl<'a> FinetuneWork<'a> {
    fn measure(
        &self,
        offload: OffloadArgument,
        progress: &TurnProgress,
    ) -> Result<FinetuneRow<'a>> {
        let options = self.options;
        let (mut tuned, load) = self.loaded(offload)?;
        let following = (offload.contestant(), progress);
        let steady = SteadySteps::measure(&mut *tuned, &self.batch(), options.repeats, following)?;
        let tokens = options.batch_size as i64 * options.tokens;
        Ok(FinetuneRow {
            contestant: offload.contestant(),
            model: &options.model,
            parameters: self.folder.config().layers().parameter_count()?,
            lora: options.lora.as_ref().map(LoraFlag::to_string),
            dtype: "bf16",
            sequence: options.tokens,
            batch: options.batch_size,
            micro_batch: options.micro_batch,
            repeats: options.repeats,
            tokens_per_s: tokens as f64 / steady.seconds,
            first_loss: steady.first_loss,
            last_loss: steady.last.loss,
            replayed: steady.last.replayed,
            peak_bytes: tuned.peak(&steady.last)?,
            steady,
            memory_limit: options.memory_limit.map(|limit| limit.to_string()),
            load,
        })
    }

    fn layers(&self) -> Layers {
        let layers = self.folder.config().layers();
        match &self.options.lora {
            Some(LoraFlag(lora)) => layers.lora(lora),
            None => layers,
        }
    }

    /// Loads the model with the folder's weights, and reports the cost.
    fn loaded(&self, offload: OffloadArgument) -> Result<(Box<dyn FineTuned>, LoadFigures)> {
        let Self { options, folder, device } = self;
        let (layers, device) = (self.layers(), *device);
        // Loads the device's libraries first, so that their host memory does not count as the weights'.
        let first = Tensor::ones([8, 8], (Kind::BFloat16, device));
        let _ = first.matmul(&first);
        torch_device::synchronize(device)?;
        host_memory::forget_peak();
        let before = host_memory::resident();
        let start = Instant::now();
        // All contestants start with the same adapters.
        tch::manual_seed(0);
        let tuned = fine_tuned(layers, device, offload, options.micro_batch)?;
        let seconds_build = start.elapsed().as_secs_f64();
        let start = Instant::now();
        folder.load(&tuned.variables()?)?;
        torch_device::synchronize(device)?;
        let seconds_load = start.elapsed().as_secs_f64();
        let bytes = folder.config().layers().parameter_count()? * 2;
        let taken = host_memory::peak().zip(before).map(|(peak, before)| peak - before.min(peak));
        let has_weights = !options.from_scratch;
        Ok((
            tuned,
            LoadFigures {
                seconds_build,
                seconds_load: has_weights.then_some(seconds_load),
                loaded_bytes_per_s: has_weights.then(|| bytes as f64 / seconds_load),
                host_of_weights: taken.map(|taken| taken as f64 / bytes as f64),
            },
        ))
    }

    /// Returns sequences and their next tokens. The peers generate the same ones, so that losses can be compared.
    fn batch(&self) -> (Tensor, Tensor) {
        let (samples, tokens) = (self.options.batch_size as i64, self.options.tokens);
        let places = Tensor::arange(samples * (tokens + 1), (Kind::Int64, self.device));
        let texts = (places * 48_271).remainder(65_537);
        let texts = texts.remainder(self.folder.config().vocabulary());
        let texts = texts.view([samples, tokens + 1]);
        (texts.narrow(1, 0, tokens).contiguous(), texts.narrow(1, 1, tokens).contiguous())
    }
}

#[derive(Debug, Serialize)]
struct FinetuneRow<'a> {
    contestant: &'static str,
    model: &'a Path,
    parameters: u64,
    lora: Option<String>,
    dtype: &'static str,
    sequence: i64,
    batch: usize,
    micro_batch: usize,
    repeats: usize,
    #[serde(flatten)]
    steady: SteadySteps,
    tokens_per_s: f64,
    first_loss: f64,
    last_loss: f64,
    /// Micro-batches of the last step that were replayed.
    replayed: usize,
    peak_bytes: Option<Bytes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_limit: Option<String>,
    #[serde(flatten)]
    load: LoadFigures,
}

/// Cost of building a model and loading its weights.
#[derive(Debug, Serialize)]
struct LoadFigures {
    /// Seconds until memory for all weights was allocated and randomly initialised.
    seconds_build: f64,
    seconds_load: Option<f64>,
    loaded_bytes_per_s: Option<f64>,
    /// Peak host memory of building and loading, divided by the bytes of the weights.
    host_of_weights: Option<f64>,
}
