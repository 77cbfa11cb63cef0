//! Tensor data in files: memory-mapped as a tensor, or copied from the file into a tensor.

use std::ffi::c_void;
use std::fs::File;
use std::io;

use memmap2::{MmapMut, MmapOptions};
use tch::{Device, Kind, TchError, Tensor};
use thiserror::Error;

use crate::error::TorchError;
use crate::{ffi, owned};

/// Bytes mapped at a time: mapped pages count as the process's memory.
const PIECE: usize = 16 << 20;

/// Cause of a failed read of a file's data.
#[derive(Debug, Error)]
pub enum MappedError {
    /// The system could not map the file.
    #[error(transparent)]
    File(#[from] io::Error),
    /// libtorch refused the copy.
    #[error(transparent)]
    Torch(#[from] TchError),
    /// The bridge refused the tensor.
    #[error(transparent)]
    Bridge(#[from] TorchError),
}

/// Maps the file's bytes from `start` on as a tensor of this dtype and shape. The system loads pages on access
/// and may drop them again; writes to the tensor do not change the file.
///
/// Truncating the file while the tensor is in use kills the program, as with every mapped file.
///
/// # Errors
/// When the file is too short, or the system cannot map more.
pub fn tensor(file: &File, start: u64, kind: Kind, shape: &[i64]) -> Result<Tensor, MappedError> {
    let numbers = shape.iter().product::<i64>() as usize;
    let (each, bytes) = (kind.elt_size_in_bytes(), numbers * kind.elt_size_in_bytes());
    if bytes == 0 {
        return Ok(Tensor::f_empty(shape, (kind, Device::Cpu))?);
    }
    check_length(file, start, bytes)?;
    let mut options = MmapOptions::new();
    // Pages are rarely written, so the system need not reserve swap for a copy of the file.
    options.offset(start).len(bytes).no_reserve_swap();
    // SAFETY: the mapping is private to this process, and the file's length was checked above.
    let mut pages = unsafe { options.map_copy(file)? };
    if !(pages.as_ptr() as usize).is_multiple_of(each) {
        // The data are unaligned, because the file's header may end anywhere.
        return Ok(Tensor::f_from_data_size(&pages, shape, kind)?);
    }
    let first = pages.as_mut_ptr().cast();
    let owner = Box::into_raw(Box::new(pages)).cast();
    // SAFETY: `owner` keeps the pages mapped until `unmap`, which libtorch calls when the last tensor over them is
    // gone.
    let bytes = owned(unsafe { ffi::brimful_lent_bytes(first, bytes, owner, unmap) }?);
    Ok(bytes.f_view_dtype(kind)?.f_view(shape)?)
}

/// Unmaps the pages of a tensor that is no longer in use.
unsafe extern "C" fn unmap(pages: *mut c_void) {
    // SAFETY: `pages` is the box that `tensor` made. libtorch calls this function once.
    drop(unsafe { Box::from_raw(pages.cast::<MmapMut>()) });
}

/// Refuses a file that is too short for this many bytes.
fn check_length(file: &File, start: u64, bytes: usize) -> Result<(), MappedError> {
    let (length, needed) = (file.metadata()?.len(), start + bytes as u64);
    if length >= needed {
        return Ok(());
    }
    let reason = format!("it has {length} bytes, but the numbers end at byte {needed}");
    Err(io::Error::new(io::ErrorKind::UnexpectedEof, reason).into())
}

/// Copies data of this dtype, from this byte of the file on, into a tensor of any dtype and device, in row-major
/// order, until the tensor is full. Pages are released along the way, so that a file of any size takes little
/// host memory.
///
/// Truncating the file meanwhile kills the program, as with every mapped file.
///
/// # Errors
/// When the file is too short, or memory runs out.
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

/// Maps the data of the whole tensor and copies them. The caller has checked the file's length.
fn copy_mapped(file: &File, start: u64, kind: Kind, into: &Tensor) -> Result<(), MappedError> {
    let (numbers, each) = (into.numel(), kind.elt_size_in_bytes());
    // SAFETY: the mapping is read only, and the caller has checked the file's length.
    let pages = unsafe { MmapOptions::new().offset(start).len(numbers * each).map(file)? };
    let shape = into.size();
    let from = if (pages.as_ptr() as usize).is_multiple_of(each) {
        // SAFETY: the bytes are mapped and aligned for their dtype as long as `pages` lives. The tensor is dropped
        // before `pages`, and nothing writes through the tensor.
        unsafe { Tensor::f_from_blob(pages.as_ptr(), &shape, &[], kind, Device::Cpu)? }
    } else {
        // The data are unaligned, because the file's header may end anywhere.
        Tensor::f_from_data_size(&pages, &shape, kind)?
    };
    tch::no_grad(|| into.f_detach()?.f_copy_(&from))?;
    Ok(())
}
