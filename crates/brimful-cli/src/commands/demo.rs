//! `brimful demo`: trains with the whole training set as one mini-batch, in less memory than a plain step needs.

use anyhow::{Result, bail};
use brimful::Error;

use super::train::{self, TrainOptions, Trainer};
use crate::args::BrimfulArgs;
use crate::exit::Exit;
use crate::output::line;

/// Command that the demo runs, which works on the command line too.
const TRAIN: &str = "brimful train --model mlp --data digits --batch-size all \
                     --memory-limit 8MiB --device cpu --epochs 20 --learning-rate 0.005";

/// Shows a plain step running out of memory, then trains in micro-batches within the same limit.
pub(crate) fn run() -> Result<Exit> {
    let options = BrimfulArgs::training(TRAIN.split_whitespace())?;
    line("1437 handwritten digits as one mini-batch, on a device of 8 MiB.")?;
    line("\nA plain step:")?;
    let plain = TrainOptions { num_micro_batches: Some(1), ..options.clone() };
    let Err(error) = Trainer::new(&plain)?.run_epoch() else {
        bail!("the plain step fits: this build of libtorch needs less memory than expected");
    };
    match error.chain().find_map(|cause| cause.downcast_ref::<Error>()?.out_of_memory()) {
        Some(oom) => line(&format!("  {oom}"))?,
        None => {
            bail!("the step without micro-batches failed, but not for lack of memory: {error:#}")
        }
    }
    line(&format!("\nIn micro-batches, with an automatic size:\n  {TRAIN}"))?;
    line("")?;
    train::run(&options)
}
