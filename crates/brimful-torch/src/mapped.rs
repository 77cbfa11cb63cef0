//! Numbers of a file: as a tensor over the system's own pages, or copied from these straight into a tensor.

use std::ffi::c_void;
use std::fs::File;
use std::io;

use memmap2::{MmapMut, MmapOptions};
use tch::{Device, Kind, TchError, Tensor};
use thiserror::Error;

use crate::error::TorchError;
use crate::{ffi, owned};

/// So many bytes are mapped at a time: while they are, they count as memory of the process.
const PIECE: usize = 16 << 20;

/// Why numbers could not be copied out of a file.
#[derive(Debug, Error)]
pub enum MappedError {
    /// The system gives no such pages.
    #[error(transparent)]
    File(#[from] io::Error),
    /// libtorch refused the copy.
    #[error(transparent)]
    Torch(#[from] TchError),
    /// The bridge refused the tensor.
    #[error(transparent)]
    Bridge(#[from] TorchError),
}

/// Opens a tensor of this kind and shape over the bytes of the file that begin at `start`. The system reads its pages
/// when they are looked at, and may drop them again; writing to the tensor does not change the file.
///
/// Whoever cuts the file off while the tensor is in use ends the program, as with every file that is mapped.
///
/// # Errors
/// When the file ends before, or the system maps no more.
pub fn tensor(file: &File, start: u64, kind: Kind, shape: &[i64]) -> Result<Tensor, MappedError> {
    let numbers = shape.iter().product::<i64>() as usize;
    let (each, bytes) = (kind.elt_size_in_bytes(), numbers * kind.elt_size_in_bytes());
    if bytes == 0 {
        return Ok(Tensor::f_empty(shape, (kind, Device::Cpu))?);
    }
    check_length(file, start, bytes)?;
    let mut options = MmapOptions::new();
    // Nothing is written, as a rule: the system need not have room for a second file.
    options.offset(start).len(bytes).no_reserve_swap();
    // SAFETY: the map is this process's own, and its bytes were in the file a moment ago.
    let mut pages = unsafe { options.map_copy(file)? };
    if !(pages.as_ptr() as usize).is_multiple_of(each) {
        // A file whose header ends anywhere.
        return Ok(Tensor::f_from_data_size(&pages, shape, kind)?);
    }
    let first = pages.as_mut_ptr().cast();
    let owner = Box::into_raw(Box::new(pages)).cast();
    // SAFETY: the pages stay where they are until the last tensor that looks at them gives them back.
    let bytes = owned(unsafe { ffi::brimful_lent_bytes(first, bytes, owner, unmap) }?);
    Ok(bytes.f_view_dtype(kind)?.f_view(shape)?)
}

/// Takes back the pages of a tensor that nobody looks at any more.
unsafe extern "C" fn unmap(pages: *mut c_void) {
    // SAFETY: `tensor` made the box, and its only owner gives it back once.
    drop(unsafe { Box::from_raw(pages.cast::<MmapMut>()) });
}

/// Refuses a file that is too short for so many bytes.
fn check_length(file: &File, start: u64, bytes: usize) -> Result<(), MappedError> {
    let (length, needed) = (file.metadata()?.len(), start + bytes as u64);
    if length >= needed {
        return Ok(());
    }
    let reason = format!("it has {length} bytes, but the numbers end at byte {needed}");
    Err(io::Error::new(io::ErrorKind::UnexpectedEof, reason).into())
}

/// Copies the numbers of this kind that begin at this byte of the file into a tensor, of whatever kind and
/// device: as many as the tensor has, in rows. Pages are given back as it goes on, so that a file of any size takes
/// little of the host's memory.
///
/// Whoever cuts the file off meanwhile ends the program, as with every file that is mapped.
///
/// # Errors
/// When the file ends before, or memory runs out.
pub fn copy(file: &File, start: u64, kind: Kind, into: &Tensor) -> Result<(), MappedError> {
    let (numbers, each) = (into.numel(), kind.elt_size_in_bytes());
    if numbers == 0 {
        return Ok(());
    }
    check_length(file, start, numbers * each)?;
    if !into.is_contiguous() {
        return copy_mapped(file, start, kind, into);
    }
    let flat = into.f_detach()?.f_view([-1])?;
    let most = PIECE / each;
    for first in (0..numbers).step_by(most) {
        let count = most.min(numbers - first);
        let piece = flat.f_narrow(0, first as i64, count as i64)?;
        copy_mapped(file, start + (first * each) as u64, kind, &piece)?;
    }
    Ok(())
}

/// Maps all numbers that the tensor takes, which are in the file, and copies them.
fn copy_mapped(file: &File, start: u64, kind: Kind, into: &Tensor) -> Result<(), MappedError> {
    let (numbers, each) = (into.numel(), kind.elt_size_in_bytes());
    // SAFETY: the map is read only, and its bytes were in the file a moment ago.
    let pages = unsafe { MmapOptions::new().offset(start).len(numbers * each).map(file)? };
    let shape = into.size();
    let from = if (pages.as_ptr() as usize).is_multiple_of(each) {
        // SAFETY: so many bytes are there, aligned for their kind, as long as `pages` is: the tensor is dropped
        // below, before it. Nothing writes through it.
        unsafe { Tensor::f_from_blob(pages.as_ptr(), &shape, &[], kind, Device::Cpu)? }
    } else {
        // A file whose header ends anywhere.
        Tensor::f_from_data_size(&pages, &shape, kind)?
    };
    tch::no_grad(|| into.f_detach()?.f_copy_(&from))?;
    Ok(())
}
