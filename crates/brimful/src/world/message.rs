//! Messages between ranks, except the data of tensors.

use std::fmt::{self, Display};

use brimful_torch::transfer;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::error::WorldError;
use crate::Result;
use crate::memory::{Arena, Memory};
use crate::save::KINDS;

/// Rows of tensors in flight, some of them missing.
pub(crate) type Tensors = Vec<Vec<Option<Tensor>>>;

/// Ordered channel for tensors from one rank to another. Each collective has its own channels, so that tensors of
/// a failed collective are not mistaken for tensors of a later collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Channel {
    pub(crate) collective: u64,
    pub(crate) number: u32,
}

/// Small message.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Message {
    /// Heartbeat, with the rank that this rank waits for.
    Beat { waits_for: Option<usize> },
    /// This rank's value in an exchange of values; `number` counts the exchanges.
    Value { number: u64, what: String, bytes: Vec<u8> },
    /// Announcement of tensors, numbered from `first` on: a rank counts all tensors that it sends to another rank.
    Tensors { channel: Channel, first: u64, outline: TensorOutline },
    /// The collective has failed here.
    Stop { collective: u64 },
    /// A rank has been silent for this many milliseconds.
    Lost { rank: usize, silent: u64 },
    /// A rank has kept others waiting for this many milliseconds.
    Hangs { rank: usize, waited: u64 },
    /// This rank ends, with an error or without.
    Left { words: Option<String> },
}

/// Dtypes and shapes of tensors, without their data.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct TensorOutline(Vec<Vec<Option<Form>>>);

#[derive(Debug, Serialize, Deserialize)]
struct Form {
    /// Index in the list of dtypes.
    kind: usize,
    size: Vec<i64>,
    traced: bool,
}

pub(super) fn encode(value: &impl Serialize) -> Result<Vec<u8>, WorldError> {
    postcard::to_stdvec(value).map_err(|error| WorldError::Message(error.to_string()))
}

pub(super) fn decode<T: for<'a> Deserialize<'a>>(bytes: &[u8]) -> Result<T, WorldError> {
    postcard::from_bytes(bytes).map_err(|error| WorldError::Message(error.to_string()))
}

/// Maps each entry of the rows by `f`.
fn each<T, U>(rows: &[Vec<Option<T>>], f: impl Fn(&T) -> Result<U>) -> Result<Vec<Vec<Option<U>>>> {
    let row = |row: &Vec<Option<T>>| row.iter().map(|t| t.as_ref().map(&f).transpose()).collect();
    rows.iter().map(row).collect()
}

impl TensorOutline {
    pub(super) fn of(tensors: &Tensors) -> Result<Self> {
        let form = |tensor: &Tensor| -> Result<Form> {
            let kind = KINDS.iter().position(|(kind, _)| *kind == tensor.kind());
            let unknown = || WorldError::Message(format!("no {:?} can be sent", tensor.kind()));
            let kind = kind.ok_or_else(unknown)?;
            Ok(Form { kind, size: tensor.size(), traced: tensor.requires_grad() })
        };
        Ok(Self(each(tensors, form)?))
    }

    /// Returns the number of tensors.
    pub(super) fn count(&self) -> u64 {
        self.0.iter().flatten().flatten().count() as u64
    }

    /// Checks that a transfer of this outline fits the tensor exactly.
    pub(super) fn check_fits(&self, tensor: &Tensor) -> Result<(), WorldError> {
        // MPI would write past the end of a tensor that is too short, or leave the rest of a longer one
        // unchanged.
        let alone = vec![vec![Some(tensor.shallow_clone())]];
        let room = Self::of(&alone).map_err(|error| WorldError::Message(error.to_string()))?;
        let numbers = |outline: &Self| {
            let forms = outline.0.iter().flatten().flatten();
            forms.map(|form| (form.kind, form.size.iter().product())).collect::<Vec<(_, i64)>>()
        };
        if numbers(self) == numbers(&room) {
            return Ok(());
        }
        Err(WorldError::Message(format!(
            "{self} comes where {room} is expected: let all ranks sum the same tensors"
        )))
    }

    /// Allocates tensors of this outline in host memory, for data that are needed in `memory`. Unless `memory` is
    /// an arena, the tensors are charged to a new arena without a limit. Otherwise, they would be charged to the
    /// arena that this thread has entered, which may be unrelated and full.
    pub(super) fn empty(&self, memory: Option<&Memory>) -> Result<Tensors> {
        let _inside = match memory {
            Some(Memory::Arena(arena)) => arena.enter(),
            _ => Arena::new("messages").enter(),
        };
        let tensor = |form: &Form| -> Result<Tensor> {
            let (kind, _) = KINDS.get(form.kind).unwrap_or(&(Kind::Float, safetensors::Dtype::F32));
            let tensor = Tensor::f_empty(&form.size, (*kind, Device::Cpu))?;
            Ok(match memory {
                Some(Memory::Accelerator(_)) => transfer::empty_pinned(&tensor)?,
                _ => tensor,
            })
        };
        each(&self.0, tensor)
    }

    /// Sets `requires_grad` on the tensors that had it at the sender.
    pub(super) fn trace(&self, tensors: &Tensors) -> Result<()> {
        for (form, tensor) in self.0.iter().flatten().zip(tensors.iter().flatten()) {
            if let (Some(Form { traced: true, .. }), Some(tensor)) = (form, tensor) {
                let _itself = tensor.f_set_requires_grad(true)?;
            }
        }
        Ok(())
    }
}

impl Display for TensorOutline {
    /// Lists the dtype and shape of each tensor.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = |form: &Form| KINDS.get(form.kind).map(|(kind, _)| *kind);
        let forms = self.0.iter().flatten().flatten().map(|form| match kind(form) {
            Some(kind) => format!("{kind:?} {:?}", form.size),
            None => format!("{:?} of no known kind", form.size),
        });
        let forms: Vec<String> = forms.collect();
        match forms.is_empty() {
            true => f.write_str("none"),
            false => f.write_str(&forms.join(", ")),
        }
    }
}
