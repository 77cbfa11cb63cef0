//! Table of steps as comma-separated values: one line for each step and each test.

use brimful_report::Record;

use super::{KeptLog, LogFormat, StepFigures, TestFigures};

/// Columns of the table. A test has its own line, because the line of its step is written earlier. In the line of
/// a test, the columns of a step are empty.
const HEADER: &str = "step,epoch,loss,learning_rate,samples_per_s,peak_bytes,micro_batch_size,\
                      retries,test_loss,test_accuracy\n";
/// Empty columns between a test's epoch and its loss.
const NOT_OF_A_TEST: &str = ",,,,,,,";

/// Log format of the table of steps.
#[derive(Debug)]
pub(super) struct StepTable;

impl LogFormat for StepTable {
    fn beginning() -> Vec<u8> {
        HEADER.into()
    }

    fn kept(bytes: &[u8], last: usize) -> Result<Option<KeptLog>, &'static str> {
        let text = String::from_utf8_lossy(bytes);
        if HEADER.starts_with(&*text) {
            return Ok(None);
        }
        if !text.starts_with(HEADER) {
            return Err("is no log of steps: name another file");
        }
        let kept = kept(&text, last);
        let tested = kept.iter().rev().find(|line| line.contains(NOT_OF_A_TEST));
        let tested = tested.and_then(|line| step_of(line));
        Ok(Some(KeptLog { bytes: kept.iter().map(|line| line.len()).sum(), tested }))
    }

    fn step(figures: &StepFigures<'_>) -> Vec<u8> {
        let StepFigures { step, epoch, learning_rate, record } = figures;
        let Record { loss, micro_batch, retries, .. } = record;
        let (samples_per_s, peak) = (figures.samples_per_s(), record.peak().0);
        // Numbers that a resumed run must reproduce are written exactly.
        let line = format!(
            "{step},{epoch},{loss:?},{learning_rate:?},{samples_per_s:.1},{peak},{micro_batch},\
             {retries},,\n"
        );
        line.into_bytes()
    }

    fn test(TestFigures { step, epoch, loss, accuracy, .. }: &TestFigures) -> Vec<u8> {
        format!("{step},{epoch}{NOT_OF_A_TEST}{loss:?},{accuracy:?}\n").into_bytes()
    }
}

/// Returns the header and the whole lines up to this step.
fn kept(text: &str, last: usize) -> Vec<&str> {
    let header = text.split_inclusive('\n').take(1);
    let whole =
        |line: &&str| line.ends_with('\n') && step_of(line).is_some_and(|step| step <= last);
    header.chain(text.split_inclusive('\n').skip(1).take_while(whole)).collect()
}

fn step_of(line: &str) -> Option<usize> {
    line.split(',').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::super::Log;
    use super::super::tests::{step, test};
    use super::*;
    use std::fs;

    type StepLog = Log<StepTable>;

    #[test]
    fn every_step_and_every_test_has_a_line() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log.csv");
        let mut log = StepLog::open(&path, None).expect("a log");
        log.step(&step(2));
        log.test(&test(2));
        let text = fs::read_to_string(&path).expect("a log");
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[1..], ["2,1,0.5,0.001,1234.6,1048576,16,0,,", "2,1,,,,,,,0.5,0.75"]);
        let columns = |line: &str| line.matches(',').count();
        assert!(lines.iter().all(|line| columns(line) == columns(HEADER)), "{text}");
    }

    #[test]
    fn a_resumed_log_ends_as_an_undisturbed_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let [whole, broken] = ["whole.csv", "broken.csv"].map(|name| folder.path().join(name));
        let run = |log: &mut StepLog, steps: std::ops::RangeInclusive<usize>| {
            for number in steps {
                log.step(&step(number));
                if number % 4 == 0 {
                    log.test(&test(number));
                }
            }
        };
        run(&mut StepLog::open(&whole, None).expect("a log"), 1..=10);
        run(&mut StepLog::open(&broken, None).expect("a log"), 1..=9);
        let text = fs::read_to_string(&broken).expect("a log");
        fs::write(&broken, &text[..text.len() - 3]).expect("a killed run's last line");
        let mut log = StepLog::open(&broken, Some(4)).expect("a log");
        // The resumed run repeats the test after the last saved step.
        log.test(&test(4));
        run(&mut log, 5..=10);
        assert_eq!(
            fs::read_to_string(&broken).expect("a log"),
            fs::read_to_string(&whole).expect("a log")
        );
    }

    #[test]
    fn a_resumed_run_without_a_log_begins_one() {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, before) in [("none", None), ("empty", Some("")), ("header", Some(&HEADER[..9]))]
        {
            let path = folder.path().join(name);
            if let Some(text) = before {
                fs::write(&path, text).expect("written");
            }
            StepLog::open(&path, Some(3)).expect("a log").step(&step(4));
            let text = fs::read_to_string(&path).expect("a log");
            assert!(text.starts_with(HEADER) && text.contains("\n4,2,"), "{text}");
        }
    }

    #[test]
    fn what_is_no_log_is_left_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("thesis.tex");
        fs::write(&path, "\\begin{document}").expect("written");
        let error = StepLog::open(&path, Some(3)).expect_err("no log").to_string();
        assert!(error.ends_with("is no log of steps: name another file"), "{error}");
        assert_eq!(fs::read_to_string(&path).expect("there"), "\\begin{document}");
    }
}
