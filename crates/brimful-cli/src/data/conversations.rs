//! Conversations as samples, stored on the disk. The model learns the answers; all other tokens are only context.

use std::ops::Range;
use std::path::Path;

use anyhow::{Result, ensure};
use tch::Tensor;

use super::chat_template::MarkedTokens;
use super::samples::{SampleRequest, SampleSource};
use super::text::{NumberFile, NumberWriter};
use super::{Dataset, Examples, IGNORED, PADDING, RowLengths, Sample, SampleSet};
use crate::setting::MeanOver;

/// Limit of a marked token: a token's number, shifted left by one bit. The lowest bit says whether the token
/// belongs to an answer.
const MARKED: i64 = 1 << 32;

/// Conversations of a file, each a sample of at most `length` tokens.
#[derive(Debug)]
pub(super) struct Conversations {
    length: i64,
    /// Marked tokens of all conversations, one conversation after the other.
    tokens: NumberWriter,
    /// End of each conversation in `tokens`.
    ends: NumberWriter,
    longest: i64,
    /// Number of conversations that are truncated to `length`.
    cut: u64,
    /// Number of conversations that are left out, because they have no answer within `length`.
    left_out: u64,
}

impl Conversations {
    pub(super) fn new(length: i64) -> Result<Self> {
        let (tokens, ends) = (NumberWriter::new(MARKED)?, NumberWriter::new(i64::MAX)?);
        Ok(Self { length, tokens, ends, longest: 0, cut: 0, left_out: 0 })
    }

    pub(super) fn push(&mut self, MarkedTokens { tokens, answers }: MarkedTokens) -> Result<()> {
        let most = self.length as usize + 1;
        let marked = tokens.iter().zip(&answers).take(most);
        // The first token is never a target.
        if !marked.clone().skip(1).any(|(_, is_answer)| *is_answer) {
            self.left_out += 1;
            return Ok(());
        }
        let marked: Vec<i64> =
            marked.map(|(token, is_answer)| token << 1 | i64::from(*is_answer)).collect();
        self.longest = self.longest.max(marked.len() as i64 - 1);
        self.cut += u64::from(tokens.len() > most);
        self.tokens.append(&marked)?;
        self.ends.append(&[self.tokens.len() as i64])
    }

    /// Makes a data set of all conversations; the last tenth is for testing.
    pub(super) fn dataset(self, path: &Path, vocabulary: i64) -> Result<Dataset> {
        let Self { length, tokens, ends, longest, cut, left_out } = self;
        let (path, count) = (path.display(), ends.len());
        ensure!(
            count > 1,
            "{path} is too short: {count} of its {} conversations have a part of an answer within {length} \
             tokens, but at least 2 are needed, one to train on and one to test on: give more of them, or a \
             longer --sequence",
            count + left_out
        );
        let mut others = match cut {
            0 => String::new(),
            _ => format!(
                "; {cut} of {count} are longer and truncated: raise --sequence to train on all of them"
            ),
        };
        if left_out > 0 {
            others += &format!("; {left_out} without an answer in them are left out");
        }
        let (tokens, ends) = (tokens.finish()?, ends.finish()?);
        let rows = |rows| ConversationRows {
            tokens: tokens.clone(),
            ends: ends.clone(),
            rows,
            longest,
            length,
        };
        let first_test = count - (count / 10).max(1);
        Ok(Dataset::of(
            [rows(0..first_test), rows(first_test..count)].map(SampleSet::streamed),
            Sample::Sequence { length, vocabulary },
            format!("{path}, conversations of up to {length} tokens{others}"),
        ))
    }
}

/// A range of the conversations: those to train on, or those to test on.
#[derive(Debug)]
struct ConversationRows {
    tokens: NumberFile,
    ends: NumberFile,
    rows: Range<u64>,
    /// Length of the longest conversation in the data, at most `length`.
    longest: i64,
    length: i64,
}

