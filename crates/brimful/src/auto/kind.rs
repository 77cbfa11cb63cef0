//! Kinds of mini-batches, distinguished by use and by a sample's shape and dtype.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::batch::{Batch, Leaf};

/// Placeholder for the length of a sequence: sizes count its tokens, and the shape's other numbers are
/// those of a token.
const ANY_LENGTH: i64 = -1;

/// Use of a mini-batch; each use has memory needs of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Use {
    /// Forward and backward.
    Train,
    /// Forward, a loss on the whole, forward again and backward.
    TrainWhole,
    /// Forward and a loss, without gradients.
    Evaluate,
    /// Forward, without gradients.
    Map,
}

/// Kind of mini-batch: its use, and dtype and shape of its samples.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Kind {
    pub(crate) used: Use,
    /// Dtype of each leaf and shape of a sample in it.
    leaves: Vec<(String, Vec<i64>)>,
}

impl Kind {
    pub(crate) fn of(used: Use, batch: &impl Batch) -> Self {
        let mut leaves = Vec::new();
        batch.visit(&mut |leaf| {
            let tensor = leaf.tensor();
            // Counting the samples refuses an undefined tensor.
            if !tensor.defined() {
                return;
            }
            let sample = || tensor.size().into_iter().skip(1);
            let shape = match leaf {
                Leaf::Cut(_) => sample().collect(),
                Leaf::Shared(_) => Vec::new(),
                // Sequences of any length share one kind: needs are counted by the token.
                Leaf::Ragged { .. } => {
                    std::iter::once(ANY_LENGTH).chain(sample().skip(1)).collect()
                }
                Leaf::Widths(_) => return,
            };
            leaves.push((format!("{:?}", tensor.kind()), shape));
        });
        Self { used, leaves }
    }

    /// Returns whether gradients are computed.
    pub(crate) fn is_training(&self) -> bool {
        matches!(self.used, Use::Train | Use::TrainWhole)
    }

    /// Returns the number of elements in a sample.
    pub(crate) fn elements(&self) -> u64 {
        let count = |shape: &Vec<i64>| shape.iter().map(|&n| n.unsigned_abs()).product::<u64>();
        self.leaves.iter().map(|(_, shape)| count(shape)).sum()
    }

    /// Returns whether samples differ at most in their shapes.
    pub(crate) fn is_akin(&self, other: &Self) -> bool {
        let types = |kind: &Self| {
            kind.leaves.iter().map(|(kind, s)| (kind.clone(), s.len())).collect::<Vec<_>>()
        };
        self.used == other.used && types(self) == types(other)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let leaf = |(kind, shape): &(String, Vec<i64>)| format!("{kind} {shape:?}");
        let leaves: Vec<String> = self.leaves.iter().map(leaf).collect();
        f.write_str(&leaves.join(" and "))
    }
}
