//! Writes and reads named tensors as safetensors files, atomically.
//!
//! A file is written beside its target, synced to the disk, and renamed: an interruption leaves the old
//! file or the new one. Tensors are written in pieces and read as they are used, so neither direction needs
//! memory beyond that of the tensors. The same tensors produce the same bytes.
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

pub(crate) mod opened;
mod whole_file;
mod whole_folder;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io::{BufWriter, Read, Write};
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::{Metadata as Header, TensorInfo};
use tch::{Device, Kind, Tensor};

use crate::{Error, Result};

use opened::OpenedFile;
use whole_file::unwritable;
#[doc(hidden)]
pub use whole_file::{
    WrittenFile, place, probe, remove_left_over, replace, replace_by_copy, replace_by_link,
};
pub use whole_folder::replace_folder;

/// Texts that go with the tensors, such as their format and options.
pub type Metadata = BTreeMap<String, String>;

/// Key of the texts in a safetensors header, which no tensor can have as its name.
const METADATA: &str = "__metadata__";
/// Size of the header's length, a little-endian integer at the beginning of the file.
const LENGTH_BYTES: u64 = 8;
/// Largest header that readers of the format accept.
const LARGEST_HEADER: u64 = 100_000_000;
/// Number of bytes of a tensor that are copied at a time.
const PIECE: usize = 16 << 20;

/// Dtypes of libtorch and their safetensors names.
pub(crate) const KINDS: [(Kind, Dtype); 13] = [
    (Kind::Double, Dtype::F64),
    (Kind::Float, Dtype::F32),
    (Kind::Half, Dtype::F16),
    (Kind::BFloat16, Dtype::BF16),
    (Kind::Float8e5m2, Dtype::F8_E5M2),
    (Kind::Float8e4m3fn, Dtype::F8_E4M3),
    (Kind::ComplexFloat, Dtype::C64),
    (Kind::Int64, Dtype::I64),
    (Kind::Int, Dtype::I32),
    (Kind::Int16, Dtype::I16),
    (Kind::Int8, Dtype::I8),
    (Kind::Uint8, Dtype::U8),
    (Kind::Bool, Dtype::BOOL),
];

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

/// Writes tensors as [`write()`] does, each made by `make` when its turn comes, so that they never exist all at
/// once. `make` keeps shapes and dtypes.
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
/// As for [`write()`]; those of `make`; and if it returns a tensor of another shape or dtype.
pub fn write_made(
    path: impl AsRef<Path>,
    tensors: &[(String, Tensor)],
    metadata: &Metadata,
    make: impl FnMut(&str, &Tensor) -> Result<Tensor>,
) -> Result<()> {
    made_beside(path.as_ref(), tensors, metadata, make)?.replace()
}

/// Writes the tensors to a new file beside the target, which [`WrittenFile::replace`] renames: the tensors
/// may change before that, as on a thread that waits for the disk while training continues.
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
/// Large tensors are mapped pages of the file, loaded on use, which the system can drop at any time. So the
/// file must not be written to or truncated while they are in use; replacing it by [`write()`] is safe.
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

type Named = (String, Tensor);

/// Returns the order in which the tensors are written, and the header that describes it. Larger dtypes come
/// first, which keeps every tensor aligned.
fn lay_out<'a>(
    tensors: &'a [Named],
    metadata: &Metadata,
) -> Result<(Vec<&'a Named>, Vec<u8>), String> {
    let mut order = Vec::new();
    for named in tensors {
        order.push((dtype_of(&named.0, &named.1)?, named));
    }
    order.sort_by(|(a, (name_a, _)), (b, (name_b, _))| b.cmp(a).then(name_a.cmp(name_b)));

    let mut header = serde_json::Map::new();
    header.insert(METADATA.into(), serde_json::json!(metadata));
    let mut start = 0;
    for (dtype, (name, tensor)) in &order {
        let shape = tensor.size().into_iter().map(|size| size.unsigned_abs() as usize).collect();
        let end = start + tensor.numel() * dtype.bitsize() / 8;
        let info = TensorInfo { dtype: *dtype, shape, data_offsets: (start, end) };
        if header.insert(name.clone(), serde_json::json!(info)).is_some() {
            return Err(format!("'{name}' names two tensors: give each its own name"));
        }
        start = end;
    }
    Ok((order.into_iter().map(|(_, named)| named).collect(), encode(header)))
}

/// Encodes the header as in the file: its length, its text, and padding to the next aligned offset.
fn encode(header: serde_json::Map<String, serde_json::Value>) -> Vec<u8> {
    let mut text = serde_json::Value::Object(header).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(LENGTH_BYTES as usize), b' ');
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    bytes
}

fn dtype_of(name: &str, tensor: &Tensor) -> Result<Dtype, String> {
    if !tensor.defined() || tensor.is_sparse() {
        return Err(format!("'{name}' is sparse or not defined: make it dense first"));
    }
    let kind = tensor.kind();
    let found = KINDS.iter().find(|(known, _)| *known == kind);
    found.map(|(_, dtype)| *dtype).ok_or_else(|| {
        format!("'{name}' is of kind {kind:?}, which the format lacks: convert it first")
    })
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

fn read_header(file: &mut impl Read, path: &Path, length: u64) -> Result<Header> {
    let mut start = [0; LENGTH_BYTES as usize];
    file.read_exact(&mut start)
        .map_err(|_| damaged(path, format!("it has {length} bytes, too few for a header")))?;
    let header_length = u64::from_le_bytes(start);
    if header_length > LARGEST_HEADER || header_length > length.saturating_sub(LENGTH_BYTES) {
        let reason = format!("it has {length} bytes, but a header of {header_length}");
        return Err(damaged(path, reason));
    }
    let mut text = vec![0; header_length as usize];
    file.read_exact(&mut text).map_err(|reason| unreadable(path, reason))?;
    let header: Header = serde_json::from_slice(&text)
        .map_err(|reason| damaged(path, format!("its header cannot be understood: {reason}")))?;
    let reported = LENGTH_BYTES + header_length + header.data_len() as u64;
    if reported != length {
        let reason = format!("it has {length} bytes, but its header describes {reported}");
        return Err(damaged(path, reason));
    }
    Ok(header)
}

fn kind_of(path: &Path, name: &str, info: &TensorInfo) -> Result<Kind> {
    let found = KINDS.iter().find(|(_, known)| *known == info.dtype);
    found.map(|(kind, _)| *kind).ok_or_else(|| {
        let reason = format!("'{name}' is of kind {:?}, which libtorch lacks", info.dtype);
        damaged(path, reason)
    })
}

pub(crate) fn unreadable(path: &Path, reason: impl Display) -> Error {
    Error::File { action: "read", path: path.display().to_string(), reason: reason.to_string() }
}

fn damaged(path: &Path, reason: String) -> Error {
    Error::NotTensors { path: path.display().to_string(), reason }
}
