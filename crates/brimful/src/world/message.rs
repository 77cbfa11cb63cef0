//! What ranks tell each other, apart from the numbers of tensors.

use brimful_torch::transfer;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::error::WorldError;
use crate::memory::{Arena, Memory};
use crate::save::KINDS;
use crate::{Error, Result};

/// Tensors under way, in rows, some of them missing.
pub(crate) type Tensors = Vec<Vec<Option<Tensor>>>;

/// A way for tensors from one rank to another, in order. A turn's channels are its own, so that
/// nothing of a turn that failed is taken for something of a later one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Channel {
    pub(crate) turn: u64,
    pub(crate) number: u32,
}

/// Tags that every MPI has. They are used again after so many, which does no harm: of two tensors with
/// one tag, that which was announced first is sent and asked for first.
const TAGS: i32 = 1 << 15;

/// The tags of tensors that are sent together, from the first on.
pub(super) fn tags_from(first: i32) -> impl Iterator<Item = i32> {
    (first..).map(|tag| tag % TAGS)
}

/// A small message.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Message {
    /// A sign of life.
    Beat { waits_for: Option<usize> },
    /// What this rank has to say where all ranks say something: the number counts such moments.
    Value { number: u64, what: String, bytes: Vec<u8> },
    /// Tensors follow, each with the next tag.
    Tensors { channel: Channel, tag: i32, outline: Outline },
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
pub(super) struct Outline(Vec<Vec<Option<Form>>>);

#[derive(Debug, Serialize, Deserialize)]
struct Form {
    /// The place in the list of kinds.
    kind: usize,
    size: Vec<i64>,
    traced: bool,
}

impl Message {
    pub(super) fn encode(&self) -> Result<Vec<u8>, WorldError> {
        encode(self)
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, WorldError> {
        decode(bytes)
    }
}

pub(super) fn encode(value: &impl Serialize) -> Result<Vec<u8>, WorldError> {
    postcard::to_stdvec(value).map_err(|error| WorldError::Message(error.to_string()))
}

pub(super) fn decode<T: for<'a> Deserialize<'a>>(bytes: &[u8]) -> Result<T, WorldError> {
    postcard::from_bytes(bytes).map_err(|error| WorldError::Message(error.to_string()))
}

impl Outline {
    pub(super) fn of(tensors: &Tensors) -> Result<Self> {
        let form = |tensor: &Tensor| {
            let kind = KINDS.iter().position(|(kind, _)| *kind == tensor.kind());
            let unknown = || WorldError::Message(format!("no {:?} can be sent", tensor.kind()));
            let (size, traced) = (tensor.size(), tensor.requires_grad());
            Ok::<_, Error>(Form { kind: kind.ok_or_else(unknown)?, size, traced })
        };
        let row = |row: &Vec<Option<Tensor>>| {
            row.iter().map(|tensor| tensor.as_ref().map(form).transpose()).collect()
        };
        Ok(Self(tensors.iter().map(row).collect::<Result<_>>()?))
    }

    /// Tensors of this outline in the host's memory, whose numbers are yet to come, and which are
    /// needed in this memory.
    pub(super) fn empty(&self, memory: Option<&Memory>) -> Result<Tensors> {
        let arena = if let Some(Memory::Arena(arena)) = memory { Some(arena) } else { None };
        let _inside = arena.map(Arena::enter);
        let tensor = |form: &Form| {
            let (kind, _) = KINDS.get(form.kind).unwrap_or(&(Kind::Float, safetensors::Dtype::F32));
            let tensor = Tensor::f_empty(&form.size, (*kind, Device::Cpu))?;
            Ok::<_, Error>(match memory {
                Some(Memory::Accelerator(_)) => transfer::room_for(&tensor)?,
                _ => tensor,
            })
        };
        let row = |row: &Vec<Option<Form>>| {
            row.iter().map(|form| form.as_ref().map(tensor).transpose()).collect()
        };
        self.0.iter().map(row).collect()
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
