//! Run files and their pages from the command line: what is written, and what is refused and why.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command as Process;
use std::sync::LazyLock;

use crate::program::{complains, names, run};
use brimful_report::{Ended, Run};
use predicates::prelude::*;
use serde_json::{Value, json};

/// Makes an empty folder for a test.
fn folder(name: &str) -> PathBuf {
    crate::program::folder(&format!("report-{name}"))
}

/// Recording of a short run in two stages.
static RECORDED: LazyLock<PathBuf> = LazyLock::new(|| {
    let path = folder("recorded").join("run.json");
    let arguments = "train --epochs 2 --stages 2 --num-micro-batches 4 --batch-size 400 \
                     --memory-limit 16MiB --device cpu --record";
    run(&format!("{arguments} {}", path.display())).success();
    path
});

/// Returns the arguments that make a page of this run file.
fn report(path: &Path, page: &Path) -> String {
    format!("report {} -o {}", path.display(), page.display())
}

#[test]
fn a_run_is_recorded_and_becomes_a_page() {
    let run = Run::read(&*RECORDED).expect("a run");
    assert_eq!(run.ended, Ended::Finished);
    assert_eq!((run.steps.every, &run.steps.number[..]), (1, &[1, 2, 3, 4, 5, 6, 7, 8][..]));
    assert!(run.steps.loss.iter().all(|loss| loss.is_some_and(|loss| loss > 0.0)));
    assert_eq!(run.steps.micro_batch, [100, 100, 100, 60, 100, 100, 100, 60]);
    assert_eq!(run.tests.iter().map(|test| test.step).collect::<Vec<_>>(), [4, 8]);
    let limits = run.devices.iter().map(|device| device.limit.map(|limit| limit.0));
    assert_eq!(limits.collect::<Vec<_>>(), [Some(16 << 20); 2]);
    for peaks in &run.steps.peaks {
        assert!(peaks.iter().flatten().all(|peak| (1..16 << 20).contains(&peak.0)));
    }
    let settings: BTreeMap<_, _> = run.settings.into_iter().collect();
    assert!(settings["command"].contains("train --epochs 2 --stages 2"), "{settings:?}");
    assert_eq!((&*settings["schedule"], &*settings["learning rate decay"]), ("1f1b", "none"));
    assert!(settings["started"].ends_with(" UTC"), "{settings:?}");

    let titles: String = run.timelines.iter().map(|step| step.title.as_str()).collect();
    for role in ["step 1: first", "slowest", "fastest", "last"] {
        assert!(titles.contains(role), "{role} is not in {titles}");
    }
    for step in &run.timelines {
        let (measured, simulated) =
            (step.measured.as_ref().expect("run"), step.simulated.as_ref().expect("simulated"));
        assert_eq!((measured.stages, measured.micro_batches), (2, 4));
        assert_eq!(measured.lanes[1].kinds, "FBFBFBFB");
        assert_eq!(measured.lanes[1].kinds, simulated.lanes[1].kinds);
        assert!(measured.lanes.iter().all(|lane| lane.bytes.iter().all(|bytes| *bytes > 0)));
        // Both do the same work; the simulation only lacks waiting that the schedule does not require.
        let busy = |timeline: &brimful_report::TimelineRecord| timeline.lanes[0].busy;
        assert!((busy(measured) - busy(simulated)).abs() < 1e-9);
    }

    let page = folder("whole").join("run.html");
    let said = format!("wrote {}\n", page.display());
    crate::program::run(&report(&RECORDED, &page)).success().stdout(said);
    let text = fs::read_to_string(&page).expect("a page");
    assert!(text.starts_with("<!DOCTYPE html>") && text.contains("16.0 MiB"));
    for outside in ["http://", "https://", "src=", "@import", "{{"] {
        let found = text.replace("http://www.w3.org/2000/svg", "").matches(outside).count();
        assert_eq!(found, 0, "{outside} in the page");
    }
}

#[test]
fn a_run_that_fails_is_recorded_as_far_as_it_went() {
    let folder = folder("failed");
    let (path, page) = (folder.join("run.json"), folder.join("run.html"));
    let arguments = "train --micro-batch-size 128 --memory-limit 3MiB --offload none --device cpu";
    let files = format!("--record {} --report {}", path.display(), page.display());
    complains(&format!("{arguments} {files}"), 3, "out of memory in arena 'cpu'");
    let run = Run::read(&path).expect("a run");
    let Ended::Failed(why) = &run.ended else { panic!("it {:?}", run.ended) };
    assert!(
        why.starts_with("out of memory") && why.contains("the optimizer state of adamw"),
        "{why}"
    );
    assert_eq!(run.steps.number, [1], "the first step, before the optimizer has its state");
    assert!(page.exists());
}

