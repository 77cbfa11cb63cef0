//! Numbers of a file, copied from the system's own pages straight into a tensor.

use std::fs::File;
use std::io;

use memmap2::MmapOptions;
use tch::{Device, Kind, TchError, Tensor};
use thiserror::Error;

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
/// device: as many as the tensor has, in rows. The pages are given back before it returns, so that a file of any size
/// takes no more of the host's memory than its largest tensor.
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
