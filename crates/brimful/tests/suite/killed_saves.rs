//! A process that is killed while it saves leaves a complete file and a complete folder: the new ones, or the
//! previous ones.
//!
//! `BRIMFUL_KILLS=200` kills more often than the suite does.

use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use brimful::save::{self, Metadata};
use tch::Tensor;

/// Variable with the folder of the process that saves.
const SAVES: &str = "BRIMFUL_TEST_SAVES";
/// Number of kills in the suite.
const KILLS: u64 = 10;
/// Longest time until a kill, about ten saves.
const LONGEST_US: u64 = 30_000;

fn write(path: &Path, number: i64) {
    let tensors =
        [("number".to_owned(), Tensor::from(number)), ("all".to_owned(), numbers(number))];
    save::write(path, &tensors, &Metadata::new()).expect("written");
}

/// Large enough that a file is written in several pieces.
fn numbers(number: i64) -> Tensor {
    Tensor::full([20_000], number, (tch::Kind::Int64, tch::Device::Cpu))
}

/// Returns the number that all of a file was written with.
fn number(path: &Path) -> i64 {
    let (tensors, _) = save::read(path).expect("a whole file");
    let number = tensors[1].1.int64_value(&[]);
    assert_eq!(tensors[0].1, numbers(number), "{}", path.display());
    number
}

/// Saves a file, a folder of two files, and a numbered file with a second name, in a loop.
fn save_until_killed(folder: &Path) {
    let first = last(folder).unwrap_or(0) + 1;
    for save in first.. {
        write(&folder.join("file"), save);
        save::replace_folder(folder.join("model"), |new| {
            write(&new.join("one"), save);
            write(&new.join("two"), save);
            Ok::<_, brimful::Error>(())
        })
        .expect("written");
        let numbered = folder.join(format!("numbered-{}", save % 2));
        write(&numbered, save);
        save::replace_by_link(&numbered, folder.join("linked")).expect("linked");
        if save == first {
            writeln!(std::io::stdout(), "saving").expect("the test reads");
        }
    }
}

/// Returns the number of the last save, if any. Checks that all files are complete, and from that save or the next.
fn last(folder: &Path) -> Option<i64> {
    folder.join("linked").exists().then(|| {
        let file = number(&folder.join("file"));
        let [one, two] = ["one", "two"].map(|name| number(&folder.join("model").join(name)));
        let linked = number(&folder.join("linked"));
        assert_eq!(one, two, "a folder of two saves");
        assert!(file - one <= 1 && one <= file, "{file} and {one}");
        assert!(one - linked <= 1 && linked <= one, "{one} and {linked}");
        linked
    })
}

#[test]
fn what_is_there_after_a_kill_is_whole() {
    if let Some(folder) = env::var_os(SAVES) {
        return save_until_killed(Path::new(&folder));
    }
    let kills = env::var("BRIMFUL_KILLS").map_or(KILLS, |kills| kills.parse().expect("a number"));
    let folder = tempfile::tempdir().expect("a folder");
    let mut before = 0;
    for kill in 0..kills {
        let mut saver = Command::new(env::current_exe().expect("the test's own program"))
            .args(["--exact", "killed_saves::what_is_there_after_a_kill_is_whole", "--nocapture"])
            .env(SAVES, folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let lines = BufReader::new(saver.stdout.take().expect("a pipe")).lines();
        let reported = lines.map_while(Result::ok).any(|line| line.ends_with("saving"));
        assert!(reported, "it has ended by itself");
        // A stride that covers the whole range, whatever the number of kills.
        let random = u64::from(saver.id()).wrapping_mul(0x9E37_79B9) + kill * 7919;
        sleep(Duration::from_micros(random % LONGEST_US));
        saver.kill().expect("killed");
        saver.wait().expect("gone");
        let last = last(folder.path()).expect("a save");
        assert!(last > before, "{last} after {before}");
        before = last;
    }
    // At most one partial file for each kill.
    let left = fs::read_dir(folder.path()).expect("a folder").count() as u64;
    assert!(left <= kills + 5, "{left} files");
    for name in ["file", "model", "linked", "numbered-0", "numbered-1"] {
        save::remove_left_over(folder.path().join(name));
    }
    let names = fs::read_dir(folder.path())
        .expect("a folder")
        .map(|entry| entry.expect("an entry").file_name());
    let mut names: Vec<_> = names.collect();
    names.sort();
    let hidden = names.iter().filter(|name| name.to_string_lossy().starts_with('.')).count();
    assert_eq!((names.len(), hidden), (5, 0), "{names:?}");
}
