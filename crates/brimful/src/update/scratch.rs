//! Scratch space for converting tensors to another dtype or other strides, in pieces of a bounded size.

use brimful_torch::foreach;
use tch::{Device, Kind, Tensor};

use crate::Result;

/// Largest number of elements of a piece, unless it is a single tensor: scratch space for all tensors at once
/// would double their memory.
const SCRATCH_ELEMENTS: usize = 16 << 20;
/// Alignment of tensors in scratch space, in elements: kernels read 16 bytes at once.
const ALIGNMENT: usize = 64;

/// Returns the number of elements of scratch space for a tensor like this.
pub(super) fn scratch_elements(like: &Tensor) -> usize {
    like.numel().next_multiple_of(ALIGNMENT)
}

/// Items with a common key. Their size in scratch space is bounded, unless it is a single item.
#[derive(Debug)]
pub(super) struct ScratchPiece<K, T> {
    pub(super) key: K,
    pub(super) items: Vec<T>,
    /// Scratch space that they take, in elements.
    pub(super) scratch: usize,
}

impl<K: PartialEq, T> ScratchPiece<K, T> {
    /// Adds an item to the piece of its key, or to a new piece if that piece is full.
    pub(super) fn put(pieces: &mut Vec<Self>, key: K, item: T, needed: usize) {
        let last = pieces.iter_mut().rev().find(|piece| piece.key == key);
        match last.filter(|piece| piece.scratch + needed <= SCRATCH_ELEMENTS) {
            Some(piece) => {
                piece.items.push(item);
                piece.scratch += needed;
            }
            None => pieces.push(Self { key, items: vec![item], scratch: needed }),
        }
    }
}

/// Allocates one tensor for each dtype and device, of the size that its largest piece needs.
pub(super) fn scratch_for(
    pieces: impl Iterator<Item = ((Kind, Device), usize)>,
) -> Result<Vec<Tensor>> {
    let mut sizes: Vec<((Kind, Device), usize)> = Vec::new();
    for (place, elements) in pieces {
        match sizes.iter_mut().find(|(known, _)| *known == place) {
            Some((_, size)) => *size = elements.max(*size),
            None => sizes.push((place, elements)),
        }
    }
    let new = |(place, size)| Ok(Tensor::f_empty([size as i64], place)?);
    sizes.into_iter().map(new).collect()
}

/// Copies the tensors of a piece, all of one device, into scratch space of this dtype. Each copy has the strides of
/// its tensor in `like`.
pub(super) fn convert(
    tensors: &[Tensor],
    like: &[&Tensor],
    kind: Kind,
    scratch: &[Tensor],
) -> Result<Vec<Tensor>> {
    let place = (kind, like[0].device());
    let space = scratch.iter().find(|space| (space.kind(), space.device()) == place);
    let space = space.expect("there is scratch space for every piece");
    let mut start = 0;
    let mut converted = Vec::with_capacity(like.len());
    for like in like {
        converted.push(space.f_as_strided(like.size(), like.stride(), start as i64)?);
        start += scratch_elements(like);
    }
    foreach::copy(&converted, tensors)?;
    Ok(converted)
}
