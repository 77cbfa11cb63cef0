//! Tests of `bench/tables` and `--into`: joined rows of several programs.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::program::{folder, run, tables};
use predicates::prelude::*;
use serde_json::{Value, json};

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

/// Makes a row of `bench micro` with these figures.
fn micro(contestant: &str, figures: Value) -> Value {
    let mut row = json!({
        "bench": "micro", "contestant": contestant, "model": "resnet50", "shape": "32×32",
        "dtype": "f32", "device": "cpu", "batch": 16, "micro_batch": 4, "stages": 1,
    });
    let (Value::Object(all), Value::Object(figures)) = (&mut row, figures) else {
        unreachable!("both are objects")
    };
    all.extend(figures);
    row
}

#[test]
fn a_peer_that_failed_is_shown_with_its_error_beside_ours() {
    let folder = folder("tables");
    let (ours, peers) = (folder.join("ours.jsonl"), folder.join("peers.jsonl"));
    let fast = micro("brimful", json!({"samples_per_s": 3000.0, "spread": 0.1}));
    fs::write(
        &ours,
        format!("{fast}\n{}\n", json!({"done": true, "environment": {"program": "brimful"}})),
    )
    .expect("written");
    let slow = micro("PyTorch loop", json!({"samples_per_s": 2000.0, "seconds": [0.008, 0.009]}));
    let broken = micro("MBP", json!({"error": "ModuleNotFoundError: <mbp> | no"}));
    fs::write(&peers, format!("{slow}\n{broken}\n")).expect("written");

    let files = format!("{} {}", text(&ours), text(&peers));
    let line = predicate::str::is_match("brimful +3,000 +1.500 +1.500 ").expect("a pattern");
    let error =
        predicate::str::is_match("MBP +ModuleNotFoundError: <mbp> . no").expect("a pattern");
    tables(&files).success().stdout(
        predicate::str::contains("ResNet-50 32×32, f32, 16 / 4")
            .and(line)
            .and(error)
            .and(predicate::str::contains("peers.jsonl: stopped before its last row")),
    );
    let lines = "| brimful | 3,000 | 1.500 | 1.500 | – | – | 10.0 % | – | – |\n\
                 | PyTorch loop | 2,000 | 1.000 | 1.000 | – | – | – | – | – |\n\
                 | MBP | ModuleNotFoundError: <mbp> \\| no |  |  |  |  |  |  |  |\n";
    tables(&format!("--markdown {files}")).success().stdout(predicate::str::contains(lines));
    let output = tables(&format!("--json {files}")).success().get_output().clone();
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(report["rows"][0]["over_best_peer"], 1.5);
    assert_eq!(report["rows"][2]["error"], "ModuleNotFoundError: <mbp> | no");

    let picture = tables(&format!("--svg {files}")).success().get_output().stdout.clone();
    let picture = String::from_utf8(picture).expect("text");
    assert!(picture.starts_with("<svg") && picture.contains("&lt;mbp&gt; | no"), "{picture}");
    // One on the bar for each measurement, and one in the legend.
    assert_eq!(picture.matches("<circle").count(), 3);
}

#[test]
fn ranks_are_compared_with_one_process_and_with_the_peer() {
    let rows = folder("ranks").join("rows.jsonl");
    let row = |contestant: &str, speed: f64| {
        json!({
            "bench": "world", "contestant": contestant, "model": "gpt", "shape": "2×64×8",
            "dtype": "f32", "batch": 4, "micro_batch": 1, "stages": 2, "samples_per_s": speed,
        })
    };
    let all =
        [("brimful", 8.0), ("brimful over ranks", 6.0), ("torch.distributed.pipelining", 4.0)];
    let lines = all.map(|(contestant, speed)| row(contestant, speed).to_string());
    fs::write(&rows, lines.join("\n")).expect("written");
    let compared = tables(&format!("--markdown {}", text(&rows))).success();
    compared.stdout(predicate::str::contains("| brimful over ranks | 2 | 6.00 | 0.750 | 1.500 |"));
}

