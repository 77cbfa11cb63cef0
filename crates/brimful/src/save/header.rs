//! Header of a safetensors file: how it is laid out, written, and read.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::{Metadata as Header, TensorInfo};
use tch::{Kind, Tensor};

use super::whole_file::unreadable;
use crate::{Error, Result};

/// Texts that go with the tensors, such as their format and options.
pub type Metadata = BTreeMap<String, String>;

/// Key of the texts in a safetensors header, which no tensor can have as its name.
const METADATA: &str = "__metadata__";
/// Size of the header's length, a little-endian integer at the beginning of the file.
const LENGTH_BYTES: u64 = 8;
/// Largest header that readers of the format accept.
const LARGEST_HEADER: u64 = 100_000_000;

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

type Named = (String, Tensor);

/// Returns the order in which the tensors are written, and the header that describes it. Larger dtypes come
/// first, which keeps every tensor aligned.
pub(super) fn lay_out<'a>(
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

pub(super) fn read_header(file: &mut impl Read, path: &Path, length: u64) -> Result<Header> {
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

pub(super) fn kind_of(path: &Path, name: &str, info: &TensorInfo) -> Result<Kind> {
    let found = KINDS.iter().find(|(_, known)| *known == info.dtype);
    found.map(|(kind, _)| *kind).ok_or_else(|| {
        let reason = format!("'{name}' is of kind {:?}, which libtorch lacks", info.dtype);
        damaged(path, reason)
    })
}

pub(super) fn damaged(path: &Path, reason: String) -> Error {
    Error::NotTensors { path: path.display().to_string(), reason }
}
