//! Open safetensors file: its header is read, and its tensors are copied one by one on request.

use std::fs::File;
use std::io::BufReader;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use brimful_torch::mapped::{self, MappedError};
use safetensors::tensor::{Metadata as Header, TensorInfo};
use tch::{Kind, Tensor};

use super::header::{Metadata, damaged, kind_of, read_header};
use super::whole_file::unreadable;
use crate::{Error, Result};

/// A smaller tensor is copied: mapping it would take a page and an entry in the system's list of maps.
const SMALL: usize = 1 << 20;

/// Number of bytes of two tensors that are compared at once.
const COMPARED_AT_ONCE: usize = 1 << 20;

/// Open safetensors file whose header has been read.
#[derive(Debug)]
pub struct OpenedFile {
    path: PathBuf,
    file: File,
    header: Header,
    /// Offset of the tensors' bytes.
    start: u64,
}

impl OpenedFile {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// When the file cannot be read, is not a safetensors file, or was cut off.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|reason| unreadable(path, reason))?;
        let found = file.metadata().map_err(|reason| unreadable(path, reason))?;
        if found.is_dir() {
            return Err(unreadable(path, "it is a folder: name a file in it"));
        }
        let length = found.len();
        let header = read_header(&mut BufReader::new(&file), path, length)?;
        let start = length - header.data_len() as u64;
        Ok(Self { path: path.to_owned(), file, header, start })
    }

    /// Returns the names of the tensors, in the order of their bytes.
    pub fn names(&self) -> Vec<String> {
        self.header.offset_keys()
    }

    /// Returns the shape of the tensor `name`, if there is one.
    pub fn shape(&self, name: &str) -> Option<Vec<i64>> {
        self.header.info(name).map(shape_of)
    }

    /// Returns the dtype of the tensor `name`, if there is one and libtorch has its dtype.
    pub fn kind(&self, name: &str) -> Option<Kind> {
        kind_of(&self.path, name, self.header.info(name)?).ok()
    }

    /// Returns the texts that go with the tensors.
    pub fn metadata(&self) -> Metadata {
        self.header.metadata().clone().unwrap_or_default().into_iter().collect()
    }

    /// Copies a tensor into another of its shape, of any dtype and on any device, without a second copy in
    /// host memory.
    ///
    /// # Errors
    /// When there is no tensor of this name and shape, the file cannot be read any more, or memory runs
    /// out.
    pub fn copy(&self, name: &str, into: &Tensor) -> Result<()> {
        let info = self.info(name)?;
        let (here, wanted) = (shape_of(info), into.size());
        if here != wanted {
            let reason = format!("'{name}' is of shape {here:?}, not {wanted:?}");
            return Err(damaged(&self.path, reason));
        }
        let kind = kind_of(&self.path, name, info)?;
        let start = self.start + info.data_offsets.0 as u64;
        mapped::copy(&self.file, start, kind, into).map_err(|error| self.refused(error))
    }

    /// Returns whether a tensor of this file and one of another have the same dtype, shape and bytes.
    ///
    /// # Errors
    /// When either is missing, or a file cannot be read any more.
    pub fn holds_same(&self, name: &str, other: &Self, other_name: &str) -> Result<bool> {
        let (own, others) = (self.info(name)?, other.info(other_name)?);
        if (own.dtype, &own.shape) != (others.dtype, &others.shape) {
            return Ok(false);
        }
        let length = own.data_offsets.1 - own.data_offsets.0;
        let mut at = 0;
        let mut buffers = [vec![0; COMPARED_AT_ONCE], vec![0; COMPARED_AT_ONCE]];
        while at < length {
            let part = (length - at).min(COMPARED_AT_ONCE);
            for ((file, info), buffer) in
                [(self, own), (other, others)].into_iter().zip(&mut buffers)
            {
                let from = file.start + (info.data_offsets.0 + at) as u64;
                let read = file.file.read_exact_at(&mut buffer[..part], from);
                read.map_err(|reason| unreadable(&file.path, reason))?;
            }
            if buffers[0][..part] != buffers[1][..part] {
                return Ok(false);
            }
            at += part;
        }
        Ok(true)
    }

    fn info(&self, name: &str) -> Result<&TensorInfo> {
        let info = self.header.info(name);
        info.ok_or_else(|| damaged(&self.path, format!("'{name}' is not in it")))
    }

    /// Reads all tensors, on the CPU, in the order of their bytes. Large ones are mapped pages of the file,
    /// small ones copies.
    pub(super) fn read_all(&self) -> Result<Vec<(String, Tensor)>> {
        let read = |name: String| {
            let info = self.header.info(&name).expect("the name is one of the header's");
            let kind = kind_of(&self.path, &name, info)?;
            let (shape, bytes) = (shape_of(info), info.data_offsets.1 - info.data_offsets.0);
            let start = self.start + info.data_offsets.0 as u64;
            if bytes >= SMALL {
                let mapped = mapped::tensor(&self.file, start, kind, &shape);
                return Ok((name, mapped.map_err(|error| self.refused(error))?));
            }
            let mut copied = vec![0; bytes];
            let read = self.file.read_exact_at(&mut copied, start);
            read.map_err(|reason| unreadable(&self.path, reason))?;
            Ok((name, Tensor::f_from_data_size(&copied, &shape, kind)?))
        };
        self.names().into_iter().map(read).collect()
    }

    fn refused(&self, error: MappedError) -> Error {
        match error {
            MappedError::File(reason) => unreadable(&self.path, reason),
            MappedError::Torch(error) => error.into(),
            MappedError::Bridge(error) => error.into(),
        }
    }
}

fn shape_of(info: &TensorInfo) -> Vec<i64> {
    info.shape.iter().map(|&size| size as i64).collect()
}
