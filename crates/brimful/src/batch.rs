//! Mini-batches that can be cut along their first dimension, and joined again.
//!
//! Tensors are the leaves of a batch. They can be nested in tuples, arrays, `Vec`, `Option`, `Box`, `BTreeMap`
//! and, by `#[derive(Batch)]`, structs. All leaves have the same number of samples, except those in [`Shared`].
//! Every micro-batch gets shared leaves, numbers and strings whole.
//!
//! ```
//! use brimful::batch::{self, Batch, Shared};
//! use tch::{Device, Kind, Tensor};
//!
//! #[derive(Batch)]
//! struct Sentences {
//!     tokens: Tensor,
//!     lengths: Option<Tensor>,
//!     #[batch(shared)]
//!     class_weights: Tensor,
//! }
//!
//! let tokens = Tensor::zeros([8, 128], (Kind::Int64, Device::Cpu));
//! let class_weights = Tensor::ones([10], (Kind::Float, Device::Cpu));
//! let mini_batch = Sentences { tokens, lengths: None, class_weights };
//! assert_eq!(batch::len(&mini_batch)?, 8);
//!
//! let micro_batch = batch::slice(&mini_batch, 2..5)?;
//! assert_eq!(micro_batch.tokens.size(), [3, 128]);
//! assert_eq!(micro_batch.class_weights.size(), [10]);
//! # Ok::<(), brimful::Error>(())
//! ```
//!
//! A `Vec` is a list of parts that are cut alike, not a list of samples: samples go into one tensor or, if their
//! lengths differ, into [`Sequences`]. A `Vec` of numbers is not cut either.

mod containers;
mod error;
mod lending;
mod samples;
mod sequences;

use std::fmt::Display;
use std::ops::Range;

use tch::{Device, Kind, Tensor};

pub use brimful_derive::Batch;
pub use containers::Shared;
pub use error::BatchError;
pub(crate) use error::enumerate;
pub(crate) use lending::{Borrower, Borrowers, Lender, Versions, copied, copy_of};
pub(crate) use samples::{Arranged, Samples};
pub use sequences::Sequences;

use crate::Result;

/// Returns the tensors of a batch, in the order of its leaves, without those that stay on the host.
pub(crate) fn tensors(batch: &impl Batch) -> Vec<&Tensor> {
    let leaves = leaves(batch).into_iter().filter(|leaf| !leaf.stays_on_the_host());
    // Undefined tensors are refused when the samples are counted.
    leaves.map(Leaf::tensor).filter(|tensor| tensor.defined()).collect()
}

