//! Conversations as samples: their answers are learnt, the rest is what these follow on.

use std::path::Path;

use anyhow::{Result, ensure};
use tch::Tensor;

use super::chat_template::MarkedTokens;
use super::{Dataset, Examples, IGNORED, Sample};

/// What stands after a conversation's end: any token does, since no answer sees what follows it.
const PADDING: i64 = 0;

/// Conversations of a file, each a sample that is cut at so many tokens.
#[derive(Debug)]
pub(super) struct Conversations {
    length: i64,
    rows: Vec<Row>,
    /// How many have no answer within their length, so that there is nothing to learn.
    left_out: usize,
}

#[derive(Debug)]
struct Row {
    inputs: Vec<i64>,
    targets: Vec<i64>,
}

impl Conversations {
    pub(super) fn new(length: i64) -> Self {
        Self { length, rows: Vec::new(), left_out: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.left_out == 0
    }

    pub(super) fn push(&mut self, MarkedTokens { mut tokens, mut answers }: MarkedTokens) {
        let most = self.length as usize + 1;
        tokens.truncate(most);
        answers.truncate(most);
        let target = |(token, is_answer): (&i64, &bool)| if *is_answer { *token } else { IGNORED };
        let targets: Vec<i64> = tokens.iter().zip(&answers).skip(1).map(target).collect();
        if targets.iter().all(|target| *target == IGNORED) {
            self.left_out += 1;
            return;
        }
        tokens.truncate(targets.len());
        self.rows.push(Row { inputs: tokens, targets });
    }

    /// All of them, padded to the longest; the last tenth is for testing.
    pub(super) fn dataset(self, path: &Path, vocabulary: i64) -> Result<Dataset> {
        let Self { length, rows, left_out } = self;
        let (path, count) = (path.display(), rows.len());
        ensure!(
            count > 1,
            "{path} does not do: {count} of its {} conversations have a part of an answer within {length} \
             tokens, but 2 are needed, so that one is for testing: take more of them, or a longer --sequence",
            count + left_out
        );
        let others = match left_out {
            0 => String::new(),
            _ => format!("; {left_out} without an answer in them are left out"),
        };
        let width = rows.iter().map(|row| row.inputs.len()).max().unwrap_or(0);
        let (train, test) = rows.split_at(count - (count / 10).max(1));
        Ok(Dataset {
            train: examples(train, width),
            test: examples(test, width),
            sample: Sample::Sequence { length, vocabulary },
            description: format!("{path}, conversations of up to {length} tokens{others}"),
        })
    }
}

fn examples(rows: &[Row], width: usize) -> Examples {
    let inputs = rows.iter().map(|row| &row.inputs[..]);
    let targets = rows.iter().map(|row| &row.targets[..]);
    Examples { inputs: padded(inputs, width, PADDING), targets: padded(targets, width, IGNORED) }
}

fn padded<'a>(rows: impl Iterator<Item = &'a [i64]>, width: usize, padding: i64) -> Tensor {
    let filled = rows.flat_map(|row| {
        let rest = width - row.len();
        row.iter().copied().chain(std::iter::repeat_n(padding, rest))
    });
    let filled: Vec<i64> = filled.collect();
    Tensor::from_slice(&filled).view([-1, width as i64])
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO: i64 = IGNORED;

    fn conversations(length: i64, marks: &[&str]) -> Conversations {
        let mut all = Conversations::new(length);
        for marks in marks {
            let tokens = (1..=marks.len() as i64).collect();
            let answers = marks.chars().map(|mark| mark == 'A').collect();
            all.push(MarkedTokens { tokens, answers });
        }
        all
    }

    #[test]
    fn answers_alone_are_targets_and_short_conversations_are_padded() {
        let all = conversations(5, &["..AA.A", "..A", "..A", ".....", "......A", ""]);
        let data = all.dataset(Path::new("chat.jsonl"), 9).expect("data");
        let inputs = Tensor::from_slice(&[1, 2, 3, 4, 5, 1, 2, 0, 0, 0_i64]).view([2, 5]);
        let targets = [NO, 3, 4, NO, 6, NO, 3, NO, NO, NO];
        assert_eq!(data.train.inputs, inputs);
        assert_eq!(data.train.targets, Tensor::from_slice(&targets).view([2, 5]));
        assert_eq!((data.test.len(), data.test.targets.size()), (1, vec![1, 5]));
        assert_eq!(data.sample, Sample::Sequence { length: 5, vocabulary: 9 });
        assert!(data.description.ends_with("; 3 without an answer in them are left out"));
    }

    #[test]
    fn conversations_without_answers_are_refused_with_their_number() {
        let none = conversations(2, &["...A", ".A"]).dataset(Path::new("chat.jsonl"), 9);
        let error = none.expect_err("one alone has an answer").to_string();
        assert!(
            error.contains("1 of its 2 conversations have a part of an answer within 2"),
            "{error}"
        );
    }
}
