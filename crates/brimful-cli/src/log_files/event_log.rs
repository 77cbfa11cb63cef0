//! Folder of events for TensorBoard: one event for each step and each test.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};

use super::{KeptLog, Log, LogFormat, StepFigures, TestFigures, tensorboard};

/// Name of the folder's only file. TensorBoard recognises it, and a resumed run finds it again.
const FILE: &str = "events.out.tfevents.brimful";
/// Tag of a test's loss.
const TEST_LOSS: &str = "test/loss";

/// Returns the path of a folder's events.
pub(crate) fn events_file(folder: &Path) -> PathBuf {
    folder.join(FILE)
}

/// Log format of TensorBoard events.
#[derive(Debug)]
pub(super) struct Events;

/// Opens the events in this folder, which is created if missing; see [`Log::open`].
pub(super) fn open(folder: &Path, resumed: Option<usize>) -> Result<Log<Events>> {
    let made = fs::create_dir_all(folder);
    made.with_context(|| format!("cannot make the folder {}", folder.display()))?;
    Log::open(&events_file(folder), resumed)
}

impl LogFormat for Events {
    fn beginning() -> Vec<u8> {
        tensorboard::first_record(now())
    }

    fn kept(bytes: &[u8], last: usize) -> Result<Option<KeptLog>, &'static str> {
        if bytes.is_empty() {
            return Ok(None);
        }
        let upto = |record: &&[u8]| tensorboard::step_of(record) <= last;
        let kept: Vec<_> = tensorboard::records(bytes).take_while(upto).collect();
        if kept.is_empty() {
            return Err("holds no events: name another folder");
        }
        let tested = kept.iter().rev().find(|record| tensorboard::has(record, TEST_LOSS));
        let tested = tested.map(|record| tensorboard::step_of(record));
        Ok(Some(KeptLog { bytes: kept.iter().map(|record| record.len()).sum(), tested }))
    }

    fn step(figures: &StepFigures<'_>) -> Vec<u8> {
        let record = figures.record;
        let values = [
            ("train/loss", record.loss),
            ("train/learning_rate", figures.learning_rate),
            ("train/epoch", figures.epoch as f64),
            ("speed/samples_per_s", figures.samples_per_s()),
            ("memory/peak_bytes", record.peak().0 as f64),
            ("memory/micro_batch_size", record.micro_batch as f64),
            ("memory/retries", record.retries as f64),
        ];
        tensorboard::scalars(now(), figures.step, &values)
    }

    fn test(figures: &TestFigures) -> Vec<u8> {
        let values = [(TEST_LOSS, figures.loss), ("test/accuracy", figures.accuracy)];
        tensorboard::scalars(now(), figures.step, &values)
    }
}

/// Returns the seconds since 1970, or 0 if the clock shows an earlier time.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{step, test};
    use super::*;

    fn steps(folder: &Path) -> Vec<usize> {
        let bytes = fs::read(folder.join(FILE)).expect("a file");
        tensorboard::records(&bytes).map(tensorboard::step_of).collect()
    }

    #[test]
    fn a_resumed_log_has_the_events_of_an_undisturbed_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path().join("runs/first");
        let mut log = open(&folder, None).expect("a log");
        for number in 1..=3 {
            log.step(&step(number));
        }
        log.test(&test(3));
        log.step(&step(4));
        drop(log);
        let mut log = open(&folder, Some(3)).expect("a log");
        log.test(&test(3));
        log.step(&step(4));
        log.test(&test(4));
        drop(log);
        // The first record has no step.
        assert_eq!(steps(&folder), [0, 1, 2, 3, 3, 4, 4]);
        open(&folder, None).expect("a log");
        assert_eq!(steps(&folder), [0]);
    }

    #[test]
    fn a_broken_event_is_dropped_and_what_holds_no_events_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut log = open(folder.path(), None).expect("a log");
        log.step(&step(1));
        log.step(&step(2));
        drop(log);
        let path = folder.path().join(FILE);
        let bytes = fs::read(&path).expect("a file");
        fs::write(&path, &bytes[..bytes.len() - 1]).expect("a killed run's last event");
        open(folder.path(), Some(9)).expect("a log").step(&step(2));
        assert_eq!(steps(folder.path()), [0, 1, 2]);
        fs::write(&path, "no events").expect("written");
        let error = open(folder.path(), Some(9)).expect_err("no events").to_string();
        assert!(error.ends_with("holds no events: name another folder"), "{error}");
    }
}