/// Returns the bytes of a tensor's numbers.
pub(crate) fn tensor_bytes(tensor: &Tensor) -> u64 {
    (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64
}

/// Returns the dtype in which gradients of this dtype are summed: sums in half precision would lose digits.
pub(crate) fn summed_in(kind: Kind) -> Kind {
    match kind {
        Kind::Half | Kind::BFloat16 => Kind::Float,
        kind => kind,
    }
}

pub(crate) fn devices(batch: &impl Batch) -> Vec<Device> {
    tensors(batch).into_iter().map(Tensor::device).collect()
}

/// One tensor of a batch, as [`Batch::visit`] shows it.
#[derive(Debug, Clone, Copy)]
pub enum Leaf<'a> {
    /// Cut along its first dimension.
    Cut(&'a Tensor),
    /// Whole in every micro-batch.
    Shared(&'a Tensor),
    /// Cut along its first dimension, and trimmed along its second to its widest sample.
    Ragged {
        /// Values of all samples, padded.
        values: &'a Tensor,
        /// Width of each sample. This tensor is also the next leaf.
        widths: &'a Tensor,
    },
    /// Width of each sample of the previous leaf, in the second dimension. Cut, but stays in host memory,
    /// because no layer computes with it.
    Widths(&'a Tensor),
}

impl<'a> Leaf<'a> {
    /// Returns the tensor, cut or not.
    pub fn tensor(self) -> &'a Tensor {
        match self {
            Self::Cut(tensor) | Self::Shared(tensor) | Self::Widths(tensor) => tensor,
            Self::Ragged { values, .. } => values,
        }
    }

    /// Returns whether it has a row for each sample.
    pub fn is_cut(self) -> bool {
        !matches!(self, Self::Shared(_))
    }

    pub(crate) fn stays_on_the_host(self) -> bool {
        matches!(self, Self::Widths(_))
    }

    /// Converts the leaf to one that is not cut.
    #[must_use]
    pub fn shared(self) -> Self {
        Self::Shared(self.tensor())
    }
}

/// A mini-batch that can be cut along its first dimension.
///
/// Derive it for a struct, generic ones included; `#[batch(shared)]` on a field is equivalent to [`Shared`] around
/// its type. To implement `Batch` by hand, visit the leaves in one order in all methods:
///
/// ```
/// use brimful::Result;
/// use brimful::batch::{Batch, Leaf};
/// use tch::Tensor;
///
/// enum Input {
///     Text(Tensor),
///     Image(Tensor),
/// }
///
/// impl Batch for Input {
///     fn visit<'a>(&'a self, f: &mut dyn FnMut(Leaf<'a>)) {
///         let (Self::Text(tensor) | Self::Image(tensor)) = self;
///         tensor.visit(f);
///     }
///
///     fn map(&self, f: &mut dyn FnMut(Leaf<'_>) -> Result<Tensor>) -> Result<Self> {
///         Ok(match self {
///             Self::Text(tensor) => Self::Text(tensor.map(f)?),
///             Self::Image(tensor) => Self::Image(tensor.map(f)?),
///         })
///     }
///
///     fn outline(&self, f: &mut dyn FnMut(&dyn std::fmt::Display)) {
///         f(if matches!(self, Self::Text(_)) { &"text" } else { &"an image" });
///     }
/// }
/// ```
///
/// It cannot be derived for an enum or a union, and `shared` is the only attribute of a field:
///
/// ```compile_fail
/// #[derive(brimful::Batch)]
/// enum Input {
///     Text(tch::Tensor),
/// }
/// ```
///
/// ```compile_fail
/// #[derive(brimful::Batch)]
/// union Input {
///     text: std::mem::ManuallyDrop<tch::Tensor>,
/// }
/// ```
///
/// ```compile_fail
/// #[derive(brimful::Batch)]
/// struct Input {
///     #[batch(whole)]
///     text: tch::Tensor,
/// }
/// ```
///
/// Nor can it be derived for a struct with a field that is not a batch:
///
/// ```compile_fail
/// #[derive(brimful::Batch)]
/// struct Input {
///     text: tch::Tensor,
///     read_at: std::time::Instant,
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a batch",
    note = "a batch is made of tensors, numbers and strings in tuples, arrays, `Vec`, `Option`, \
            `Box`, `BTreeMap` and `Shared`",
    note = "for a struct of such, write `#[derive(brimful::Batch)]` above it"
)]
pub trait Batch: Sized + Send {
    /// Shows every leaf to `f`, always in the same order.
    fn visit<'a>(&'a self, f: &mut dyn FnMut(Leaf<'a>));

    /// Replaces each tensor by the result of `f`, in the order of [`Batch::visit`].
    ///
    /// # Errors
    ///
    /// The first error of `f`.
    fn map(&self, f: &mut dyn FnMut(Leaf<'_>) -> Result<Tensor>) -> Result<Self>;

    /// Returns a batch of this form whose tensors [`Batch::map`] will fill in; `None` if the type does not
    /// determine the form. A rank of a world that has computed no outputs receives them in a blank batch.
    fn blank() -> Option<Self> {
        None
    }

    /// Shows `f` everything that is not a tensor: values, and the number of items of a container that may vary
    /// in size. Batches of different outline cannot be joined. The default shows nothing.
    fn outline(&self, f: &mut dyn FnMut(&dyn Display)) {
        let _ = f;
    }
}

/// Returns the number of samples of a batch: the length of all of its leaves except shared ones.
///
/// # Errors
/// When the lengths differ, a leaf is not defined or has no dimension to cut, or there is nothing to cut.
pub fn len<B: Batch>(batch: &B) -> Result<usize> {
    let all = leaves(batch);
    if let Some(leaf) = all.iter().position(|leaf| !leaf.tensor().defined()) {
        return Err(BatchError::LeafUndefined { leaf }.into());
    }
    let lengths = all
        .into_iter()
        .enumerate()
        .filter(|(_, leaf)| leaf.is_cut())
        .map(|(position, leaf)| leaf_len(position, leaf.tensor()))
        .collect::<Result<Vec<usize>>>()?;
    match lengths.first() {
        None => Err(BatchError::NothingToCut.into()),
        Some(first) if lengths.iter().any(|length| length != first) => {
            Err(BatchError::LeafLengthsDiffer { lengths }.into())
        }
        Some(0) => Err(BatchError::Empty.into()),
        Some(&first) => Ok(first),
    }
}

/// Returns the samples of this range, as views. Only [`Sequences`] may be copied, because they are trimmed to
/// the widest sample of the range.
///
/// # Errors
/// When a leaf does not have all of these samples.
pub fn slice<B: Batch>(batch: &B, range: Range<usize>) -> Result<B> {
    let mut position = 0;
    batch.map(&mut |leaf| {
        let sliced = match leaf {
            Leaf::Cut(tensor) | Leaf::Widths(tensor) => slice_leaf(position, tensor, &range),
            Leaf::Shared(tensor) => Ok(tensor.shallow_clone()),
            Leaf::Ragged { values, widths } => trimmed(
                &slice_leaf(position, values, &range)?,
                &slice_leaf(position + 1, widths, &range)?,
            ),
        };
        position += 1;
        sliced
    })
}

/// Trims the values to the widest sample. Copies them if they change, because models expect contiguous rows.
fn trimmed(values: &Tensor, widths: &Tensor) -> Result<Tensor> {
    let widest = numbers(widths)?.into_iter().max().unwrap_or(0);
    if widest >= values.size()[1] {
        return Ok(values.shallow_clone());
    }
    Ok(values.f_narrow(1, 0, widest)?.f_contiguous()?)
}

/// Returns the widths as numbers.
fn numbers(widths: &Tensor) -> Result<Vec<i64>> {
    let numbers = widths.f_to_device(Device::Cpu)?.f_to_kind(Kind::Int64)?;
    Ok(Vec::<i64>::try_from(&numbers)?)
}

/// Joins the parts into one batch, in their order: the inverse of cutting by [`slice()`].
///
/// Shared leaves and all values that are not tensors come from the first part. Leaves of a single number, such as
/// the mean over a micro-batch, become one leaf with one number per part.
///
/// # Errors
/// When there is no part, or the parts differ in more than their samples.
pub fn join<B: Batch>(mut parts: Vec<B>) -> Result<B> {
    check_alike(&parts)?;
    let mut columns = columns(&parts).into_iter();
    // All parts but the first remain only in the columns, which are freed one by one below: so at most one leaf
    // exists twice.
    let first = parts.swap_remove(0);
    drop(parts);
    first.map(&mut |leaf| {
        let column = columns.next().unwrap_or_default();
        match leaf {
            Leaf::Shared(tensor) => Ok(tensor.shallow_clone()),
            _ => join_leaves(&column),
        }
    })
}

/// Replaces the tensors that are cut by the results of `f`.
fn map_cut<B: Batch>(batch: &B, mut f: impl FnMut(&Tensor) -> Result<Tensor>) -> Result<B> {
    batch.map(&mut |leaf| match leaf.is_cut() {
        true => f(leaf.tensor()),
        false => Ok(leaf.tensor().shallow_clone()),
    })
}

/// Returns the leaves in the order of [`Batch::visit`].
pub(crate) fn leaves<B: Batch>(batch: &B) -> Vec<Leaf<'_>> {
    let mut leaves = Vec::new();
    batch.visit(&mut |leaf| leaves.push(leaf));
    leaves
}

/// Detaches all tensors from their graphs.
pub(crate) fn detached<B: Batch>(batch: &B) -> Result<B> {
    batch.map(&mut |leaf| Ok(leaf.tensor().f_detach()?))
}

fn leaf_len(position: usize, tensor: &Tensor) -> Result<usize> {
    let length = tensor.size().first().map(|&length| length as usize);
    length.ok_or(BatchError::LeafOfOneNumber { leaf: position }.into())
}

fn slice_leaf(position: usize, tensor: &Tensor, range: &Range<usize>) -> Result<Tensor> {
    let length = leaf_len(position, tensor)?;
    if range.start > range.end || range.end > length {
        let Range { start, end } = *range;
        return Err(BatchError::SliceOutside { start, end, leaf: position, length }.into());
    }
    Ok(tensor.f_narrow(0, range.start as i64, range.len() as i64)?)
}

/// Returns each leaf's tensors over all parts.
fn columns<B: Batch>(parts: &[B]) -> Vec<Vec<Tensor>> {
    let rows: Vec<Vec<Leaf<'_>>> = parts.iter().map(leaves).collect();
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let column = |at: usize| rows.iter().filter_map(move |row| row.get(at));
    (0..count).map(|at| column(at).map(|leaf| leaf.tensor().shallow_clone()).collect()).collect()
}

fn join_leaves(tensors: &[Tensor]) -> Result<Tensor> {
    match tensors {
        [only] if only.dim() == 0 => Ok(only.f_unsqueeze(0)?),
        [only] => Ok(only.shallow_clone()),
        [first, ..] if first.dim() == 0 => Ok(Tensor::f_stack(tensors, 0)?),
        _ => Ok(Tensor::f_cat(tensors, 0)?),
    }
}

/// Fails if there is no part, or if the parts differ in more than their samples.
fn check_alike<B: Batch>(parts: &[B]) -> Result<()> {
    let mut outlines = parts.iter().map(full_outline);
    let Some(first) = outlines.next() else { return Err(BatchError::NothingToJoin.into()) };
    for (part, other) in (1..).zip(outlines) {
        let mut positions = 0..first.len().max(other.len());
        if let Some(position) = positions.find(|&at| first.get(at) != other.get(at)) {
            let at = |lines: &[String]| lines.get(position).map_or("nothing", |l| l).to_owned();
            return Err(
                BatchError::PartsDiffer { part, first: at(&first), other: at(&other) }.into()
            );
        }
    }
    Ok(())
}

/// Describes all of a batch but its samples, for comparison and for messages.
fn full_outline<B: Batch>(batch: &B) -> Vec<String> {
    let mut lines = Vec::new();
    batch.outline(&mut |line| lines.push(line.to_string()));
    batch.visit(&mut |leaf| {
        lines.push(match leaf {
            Leaf::Shared(_) => "a shared tensor".to_owned(),
            leaf => describe(leaf.tensor()),
        });
    });
    lines
}

/// Returns a description such as `a Float tensor of shape [_, 3, 32]`.
fn describe(tensor: &Tensor) -> String {
    let mut dimensions: Vec<String> = tensor.size().iter().map(i64::to_string).collect();
    if let Some(samples) = dimensions.first_mut() {
        "_".clone_into(samples);
    }
    format!("a {:?} tensor of shape [{}]", tensor.kind(), dimensions.join(", "))
}

/// Cuts the padding off a gradient of outputs that were padded to the longest sequence of all.
pub(crate) fn as_wide_as(output: &Tensor, gradient: Tensor) -> Result<Tensor> {
    match (output.size().get(1), gradient.size().get(1)) {
        (Some(&own), Some(&padded)) if own < padded => Ok(gradient.f_narrow(1, 0, own)?),
        _ => Ok(gradient),
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    #[derive(Batch)]
    struct Image<T> {
        pixels: T,
        #[batch(shared)]
        palette: Tensor,
    }

    #[test]
    fn the_derive_works_in_here_too() {
        let zeros = |size: &[i64]| Tensor::zeros(size, (Kind::Uint8, Device::Cpu));
        let image = Image { pixels: [zeros(&[4, 2, 2])], palette: zeros(&[256, 3]) };
        let part = slice(&image, 1..3).expect("two images");
        assert_eq!(len(&part), Ok(2));
        assert_eq!(part.palette.size(), [256, 3]);
        let outline = ["a Uint8 tensor of shape [_, 2, 2]", "a shared tensor"];
        assert_eq!(full_outline(&part), outline);
    }
}
