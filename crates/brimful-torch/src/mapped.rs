//! Numbers of a file, copied from the system's own pages straight into a tensor.

use std::fs::File;
use std::io;

use memmap2::MmapOptions;
use tch::{Device, Kind, TchError, Tensor};
use thiserror::Error;

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
    let needed = start + (numbers * each) as u64;
    let length = file.metadata()?.len();
    if length < needed {
        let reason = format!("it has {length} bytes, but the numbers end at byte {needed}");
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, reason).into());
    }
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
