//! Writes and reads named tensors as safetensors files, atomically.
//!
//! A file is written beside its target, synced to the disk, and renamed: an interruption leaves the old file or
//! the new one. Tensors are written in pieces and read as they are used, so neither direction needs memory beyond
//! that of the tensors. Equal tensors produce equal bytes.
//!
//! ```
//! use brimful::save::{self, Metadata};
//! use tch::Tensor;
//!
//! let path = std::env::temp_dir().join("brimful-doc.safetensors");
//! let metadata = Metadata::from([("epoch".to_owned(), "3".to_owned())]);
//! save::write(&path, &[("weight".to_owned(), Tensor::from_slice(&[1.0, 2.0]))], &metadata)?;
//! let (tensors, metadata) = save::read(&path)?;
//! assert_eq!((tensors[0].0.as_str(), metadata["epoch"].as_str()), ("weight", "3"));
//! # std::fs::remove_file(&path).expect("removed");
//! # Ok::<(), brimful::Error>(())
//! ```

mod header;
pub(crate) mod opened;
mod whole_file;
mod whole_folder;

use std::io::{BufWriter, Write};
use std::path::Path;

use tch::{Device, Tensor};

use crate::Result;

pub(crate) use header::KINDS;
pub use header::Metadata;
use header::lay_out;
use opened::OpenedFile;
use whole_file::unwritable;
#[doc(hidden)]
pub use whole_file::{
    WrittenFile, place, probe, remove_left_over, replace, replace_by_copy, replace_by_link,
};
pub use whole_folder::replace_folder;

/// Number of bytes of a tensor that are copied at a time.
const PIECE: usize = 16 << 20;

/// Writes tensors from any device to a file, replacing it.
///
/// # Errors
/// When two tensors have the same name, one is sparse or of a dtype that the format lacks, or the file
/// system refuses. The old file, if there was one, is unchanged then.
pub fn write(
    path: impl AsRef<Path>,
    tensors: &[(String, Tensor)],
    metadata: &Metadata,
) -> Result<()> {
    write_beside(path, tensors, metadata)?.replace()
}

/// Writes tensors as [`write()`] does, but each tensor is made by `make` just before it is written, so that they
/// never exist all at once. `make` keeps shapes and dtypes.
///
/// ```
/// use brimful::save;
/// use tch::Tensor;
///
/// let path = std::env::temp_dir().join("brimful-doc-made.safetensors");
/// let tensors = [("weight".to_owned(), Tensor::from_slice(&[1.0, 2.0]))];
/// save::write_made(&path, &tensors, &Default::default(), |_, tensor| Ok(tensor.f_mul(tensor)?))?;
/// assert_eq!(save::read(&path)?.0[0].1, Tensor::from_slice(&[1.0, 4.0]));
/// # std::fs::remove_file(&path).expect("removed");
/// # Ok::<(), brimful::Error>(())
/// ```
///
/// # Errors
/// As for [`write()`]; the errors of `make`; and if `make` returns a tensor of another shape or dtype.
pub fn write_made(
    path: impl AsRef<Path>,
    tensors: &[(String, Tensor)],
    metadata: &Metadata,
    make: impl FnMut(&str, &Tensor) -> Result<Tensor>,
) -> Result<()> {
    made_beside(path.as_ref(), tensors, metadata, make)?.replace()
}

/// Writes the tensors to a new file beside the target; [`WrittenFile::replace`] renames it to the target. The
/// tensors may change before the rename, so training can continue while another thread waits for the disk.
///
/// # Errors
/// As for [`write()`].
pub fn write_beside(
    path: impl AsRef<Path>,
    tensors: &[(String, Tensor)],
    metadata: &Metadata,
) -> Result<WrittenFile> {
    made_beside(path.as_ref(), tensors, metadata, |_, tensor| Ok(tensor.shallow_clone()))
}

fn made_beside(
    path: &Path,
    tensors: &[(String, Tensor)],
    metadata: &Metadata,
    mut make: impl FnMut(&str, &Tensor) -> Result<Tensor>,
) -> Result<WrittenFile> {
    let (order, header) = lay_out(tensors, metadata).map_err(|reason| unwritable(path, reason))?;
    let beside = WrittenFile::new(path)?;
    let mut out = BufWriter::new(&beside.file);
    let mut write = |bytes: &[u8]| out.write_all(bytes).map_err(|reason| beside.refused(&reason));
    write(&header)?;
    for (name, tensor) in order {
        let made = make(name, tensor)?;
        if made.size() != tensor.size() || made.kind() != tensor.kind() {
            let reason = format!("what was made of '{name}' has another shape or dtype");
            return Err(unwritable(path, reason));
        }
        in_pieces(&made, &mut write)?;
    }
    out.flush().map_err(|reason| beside.refused(&reason))?;
    drop(out);
    Ok(beside)
}

/// Reads all tensors, sorted by name and on the CPU, and the texts that go with them.
///
/// Large tensors are mapped pages of the file, loaded on use, which the system can drop at any time. So do not
/// write to the file or truncate it while the tensors are in use; replacing the file by [`write()`] is safe.
///
/// # Errors
/// When the file cannot be read, is not a safetensors file, was cut off, or has a dtype that libtorch
/// lacks.
pub fn read(path: impl AsRef<Path>) -> Result<(Vec<(String, Tensor)>, Metadata)> {
    let opened = OpenedFile::open(path)?;
    let mut tensors = opened.read_all()?;
    tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok((tensors, opened.metadata()))
}

/// Passes a tensor's bytes to `take`, a piece at a time.
fn in_pieces(tensor: &Tensor, mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let tensor = tensor.f_detach()?;
    let flat = match tensor.is_contiguous() {
        true => tensor,
        // Made contiguous on the host, which has more memory than a device.
        false => tensor.f_to_device(Device::Cpu)?.f_contiguous()?,
    };
    let flat = flat.f_view([-1])?;
    let (numbers, each) = (flat.numel(), flat.kind().elt_size_in_bytes());
    let most = PIECE / each;
    let mut bytes = vec![0; numbers.min(most) * each];
    for first in (0..numbers).step_by(most) {
        let count = most.min(numbers - first);
        let piece = flat.f_narrow(0, first as i64, count as i64)?;
        let bytes = &mut bytes[..count * each];
        piece.f_copy_data_u8(bytes, count)?;
        take(bytes)?;
    }
    Ok(())
}
