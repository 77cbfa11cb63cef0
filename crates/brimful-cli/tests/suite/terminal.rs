//! Terminal output: progress, and the effect of Ctrl-C.

use std::path::Path;
use std::process::Command as Process;

use crate::program::{folder, saved, text};
use rexpect::process::WaitStatus;
use rexpect::session::{PtySession, spawn_command};

/// Timeout that no step of these tests reaches, even on a busy machine.
const HEARTBEAT_TIMEOUT: Option<u64> = Some(60_000);
/// Arguments for training a model with dropout.
const TRAIN: &str = "train --model gpt --device cpu --micro-batch-size 4 --data";

fn on_a_terminal(arguments: &str) -> PtySession {
    on_a_terminal_of(160, arguments)
}

fn on_a_terminal_of(columns: usize, arguments: &str) -> PtySession {
    let mut process = Process::new("sh");
    process.args(["-c", &format!(r#"stty rows 24 cols {columns}; exec "$@""#), "sh"]);
    process.arg(env!("CARGO_BIN_EXE_brimful"));
    process.args(arguments.split_whitespace()).env_remove("LD_LIBRARY_PATH").env("TERM", "xterm");
    spawn_command(process, HEARTBEAT_TIMEOUT).expect("a terminal")
}

/// Returns the rest of the output until the program ends, and asserts its exit code.
fn ends(mut session: PtySession, code: i32) -> String {
    let rest = session.exp_eof().expect("the end");
    match session.process().wait() {
        Ok(WaitStatus::Exited(_, found)) => assert_eq!(found, code),
        other => panic!("{other:?}"),
    }
    rest
}

#[test]
fn progress_shows_rate_time_size_and_memory() {
    let data = text(&folder("progress"));
    let limits = "--batch-size 8 --epochs 1 --memory-limit 1GiB";
    let mut session = on_a_terminal(&format!("{TRAIN} {data} {limits}"));
    let seen = "[0-9]+/[0-9]+ samples  [0-9.]+ samples/s  [0-9]+ s left  epoch 1/1  micro-batch size 4  \
                [0-9.]+ MiB of 1.00 GiB  loss [0-9.]+";
    session.exp_regex(seen).expect("a bar");
    session
        .exp_regex("epoch +1  loss .* acc .* % .* samples/s  [0-9.]+ MiB")
        .expect("the epoch's line");
    ends(session, 0);
}

#[test]
fn a_long_step_shows_how_far_it_is() {
    let data = text(&folder("within"));
    let one_step =
        "train --model gpt --device cpu --micro-batch-size 1 --batch-size all --epochs 1";
    let mut session = on_a_terminal(&format!("{one_step} --data {data}"));
    session.exp_regex("[^0-9]([1-9]|[1-4][0-9])/63 samples").expect("a part of the only step");
    ends(session, 0);
}

#[test]
fn a_long_plan_shows_how_far_it_is() {
    let numbers = "plan -s 100 -m 100 --schedule gpipe,1f1b,zero-bubble-h1";
    let profile = "plan --profile tests/data/model.toml --batch-size 64 -s 4 --schedule gpipe,1f1b";
    for (arguments, seen) in
        [(numbers, "/3 schedules  .* left  1f1b"), (profile, "/[0-9]+ plans  ")]
    {
        let mut session = on_a_terminal(arguments);
        session.exp_regex(seen).expect("a bar");
        ends(session, 0);
    }
}

/// The progress line must not wrap: when it is redrawn, only one line is cleared.
#[test]
fn the_progress_line_is_no_wider_than_a_narrow_terminal() {
    const COLUMNS: usize = 40;
    let arguments = "train --epochs 1 --device cpu --micro-batch-size 16";
    let mut session = on_a_terminal_of(COLUMNS, arguments);
    let all = session.exp_eof().expect("the end");
    let drawn = all.split(['\r', '\n', '\u{1b}']).filter(|part| part.contains(" samples  "));
    let drawn: Vec<&str> = drawn.filter(|part| part.contains('/')).collect();
    assert!(!drawn.is_empty(), "{all:?}");
    for line in drawn {
        let line = line.trim_start_matches(|c: char| c == '[' || c.is_ascii_digit() || c == 'K');
        // Each character of the bar arrives as three bytes.
        let bytes = line.chars().filter(|c| !c.is_ascii()).count();
        assert!(line.chars().count() - bytes + bytes / 3 <= COLUMNS, "{line:?}");
    }
}

#[test]
fn quiet_shows_no_progress() {
    let mut session = on_a_terminal("train --epochs 2 --device cpu --quiet");
    let all = session.exp_eof().expect("the end");
    assert!(all.contains("epoch   2  loss") && !all.contains("left"), "{all}");
}

/// Dropout, moments, order and position within the epoch must all be restored.
#[test]
fn ctrl_c_finishes_the_step_saves_and_says_how_to_go_on() {
    let folder = folder("ctrl-c");
    let (whole, stopped) = (folder.join("whole.safetensors"), folder.join("stopped.safetensors"));
    let data = text(&folder);
    let train =
        |path: &Path| format!("{TRAIN} {data} --batch-size 8 --epochs 3 --save {}", path.display());

    ends(on_a_terminal(&train(&whole)), 0);

    let mut session = on_a_terminal(&train(&stopped));
    session.exp_regex("epoch 1/3  micro-batch size 4").expect("a first step");
    session.send_control('c').expect("Ctrl-C");
    session.exp_string("finishing the step; press again to end at once").expect("a notice");
    session.exp_regex("interrupted after .*epoch [123] and saved to").expect("a story");
    let rest = ends(session, 130);
    let (_, told) = saved(&stopped);
    assert_ne!((told["epoch"].as_str(), told["step"].as_str()), ("0", "0"));
    assert_ne!(told["epoch"], "3");

    // Runs the printed command, word for word.
    let command =
        rest.lines().find_map(|line| line.split_once("brimful train")).expect("a command").1;
    assert!(command.contains("--resume"), "{command}");
    ends(on_a_terminal(&format!("train{command}")), 0);
    assert_eq!(saved(&stopped), saved(&whole));
}

#[test]
fn without_a_place_to_save_it_says_what_is_lost_and_a_second_ctrl_c_ends_at_once() {
    let data = text(&folder("lost"));
    let mut session = on_a_terminal(&format!("{TRAIN} {data} --batch-size 8 --epochs 50"));
    session.exp_regex("epoch 1/50").expect("a first step");
    session.send_control('c').expect("Ctrl-C");
    session.exp_string("nothing was saved: give --save FILE to resume").expect("a warning");
    ends(session, 130);

    // One step takes long enough that both signals arrive within it.
    let mut session = on_a_terminal(&format!("{TRAIN} synthetic --batch-size all --epochs 50"));
    session.exp_string("samples to train on").expect("a beginning");
    session.exp_string("0/25600 samples").expect("a bar");
    session.send_control('c').expect("Ctrl-C");
    session.exp_string("press again to end at once").expect("a notice");
    session.send_control('c').expect("Ctrl-C");
    ends(session, 130);
}