impl ConversationRows {
    /// Reads the marked tokens of one conversation.
    fn row(&self, number: usize) -> Result<Vec<i64>> {
        let row = self.rows.start + number as u64;
        let around = self.ends.read(row.saturating_sub(1)..row + 1)?;
        let start = if row == 0 { 0 } else { around[0] };
        self.tokens.read(start as u64..around[around.len() - 1] as u64)
    }
}

impl SampleSource for ConversationRows {
    fn len(&self) -> usize {
        (self.rows.end - self.rows.start) as usize
    }

    fn mean_over(&self) -> MeanOver {
        MeanOver::Targets
    }

    fn bring(&mut self, request: &SampleRequest) -> Result<Examples> {
        let rows = request.numbers.iter().map(|number| self.row(*number));
        let rows = rows.collect::<Result<Vec<_>>>()?;
        // The first token is no target, and the last token is no input.
        let lengths: Vec<i64> = rows.iter().map(|row| row.len() as i64 - 1).collect();
        let width = lengths.iter().copied().max().unwrap_or(0) as usize;
        let mut inputs = vec![PADDING; rows.len() * width];
        let mut targets = vec![IGNORED; rows.len() * width];
        for (place, row) in rows.iter().enumerate() {
            for (at, pair) in (place * width..).zip(row.windows(2)) {
                inputs[at] = pair[0] >> 1;
                targets[at] = if pair[1] & 1 == 1 { pair[1] >> 1 } else { IGNORED };
            }
        }
        let size = [rows.len() as i64, width as i64];
        let tensor = |numbers: &[i64]| Tensor::from_slice(numbers).view(size);
        let whole = Examples::whole(tensor(&inputs), tensor(&targets));
        let lengths = RowLengths { each: lengths, longest: self.longest, most: self.length };
        Ok(Examples { lengths: Some(lengths), ..whole })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO: i64 = IGNORED;

    fn conversations(length: i64, marks: &[&str]) -> Conversations {
        let mut all = Conversations::new(length).expect("a place");
        for marks in marks {
            let tokens = (1..=marks.len() as i64).collect();
            let answers = marks.chars().map(|mark| mark == 'A').collect();
            all.push(MarkedTokens { tokens, answers }).expect("kept");
        }
        all
    }

    #[test]
    fn answers_alone_are_targets_and_short_conversations_are_padded() {
        let all = conversations(5, &["..AA.A", "..A", "..A.....", ".....", "......A", ""]);
        let mut data = all.dataset(Path::new("chat.jsonl"), 9).expect("data");
        let [train, test] = [&mut data.train, &mut data.test].map(|half| half.all().expect("all"));
        let inputs = Tensor::from_slice(&[1, 2, 3, 4, 5, 1, 2, 0, 0, 0_i64]).view([2, 5]);
        let targets = [NO, 3, 4, NO, 6, NO, 3, NO, NO, NO];
        assert_eq!(train.inputs, inputs);
        assert_eq!(train.targets, Tensor::from_slice(&targets).view([2, 5]));
        assert_eq!((data.test.len(), test.targets.size()), (1, vec![1, 5]));
        let lengths = RowLengths { each: vec![5, 2], longest: 5, most: 5 };
        assert_eq!(train.lengths, Some(lengths));
        let short = data.train.bring(&SampleRequest::plain([1])).expect("one");
        assert_eq!(short.inputs, Tensor::from_slice(&[1, 2_i64]).view([1, 2]));
        let (inputs, targets) = short.into_largest();
        assert_eq!(inputs, Tensor::from_slice(&[1, 2, 0, 0, 0_i64]).view([1, 5]));
        assert_eq!(targets, Tensor::from_slice(&[NO, 3, NO, NO, NO]).view([1, 5]));
        assert_eq!(test.inputs, Tensor::from_slice(&[1, 2, 3, 4, 5_i64]).view([1, 5]));
        assert_eq!(data.sample, Sample::Sequence { length: 5, vocabulary: 9 });
        let counted = "; 1 of 3 are longer and truncated: raise --sequence to train on all of them; 3 without an \
                       answer in them are left out";
        assert!(data.description.ends_with(counted), "{}", data.description);
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
