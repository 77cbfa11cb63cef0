//! Trials of fixed sizes: which fit, and their rates.

use anyhow::{Result, ensure};
use brimful::MicroBatches;
use brimful_cli::exit::{does_not_fit, ran_out};

use super::subject::LimitedWork;
use crate::turns::TurnProgress;

/// Steps of a size after the first, which warms up.
const REPEATS: usize = 2;

/// Returns the largest size that fits two steps, by bisection.
pub(super) fn largest(subject: &LimitedWork, progress: &TurnProgress) -> Result<usize> {
    let (mut fits, mut fails) = (0, subject.work.batch + 1);
    while fails - fits > 1 {
        let size = if fails > subject.work.batch { fails - 1 } else { (fits + fails) / 2 };
        progress.row(&format!("{}: does {size} fit?", subject.title()));
        if rate(subject, size, 1)?.is_some() {
            fits = size;
        } else {
            fails = size;
        }
    }
    ensure!(fits > 0, does_not_fit("one sample does not fit"));
    // Near-equal micro-batches are at most this large.
    Ok(subject.work.batch.div_ceil(subject.work.batch.div_ceil(fits)))
}

/// Returns the size with the best rate, among powers of two from a 32nd of the largest, and the largest.
pub(super) fn fastest(
    subject: &LimitedWork,
    largest: usize,
    progress: &TurnProgress,
) -> Result<usize> {
    let powers = (1..).map(|power| 1 << power).take_while(|&size| size < largest);
    let sizes = powers.filter(|&size: &usize| size >= largest / 32).chain([largest]);
    let mut best = (largest, 0.0);
    for size in sizes {
        progress.row(&format!("{}: how fast is {size}?", subject.title()));
        if let Some(rate) = rate(subject, size, REPEATS)?
            && rate > best.1
        {
            best = (size, rate);
        }
    }
    Ok(best.0)
}

/// Returns samples per second with a fixed size; `None` if it does not fit.
fn rate(subject: &LimitedWork, size: usize, repeats: usize) -> Result<Option<f64>> {
    let measured = || {
        let mut built = subject.build(MicroBatches::Samples(size))?;
        built.step()?;
        built.median(repeats)
    };
    match measured() {
        Err(error) if ran_out(&error) => Ok(None),
        seconds => Ok(Some(subject.work.batch as f64 / seconds?)),
    }
}
