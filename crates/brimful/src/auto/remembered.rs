//! Reads and writes sizes found by earlier runs, in a file that several models may share.
//!
//! The file is optional: a damaged or foreign one is left unchanged, with a warning.

use std::collections::HashMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::kind::Kind;
use super::memory_model::Line;
use super::sizer::Finding;
use crate::save;

/// Name of the file's format, with its version.
const FORMAT: &str = "brimful sizes 1";

/// Cache key of remembered micro-batch sizes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    /// Hash of the variables' names, shapes and dtypes.
    pub(crate) model: String,
    pub(crate) dtype: String,
    pub(crate) device: String,
    /// Total memory of the device, in bytes.
    pub(crate) memory: u64,
    pub(crate) goal: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Contents {
    format: String,
    sizes: Vec<RememberedSize>,
}

#[derive(Debug, Serialize, Deserialize)]
struct RememberedSize {
    #[serde(flatten)]
    identity: Identity,
    kind: Kind,
    #[serde(flatten)]
    found: Finding,
}

/// Reads this model's sizes; `None` where the file is not one of brimful's.
pub(crate) fn read(path: &Path, identity: &Identity) -> Option<HashMap<Kind, Finding>> {
    let mine = entries(path)?.into_iter().filter(|entry| entry.identity == *identity);
    let sound = mine.filter(|entry| is_sound(&entry.found));
    Some(sound.map(|entry| (entry.kind, entry.found)).collect())
}

/// Writes this model's sizes in place of its earlier ones; entries of other models stay.
pub(crate) fn write(path: &Path, identity: &Identity, found: &HashMap<Kind, Finding>) {
    // Read again, because other runs share the file; a file that is no longer ours is not overwritten.
    let Some(entries) = entries(path) else { return };
    let others = entries.into_iter().filter(|entry| entry.identity != *identity);
    let mine = found.iter().map(|(kind, found)| RememberedSize {
        identity: identity.clone(),
        kind: kind.clone(),
        found: found.clone(),
    });
    let contents = Contents { format: FORMAT.into(), sizes: others.chain(mine).collect() };
    let text = serde_json::to_string_pretty(&contents).expect("numbers and texts");
    if let Err(error) = save::replace(path, text.as_bytes()) {
        tracing::warn!(%error, "the micro-batch size was found but cannot be remembered");
    }
}

fn entries(path: &Path) -> Option<Vec<RememberedSize>> {
    let ignored = |reason: String| {
        let path = path.display();
        tracing::warn!(%path, reason, "remembered micro-batch sizes are not used");
        None
    };
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Some(Vec::new()),
        Err(error) => return ignored(error.to_string()),
    };
    match serde_json::from_str::<Contents>(&text) {
        Ok(contents) if contents.format == FORMAT => Some(contents.sizes),
        Ok(contents) => ignored(format!("it is '{}', not '{FORMAT}'", contents.format)),
        Err(error) => ignored(format!("it is not a file of brimful's: {error}")),
    }
}

fn is_sound(found: &Finding) -> bool {
    let sound = |line: &Line| line.fixed.is_finite() && line.per_sample.is_finite();
    found.size > 0 && found.lines.iter().all(sound)
}

/// Hashes variables' names, shapes and dtypes, in order.
pub(crate) fn hash_of_variables<'a>(named: impl Iterator<Item = (&'a str, &'a Tensor)>) -> String {
    let line = |(name, tensor): (&str, &Tensor)| {
        format!("{name} {:?} {:?}\n", tensor.size(), tensor.kind())
    };
    hash_of(&named.map(line).collect::<String>())
}

/// Hashes a text to 16 hexadecimal digits.
pub(crate) fn hash_of(text: &str) -> String {
    format!("{:016x}", fnv(text.as_bytes()))
}

/// Computes the FNV-1a hash, which is equal on every machine and with every compiler.
fn fnv(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}
