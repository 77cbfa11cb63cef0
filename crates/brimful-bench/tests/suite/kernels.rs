//! Tests of `brimful-bench kernels`: three implementations of a head's loss, and a first use.

use crate::program::{run, tables};
use predicates::prelude::*;
use serde_json::Value;

/// Smallest head, on a CPU.
const KERNELS: &str = "kernels --device cpu --places 24 --words 50 --width 8 --repeats 2";

/// Returns the rows of the head's loss, by contestant.
fn losses(rows: &[Value]) -> Vec<(&str, &Value)> {
    let losses = rows.iter().filter(|row| row["part"] == "loss");
    losses.map(|row| (row["contestant"].as_str().expect("a name"), row)).collect()
}

#[test]
fn half_precision_is_computed_by_all_three_and_a_first_use_is_reported() {
    let (rows, environment) = crate::program::rows(KERNELS);
    let losses = losses(&rows);
    let names: Vec<_> = losses.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["brimful", "libtorch, logits in f32", "libtorch"]);
    let [ours, careful, plain] = [0, 1, 2].map(|place| losses[place].1);
    for (_, row) in &losses {
        assert!(row["seconds"].as_f64() > Some(0.0), "{row}");
        // At least both gradients, in bf16.
        assert!(row["peak_bytes"].as_u64() >= Some(2 * 8 * (24 + 50)), "{row}");
        assert_eq!((&row["places"], &row["words"]), (&24.into(), &50.into()));
        assert_eq!((&row["width"], &row["repeats"]), (&8.into(), &2.into()));
    }
    assert_eq!((&ours["time_ratio"], &ours["peak_ratio"]), (&1.0.into(), &1.0.into()));
    assert_eq!(careful["gradient_difference"], 0.0);
    assert!(plain["peak_bytes"].as_u64() < careful["peak_bytes"].as_u64(), "{plain}");
    let first = &rows[0];
    assert_eq!((&first["part"], &first["model"]), (&"first use".into(), &"resnet50".into()));
    assert_eq!(first["kernels"], "libtorch's kernels: kernels are for CUDA");
    assert_eq!(environment["cudnn_benchmark"], false);
    let seconds = |key: &str| first[key].as_f64().expect("seconds");
    assert!(seconds("third_seconds") > 0.0 && seconds("libtorch_seconds") > 0.0, "{first}");
    let more = seconds("first_seconds") - seconds("third_seconds");
    assert_eq!(seconds("first_use_seconds"), more);
}

#[test]
fn the_loss_in_chunks_has_the_gradients_of_whole_logits() {
    let (rows, _) = crate::program::rows(&format!("{KERNELS} --dtype f64"));
    let losses = losses(&rows);
    assert_eq!(losses.len(), 2, "nobody turns f64 into f32");
    let [ours, plain] = [0, 1].map(|place| losses[place].1["loss"].as_f64().expect("a loss"));
    assert!((ours - plain).abs() < 1e-10, "{ours} and {plain}");
    assert!(losses[0].1["gradient_difference"].as_f64() <= Some(1e-10), "{}", losses[0].1);
}

#[test]
fn people_read_lines_and_two_tables_of_what_a_folder_keeps() {
    let folder = crate::program::folder("kernels");
    let lines = predicate::str::contains("model resnet50")
        .and(predicate::str::contains("libtorch, logits in f32: "));
    run(&format!("{KERNELS} --into {}", folder.display())).success().stdout(lines);
    let head = "A head's loss, bf16 on cpu: 24 places, 50 words, width 8";
    tables(&format!("{}/ours.jsonl", folder.display())).success().stdout(
        predicate::str::contains("ResNet-50 64×64, bf16 on cpu, 2 images")
            .and(predicate::str::contains(head))
            .and(predicate::str::contains("brimful's peak : its")),
    );
}

#[test]
fn help_says_how_to_have_an_empty_cache_and_what_cannot_be_is_refused() {
    let cache = predicate::str::contains("XDG_CACHE_HOME=$(mktemp -d)");
    run(&format!("{KERNELS} --help")).success().stdout(cache);
    let refused = run(&format!("{KERNELS} --dtype tf32")).code(2);
    refused.stderr(predicate::str::contains("use --dtype f32 on the CPU"));
    run("kernels --words 0").code(2);
}