#[test]
fn saved_rows_become_a_table() {
    let folder = folder("saved");
    let micro = "micro --device cpu --model mlp --batch-size 8 --micro-batch-size 4 --repeats 1";
    run(&format!("{micro} --into {}", text(&folder))).success();
    let rows = fs::read_to_string(folder.join("ours.jsonl")).expect("rows");
    let last: Value =
        rows.lines().last().and_then(|l| serde_json::from_str(l).ok()).expect("a line");
    assert_eq!(last["done"], true);
    assert_eq!(rows.lines().count(), 1 + last["rows"].as_array().map_or(0, Vec::len));
    let line = |name: &str| predicate::str::contains(format!("\n| {name} | "));
    let table = tables(&format!("--markdown {}", text(&folder.join("ours.jsonl")))).success();
    table.stdout(line("tch loop").and(line("brimful")));
}

#[test]
fn an_interrupted_run_keeps_its_rows_and_says_so() {
    let folder = folder("interrupted");
    let rows = folder.join("ours.jsonl");
    // Far more stages than can be measured before the first row is seen.
    let stages = vec!["1"; 1000].join(",");
    let work =
        ["pipeline", "--model", "mlp", "--num-micro-batches", "2", "--micro-batch-size", "2"];
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_brimful-bench"))
        .args(work)
        .args(["--repeats", "1", "--stages", &stages, "--into", text(&folder)])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("started");
    while fs::read_to_string(&rows).unwrap_or_default().lines().count() < 2 {
        assert!(child.try_wait().expect("a state").is_none(), "it ended by itself");
        std::thread::sleep(Duration::from_millis(20));
    }
    let id = child.id().to_string();
    let killed = std::process::Command::new("kill").args(["-INT", &id]).status().expect("kill");
    assert!(killed.success());
    let output = child.wait_with_output().expect("an end");
    assert_eq!(output.status.code(), Some(130));
    let said = String::from_utf8(output.stderr).expect("text");
    assert!(
        said.contains("brimful-bench: interrupted: ") && said.contains(" rows are kept in "),
        "{said}"
    );
    tables(text(&rows)).success().stdout(predicate::str::contains("stopped before its last row"));
}

#[test]
fn what_cannot_be_joined_is_refused_in_one_line() {
    let folder = folder("refused");
    for (content, words) in [
        ("", "there is no row"),
        ("{\"bench\": \"sleep\"}\n", "no benchmark that is known"),
        ("samples 3\n", "rows.jsonl:1: this is no line of JSON"),
    ] {
        let path = folder.join("rows.jsonl");
        fs::write(&path, content).expect("written");
        tables(text(&path)).failure().stderr(predicate::str::contains(words));
    }
    let said = predicate::str::contains("cannot read nowhere.jsonl");
    tables("nowhere.jsonl").failure().stderr(said);
}

#[test]
fn stored_tables_and_pictures_are_those_of_their_rows() {
    for (name, rows, shown) in [
        ("auto/h200-2048", "ours peers", "table plot"),
        ("convergence/h200", "ours", "table plot"),
        ("kernels/h200-stem/gpt", "ours peers", "table plot"),
        ("pipeline/16-core", "ours peers", "table plot"),
        ("pipeline/split-backward/h200", "ours peers", "table"),
        ("real/finetune", "ours peers", "table plot"),
        ("real/loader", "ours peers", "table plot"),
        ("real/ragged", "ours", "table plot"),
        ("world/2-core", "data data-peers", "data"),
        ("world/2-core", "pipeline pipeline-peers", "pipeline"),
    ] {
        let folder = Path::new("../../bench/results").join(name);
        let paths = rows.split(' ').map(|rows| folder.join(format!("{rows}.jsonl")));
        let paths: Vec<String> = paths.map(|path| text(&path).to_owned()).collect();
        for shown in shown.split(' ') {
            for (format, ending) in [("--markdown", "md"), ("--svg", "svg")] {
                let path = folder.join(format!("{shown}.{ending}"));
                let Ok(stored) = fs::read_to_string(&path) else { continue };
                let made = tables(&format!("{format} {}", paths.join(" "))).success();
                assert_eq!(String::from_utf8_lossy(&made.get_output().stdout), stored, "{path:?}");
            }
        }
    }
}
