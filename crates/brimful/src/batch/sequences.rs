//! Sequences of different lengths, in micro-batches that are each only as wide as their longest sequence.

use std::ops::Deref;

use tch::Tensor;

use super::{Batch, Leaf, check_alike, leaf_len};
use crate::Result;

/// Number of tokens of which widths are multiples by default. It gives few shapes, each of which needs a separate
/// CUDA graph, and about 32 tokens of padding per sequence on average.
const WIDTH_STEP: usize = 64;

/// Sequences of different lengths: tokens, frames, or other items.
///
/// A mini-batch of them is cut by tokens, not by samples ([`MicroBatches::Tokens`](crate::MicroBatches::Tokens),
/// or an automatic size): sequences of similar length run together, the longest first, and every micro-batch is
/// padded only to its own longest sequence. A closure uses the sequences of its micro-batch as one tensor,
/// `[samples, width, ...]`. Outputs return in the order of the mini-batch. Outputs with one item per token are
/// padded with zeros to the longest sequence of all.
///
/// ```
/// use brimful::batch::Sequences;
/// use brimful::{Loss, MicroBatcher, MicroBatches};
/// use tch::{Device, Kind, Tensor, nn};
///
/// let store = nn::VarStore::new(Device::Cpu);
/// let words = nn::embedding(store.root(), 100, 1, Default::default());
/// let mut micro = MicroBatcher::new(&store, MicroBatches::Tokens(256));
///
/// let row = |length: i64| Tensor::randint(100, [length], (Kind::Int64, Device::Cpu));
/// let batch = Sequences::new(&[row(3), row(200), row(70), row(60)], -1.0)?;
/// let step = micro.backward(&batch, |tokens| {
///     let real = tokens.ne(-1); // false for padding
///     let values = words.ws.index_select(0, &tokens.clamp_min(0).view([-1])).view_as(&real);
///     Loss::ratio((values * &real).sum(Kind::Float), real.sum(Kind::Double))
/// })?;
/// assert_eq!(step.sizes, [1, 2, 1]); // 1 of 256 tokens, 2 of 128 and 1 of 64
/// # Ok::<(), brimful::Error>(())
/// ```
///
/// The *tokens of a sample* are the items of its longest sequence: inputs and targets of one length, each
/// `Sequences`, count once. Write *a loss over tokens* as [`Loss::ratio`] or
/// [`Loss::mean_over`](crate::Loss::mean_over) the tokens that count: then the gradient does not depend on the
/// cut.
///
/// [`Loss::ratio`]: crate::Loss::ratio
#[derive(Debug)]
pub struct Sequences {
    /// All sequences, padded.
    values: Tensor,
    /// Width of each sequence, in host memory: its length, rounded up.
    widths: Tensor,
}

impl Sequences {
    /// Pads these sequences, each with its tokens along its first dimension, with the value `padding`.
    /// Micro-batches are multiples of 64 tokens wide.
    ///
    /// # Errors
    ///
    /// When there are no sequences, or they differ in more than their lengths.
    pub fn new(sequences: &[Tensor], padding: f64) -> Result<Self> {
        Self::in_steps_of(WIDTH_STEP, sequences, padding)
    }

    /// Pads sequences to widths that are multiples of `step` tokens: small steps mean little padding, large
    /// ones mean few shapes, so that CUDA graphs are used more often.
    ///
    /// # Errors
    /// As [`Sequences::new`].
    pub fn in_steps_of(step: usize, sequences: &[Tensor], padding: f64) -> Result<Self> {
        check_alike(sequences)?;
        let lengths = sequences.iter().map(|sequence| leaf_len(0, sequence));
        let lengths = lengths.collect::<Result<Vec<usize>>>()?;
        let step = step.max(1);
        let width = |length: &usize| (length.div_ceil(step).max(1) * step) as i64;
        let widths: Vec<i64> = lengths.iter().map(width).collect();
        let first = &sequences[0];
        let mut shape = vec![sequences.len() as i64, widths.iter().copied().max().unwrap_or(0)];
        shape.extend(&first.size()[1..]);
        let values = Tensor::f_full(shape, padding, (first.kind(), first.device()))?;
        let _without = tch::no_grad_guard();
        for (i, (sequence, length)) in sequences.iter().zip(lengths).enumerate() {
            values.f_get(i as i64)?.f_narrow(0, 0, length as i64)?.f_copy_(sequence)?;
        }
        Ok(Self { values, widths: Tensor::f_from_slice(&widths)? })
    }
}

impl Deref for Sequences {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.values
    }
}

impl Batch for Sequences {
    fn visit<'a>(&'a self, f: &mut dyn FnMut(Leaf<'a>)) {
        f(Leaf::Ragged { values: &self.values, widths: &self.widths });
        f(Leaf::Widths(&self.widths));
    }

    fn map(&self, f: &mut dyn FnMut(Leaf<'_>) -> Result<Tensor>) -> Result<Self> {
        let values = f(Leaf::Ragged { values: &self.values, widths: &self.widths })?;
        Ok(Self { values, widths: f(Leaf::Widths(&self.widths))? })
    }
}
