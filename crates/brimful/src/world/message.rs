//! What ranks tell each other, apart from the numbers of tensors.

use std::fmt::{self, Display};

use brimful_torch::transfer;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::error::WorldError;
use crate::Result;
use crate::memory::{Arena, Memory};
use crate::save::KINDS;

/// Tensors under way, in rows, some of them missing.
pub(crate) type Tensors = Vec<Vec<Option<Tensor>>>;

/// A way for tensors from one rank to another, in order. A turn's channels are its own, so that
/// nothing of a turn that failed is taken for something of a later one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Channel {
    pub(crate) turn: u64,
    pub(crate) number: u32,
}

/// A small message.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Message {
    /// A sign of life.
    Beat { waits_for: Option<usize> },
    /// What this rank has to say where all ranks say something: the number counts such moments.
    Value { number: u64, what: String, bytes: Vec<u8> },
    /// Tensors follow, numbered from the first on: a rank counts all that it sends to another.
    Tensors { channel: Channel, first: u64, outline: TensorOutline },
    /// The turn has failed here.
    Stop { turn: u64 },
    /// A rank has been silent for so many milliseconds.
    Lost { rank: usize, silent: u64 },
    /// A rank has been waited for for so many milliseconds.
    Hangs { rank: usize, waited: u64 },
    /// This rank ends, with an error or without.
    Left { words: Option<String> },
}

/// Tensors without their numbers.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct TensorOutline(Vec<Vec<Option<Form>>>);

#[derive(Debug, Serialize, Deserialize)]
struct Form {
    /// The place in the list of kinds.
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

/// The same rows, with what `f` makes of each entry.
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

    /// How many tensors there are.
    pub(super) fn count(&self) -> u64 {
        self.0.iter().flatten().flatten().count() as u64
    }

    /// Makes sure that a parcel of this outline is just what the tensor has room for.
    pub(super) fn check_fits(&self, tensor: &Tensor) -> Result<(), WorldError> {
        // MPI would write past the end of a tensor that is too short, or leave the rest of a longer one.
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

    /// Tensors of this outline in the host's memory, whose numbers are yet to come, and which are
    /// needed in this memory. Where that is no arena they have an account of their own, without a limit: the thread
    /// that happens to move messages on may have an arena that is full, which is none of its sender's.
    pub(super) fn empty(&self, memory: Option<&Memory>) -> Result<Tensors> {
        let _inside = match memory {
            Some(Memory::Arena(arena)) => arena.enter(),
            _ => Arena::new("messages").enter(),
        };
        let tensor = |form: &Form| -> Result<Tensor> {
            let (kind, _) = KINDS.get(form.kind).unwrap_or(&(Kind::Float, safetensors::Dtype::F32));
            let tensor = Tensor::f_empty(&form.size, (*kind, Device::Cpu))?;
            Ok(match memory {
                Some(Memory::Accelerator(_)) => transfer::room_for(&tensor)?,
                _ => tensor,
            })
        };
        each(&self.0, tensor)
    }

    /// Lets those get gradients that had them at the sender's.
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
    /// The kind and shape of each tensor.
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
