//! State of the averages as named tensors and texts, to be saved beside the model.
//!
//! | item | saved as |
//! | --- | --- |
//! | the average of a variable | a tensor of the variable's name |
//! | decay, warm-up and number of updates | texts |

use std::collections::BTreeMap;

use tch::Tensor;

use super::{Average, Ema, check_decay};
use crate::optim::OptimError;
use crate::save::Metadata;
use crate::{Error, Result};

const FORMAT: (&str, &str) = ("format", "brimful weight averages 1");
const DECAY: &str = "decay";
const WARMUP: &str = "warmup";
const UPDATES: &str = "updates";

/// Saved state that fits these averages, in memory of its own.
pub(crate) struct ReadEma {
    /// New values in the order of the averages.
    values: Vec<Tensor>,
    decay: f64,
    warmup: bool,
    updates: u64,
}

impl Ema {
    /// Returns the whole state: averages by name, and texts for the rest. The tensors are the averages
    /// themselves, which the next update changes.
    pub fn state(&self) -> (Vec<(String, Tensor)>, Metadata) {
        let averages = self.averages();
        let tensors = averages.map(|(name, value)| (name.to_owned(), value.shallow_clone()));
        let metadata = Metadata::from([
            (FORMAT.0.to_owned(), FORMAT.1.to_owned()),
            // Debug format, which is read back to the last bit.
            (DECAY.to_owned(), format!("{:?}", self.decay)),
            (WARMUP.to_owned(), self.warmup.to_string()),
            (UPDATES.to_owned(), self.updates.to_string()),
        ]);
        (tensors.collect(), metadata)
    }

    /// Loads a state that [`Ema::state`] returned, with its decay.
    ///
    /// # Errors
    /// When it belongs to other variables or shapes (the error names the first difference), the averages
    /// are swapped in, or memory runs out. Nothing is changed then.
    pub fn load_state(&mut self, tensors: &[(String, Tensor)], metadata: &Metadata) -> Result<()> {
        let read = self.read_state(tensors, metadata)?;
        self.take_state(read);
        Ok(())
    }

    /// Reads a saved state into new memory. All of loading that can fail is here.
    pub(crate) fn read_state(
        &self,
        tensors: &[(String, Tensor)],
        metadata: &Metadata,
    ) -> Result<ReadEma> {
        if self.own.is_some() {
            return Err(OptimError::AveragesInPlace.into());
        }
        if metadata.get(FORMAT.0).map(String::as_str) != Some(FORMAT.1) {
            let saved = metadata.get(FORMAT.0).map_or("nothing", String::as_str);
            return Err(mismatch(FORMAT.0, format!("'{saved}'"), format!("'{}'", FORMAT.1)));
        }
        let decay = read(metadata, DECAY)?;
        check_decay(decay)?;
        Ok(ReadEma {
            values: self.matching(tensors)?,
            decay,
            warmup: read(metadata, WARMUP)?,
            updates: read(metadata, UPDATES)?,
        })
    }

    /// Replaces the averages with a state that was read.
    pub(crate) fn take_state(&mut self, read: ReadEma) {
        let ReadEma { values, decay, warmup, updates } = read;
        for (average, value) in self.averages.iter_mut().zip(values) {
            average.value = value;
        }
        (self.decay, self.warmup, self.updates) = (decay, warmup, updates);
    }

    /// Returns copies of the saved tensors in the order of the averages. Fails unless names and shapes are the
    /// same.
    fn matching(&self, tensors: &[(String, Tensor)]) -> Result<Vec<Tensor>> {
        let _no_grad = tch::no_grad_guard();
        let mut left: BTreeMap<&str, &Tensor> =
            tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let mut found = Vec::new();
        for average in &self.averages {
            let Average { name, value, .. } = average;
            let saved = left.remove(name.as_str());
            let saved = saved.ok_or_else(|| mismatch(name, "missing".into(), shape(value)))?;
            if saved.size() != value.size() {
                return Err(mismatch(name, shape(saved), shape(value)));
            }
            let _charged = average.enter_host_arena();
            let mut copy = value.f_empty_like()?;
            copy.f_copy_(saved)?;
            found.push(copy);
        }
        match left.first_key_value() {
            Some((name, tensor)) => Err(mismatch(name, shape(tensor), "missing".into())),
            None => Ok(found),
        }
    }
}

fn read<T: std::str::FromStr>(metadata: &Metadata, key: &str) -> Result<T> {
    let text = metadata.get(key);
    text.and_then(|text| text.parse().ok()).ok_or_else(|| {
        let saved = text.map_or("missing".to_owned(), |text| format!("'{text}'"));
        mismatch(key, saved, "a number, or true or false".into())
    })
}

fn shape(tensor: &Tensor) -> String {
    format!("of shape {:?}", tensor.size())
}

fn mismatch(name: &str, saved: String, here: String) -> Error {
    OptimError::AveragesMismatch { name: name.into(), saved, here }.into()
}