#[test]
fn an_automatic_size_tells_its_story() {
    let path = folder("auto").join("run.json");
    let arguments = "train --batch-size all --memory-limit 8MiB --epochs 3 --device cpu --record";
    run(&format!("{arguments} {}", path.display())).success();
    let run: Value = serde_json::from_slice(&fs::read(&path).expect("a run")).expect("JSON");
    let first = &run["decisions"][0];
    assert_eq!((&first["step"], &first["outcome"]), (&json!(1), &json!("tried")), "{first}");
    assert_eq!(first["why"], "small, to see what a sample needs");
    let outcomes = run["decisions"].as_array().expect("decisions").iter().map(|d| &d["outcome"]);
    assert!(outcomes.into_iter().any(|outcome| outcome == "chosen"), "{run}");
}

#[test]
fn a_plan_becomes_a_page_too() {
    let page = folder("plan").join("plan.html");
    run(&format!("plan -s 4 -m 8 --forward 3 --report {}", page.display())).success();
    let text = fs::read_to_string(&page).expect("a page");
    for words in [
        "1f1b, m = 8",
        "zero-bubble-v, m = 8",
        r#""ended":"planned""#,
        "plan -s 4 -m 8 --forward 3",
        r#""started""#,
        r#""forward of a device","3""#,
        r#""schedules""#,
    ] {
        assert!(text.contains(words), "{words}");
    }
}

#[test]
fn files_that_are_no_run_files_are_refused_in_one_line() {
    let folder = folder("refused");
    let whole = fs::read_to_string(&*RECORDED).expect("a run");
    let changed = |key: &str, value: Value| {
        let mut run: Value = serde_json::from_str(&whole).expect("JSON");
        *run.pointer_mut(key).expect(key) = value;
        run.to_string()
    };
    let cases = [
        (whole[..whole.len() / 2].to_owned(), "is damaged (EOF"),
        (String::new(), "is not a run file (EOF"),
        ("not JSON at all".into(), "is not a run file (expected"),
        (r#"{"traceEvents":[]}"#.into(), "is not a run file (missing field `format`"),
        (changed("/format", json!("other")), "is not a run file (its format is 'other')"),
        (changed("/version", json!(2)), "of version 2, but this program reads version 1: use the"),
        (changed("/steps/loss", json!([0.5])), "8 steps, but 1 entries in 'loss'"),
        (changed("/steps/loss/0", json!("much")), "is damaged (invalid type: string"),
        (changed("/steps/peaks", json!([])), "peaks of 0 devices, but there are 2"),
        (changed("/timelines/0/measured/lanes/0/kinds", json!("FFX")), "'X' among the actions of"),
        (changed("/timelines/0/measured/lanes/0/times", json!([1])), "1 entries in 'times' of"),
        (changed("/timelines/0/measured/lanes/0/stages", json!([7])), "that the step has not"),
        (changed("/timelines/0/measured/resolution", json!(0)), "in counts of 0"),
    ];
    let page = folder.join("page.html");
    for (text, words) in cases {
        let path = folder.join("bad.json");
        fs::write(&path, text).expect("written");
        let refused = complains(&report(&path, &page), 1, words);
        refused.stderr(predicate::str::contains("bad.json"));
        assert!(!page.exists(), "{words}");
    }
    complains("report /no/such/run.json", 1, "cannot read '/no/such/run.json': No such file");
}

#[test]
fn a_page_that_cannot_be_written_leaves_nothing_behind() {
    let folder = folder("full");
    let full = "cannot write '/dev/full': No space left on device (os error 28): make room";
    for (place, code, words) in [
        ("/dev/full", 1, full),
        ("/no/such/folder/page.html", 2, "there is no folder /no/such/folder"),
        (folder.to_str().expect("a path"), 2, "it is a folder: name a file"),
    ] {
        complains(&report(&RECORDED, Path::new(place)), code, words);
    }
    assert!(fs::metadata("/dev/full").is_ok_and(|found| !found.is_file()), "it is as it was");

    // A disk that fills up during the write: the page is larger than the shell's limit on files.
    let page = folder.join("page.html");
    fs::write(&page, "the page before").expect("written");
    let refused = Process::new("sh")
        .args(["-c", r#"trap '' XFSZ; ulimit -f 16; exec "$@""#, "sh"])
        .args([env!("CARGO_BIN_EXE_brimful"), "report"])
        .args([RECORDED.as_path(), Path::new("-o"), &page])
        .output()
        .expect("sh");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("File too large"), "{said}");
    assert_eq!(fs::read_to_string(&page).expect("a page"), "the page before");
    assert_eq!(names(&folder), ["page.html"]);
}
