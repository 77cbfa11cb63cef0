//! Tests of `brimful-bench convergence`: every training, then the comparison.

use crate::program::{contestants, refused, rows};

const CONVERGENCE: &str = "convergence --data digits --model mlp --device cpu";

#[test]
fn every_training_has_a_row_and_the_contestants_are_compared() {
    let flags = "--batch-size 256 --epochs 2 --seeds 0,1 --memory-limit 8MiB";
    let (rows, _) = rows(&format!("{CONVERGENCE} {flags}"));

    let (runs, comparisons) = rows.split_at(2 * 4);
    assert!(runs.iter().all(|row| row["test_accuracy"].as_f64() > Some(0.5)), "{runs:?}");
    let expected = ["full batch", "micro-batches, auto", "16 micro-batches", "4 stages"];
    assert_eq!(contestants(comparisons), expected);
    let automatic = runs.iter().filter(|row| row["contestant"] == "micro-batches, auto");
    assert!(automatic.clone().all(|row| row["micro_batch"].as_u64() < Some(256)), "{runs:?}");
    // Without BatchNorm and dropout the micro-batch size changes only rounding.
    let difference = comparisons[1]["difference"].as_f64().expect("a difference");
    assert!(difference.abs() < 0.01, "{}", comparisons[1]);
}

#[test]
fn what_cannot_be_compared_is_refused() {
    for (flags, words) in [
        ("--epochs 0", "give a whole number from 1 on"),
        ("--memory-limit 64KiB --epochs 1", "the model cannot be built: out of memory"),
        ("--question norms", "--batch-norm is for resnet18"),
    ] {
        refused(&format!("{CONVERGENCE} {flags}"), words);
    }
}
