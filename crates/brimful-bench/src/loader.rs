//! `brimful-bench loader`: images per second from a folder of JPEGs, decoded, cropped, resized and normalised.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::{self, available_parallelism};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use brimful_cli::data::ImageLoader;
use brimful_cli::progress::Progress;
use brimful_cli::setting::words;
use clap::Args;
use image::{Rgb, RgbImage};
use serde::Serialize;
use serde_json::json;
use tch::Device;

use crate::journal::{Journal, Output};
use crate::times::StepTimes;
use crate::turns::TurnProgress;

/// Number of classes in a generated folder, each a subfolder.
const CLASSES: usize = 10;
/// Size of generated images, about that of ImageNet's photographs.
const MADE: (u32, u32) = (500, 375);

/// Options of `brimful-bench loader`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful-bench loader --data build/images
  brimful-bench loader --data build/images --workers 16 --batch-size 256
  brimful-bench loader --data build/few --images 100 --image 64 --repeats 1")]
pub(crate) struct LoaderOptions {
    /// Data: a folder of images, which is made if it does not exist
    #[arg(long, value_name = "PATH")]
    data: PathBuf,
    /// Images in a new folder
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = words::count)]
    images: usize,
    /// Image size in pixels
    #[arg(long, value_name = "PIXELS", default_value_t = 224)]
    image: u32,
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = words::count)]
    #[arg(help = words::BATCH_SIZE)]
    batch_size: usize,
    /// Decoding threads [default: one per core]
    #[arg(long, value_name = "N", value_parser = words::count)]
    workers: Option<usize>,
    /// Measured steps of each contestant: passes over all images
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = words::count)]
    repeats: usize,
    #[command(flatten)]
    output: Output,
}

/// Measures and prints.
pub(crate) fn run(options: &LoaderOptions) -> Result<()> {
    let cores = available_parallelism().map_or(1, usize::from);
    if !options.data.exists() {
        make(&options.data, options.images, cores)?;
    }
    let workers = options.workers.unwrap_or(cores);
    let side = i64::from(options.image);
    let mut loader = ImageLoader::open(&options.data, side, workers, options.batch_size)?;
    let facts = json!({ "optimizer": "none" });
    let mut journal = Journal::begin("loader", Device::Cpu, &options.output, facts)?;
    let progress = TurnProgress::new(options.repeats + 1);
    let mut times = StepTimes::default();
    // The first pass loads the files into the system's cache.
    for turn in 0..options.repeats + 1 {
        progress.turn("loader", "passes", turn, 1, options.repeats);
        let (start, mut brought) = (Instant::now(), 0);
        loader.epoch(turn as u64, |_, targets| brought += targets.size()[0])?;
        times.push_if(turn > 0, start.elapsed().as_secs_f64());
        ensure!(brought as usize == loader.images(), "{brought} of {} came", loader.images());
        progress.advance(1);
    }
    progress.done();
    journal.enter(&LoaderRow {
        contestant: "brimful",
        data: &options.data,
        images: loader.images(),
        image: options.image,
        batch: options.batch_size,
        workers,
        images_per_s: loader.images() as f64 / times.median(),
        spread: times.spread(),
        seconds: &times.0,
    })?;
    journal.end()
}

/// Generates a folder of images on all cores: waves of colour with grain, about as large in bytes as photographs.
fn make(folder: &Path, images: usize, threads: usize) -> Result<()> {
    let progress = Progress::new(images, "images made");
    let part = |first: usize| -> Result<()> {
        for number in (first..images).step_by(threads) {
            make_one(folder, number)?;
            progress.advance(1);
        }
        Ok(())
    };
    thread::scope(|scope| {
        let parts: Vec<_> = (0..threads).map(|first| scope.spawn(move || part(first))).collect();
        parts.into_iter().try_for_each(|part| part.join().expect("it does not panic"))
    })
}

fn make_one(folder: &Path, number: usize) -> Result<()> {
    let class = folder.join(format!("class-{}", number % CLASSES));
    let path = class.join(format!("{number:06}.jpg"));
    let made = fs::create_dir_all(&class).map_err(Into::into);
    let made = made.and_then(|()| photograph(number as u32).save(&path));
    made.with_context(|| format!("cannot write {}", path.display()))
}

fn photograph(number: u32) -> RgbImage {
    let wave = |place: u32, length: u32| {
        let phase = place * 256 / length % 512;
        phase.min(511 - phase)
    };
    let mut grain = number.wrapping_mul(0x9e37_79b9) | 1;
    RgbImage::from_fn(MADE.0, MADE.1, |x, y| {
        grain ^= grain << 13;
        grain ^= grain >> 17;
        grain ^= grain << 5;
        let colour = |shift: u32| {
            let smooth =
                wave(x + number * 7, 60 + shift) / 2 + wave(y + number * 3, 90 + shift) / 2;
            (smooth * 7 / 8 + (grain >> shift) % 32) as u8
        };
        Rgb([colour(3), colour(11), colour(19)])
    })
}

#[derive(Debug, Serialize)]
struct LoaderRow<'a> {
    contestant: &'static str,
    data: &'a Path,
    images: usize,
    image: u32,
    batch: usize,
    workers: usize,
    images_per_s: f64,
    spread: f64,
    seconds: &'a [f64],
}
