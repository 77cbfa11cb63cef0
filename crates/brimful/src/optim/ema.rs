//! Exponential moving averages of a model's weights, which often evaluate better than the last weights.
//!
//! ```
//! use brimful::optim::{Ema, Optimizer, Sgd};
//! use tch::{Device, Kind, Tensor, nn, nn::Module};
//!
//! let store = nn::VarStore::new(Device::Cpu);
//! let model = nn::linear(store.root(), 4, 2, Default::default());
//! let mut optimizer = Optimizer::new(&store, Sgd::new(0.1))?;
//! let mut ema = Ema::new(&store, 0.999)?.warmup(true);
//!
//! let x = Tensor::ones([8, 4], (Kind::Float, Device::Cpu));
//! model.forward(&x).square().mean(Kind::Float).backward();
//! optimizer.step()?;
//! ema.update()?;
//!
//! ema.swap_in()?; // evaluate with the averages,
//! ema.swap_out()?; // and train on with the model's own weights
//! # Ok::<(), brimful::Error>(())
//! ```
//!
//! State, to be saved beside the model:
//!
//! | item | saved as |
//! | --- | --- |
//! | the average of a variable | a tensor of the variable's name |
//! | decay, warm-up and number of updates | texts |

use std::str::FromStr;

use tch::{Tensor, nn};

use super::parts::Parts;
use crate::Result;
use crate::pipeline::{Pipeline, settled_ema};
use crate::save::Metadata;
use crate::update::{EmaPart, averages_mismatch, check_decay};

const FORMAT: (&str, &str) = ("format", "brimful weight averages 1");
const DECAY: &str = "decay";
const WARMUP: &str = "warmup";
const UPDATES: &str = "updates";

/// Exponential moving averages of a model's variables: *average ← decay · average + (1 − decay) · weight*.
///
/// The average of an f16 or bf16 weight is in f32. A variable that requires no gradient, such as the running
/// statistics of norms or a frozen parameter, is not averaged but copied. The averages are allocated in the memory
/// that the caller has entered, or, with a pipeline, in the memory of their stages.
#[derive(Debug)]
pub struct Ema {
    parts: Parts<EmaPart>,
    decay: f64,
    warmup: bool,
    /// Number of updates of the averages.
    updates: u64,
}

impl Pipeline {
    /// Begins averages of all variables at their present values, in the memory of their stages. The new averages
    /// replace earlier ones.
    ///
    /// # Errors
    /// As [`Ema::new`].
    pub fn ema(&mut self, decay: f64) -> Result<Ema> {
        self.make_averages(decay)?;
        Ok(Ema::of(Parts::of_workers(self), decay))
    }
}

impl Ema {
    /// Begins averages of the store's variables at their present values. Variables that are created later
    /// are not included.
    ///
    /// # Errors
    /// When the decay is not in 0..1, or memory runs out.
    pub fn new(store: &nn::VarStore, decay: f64) -> Result<Self> {
        Self::for_named(store.variables().into_iter().collect(), decay)
    }

    /// Begins averages of these variables.
    ///
    /// # Errors
    /// When two variables have the same name, the decay is not in 0..1, or memory runs out.
    pub fn for_named(named: Vec<(String, Tensor)>, decay: f64) -> Result<Self> {
        check_decay(decay)?;
        Ok(Self::of(Parts::of_caller(EmaPart::new(named, |_| None)?), decay))
    }

    fn of(parts: Parts<EmaPart>, decay: f64) -> Self {
        Self { parts, decay, warmup: false, updates: 0 }
    }

    /// Sets whether to begin with a smaller decay, so that the first weights are soon forgotten: the decay of
    /// update *t*, counted from 0, is at most *(1 + t) / (10 + t)*.
    #[must_use]
    pub fn warmup(self, warmup: bool) -> Self {
        Self { warmup, ..self }
    }

    /// Returns the number of updates of the averages.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Returns the averages with the names of their variables, sorted by name. The next update changes them. In a
    /// pipeline over ranks, rank 0 gets all averages, and every other rank gets its own.
    ///
    /// # Errors
    /// When a worker has ended.
    pub fn averages(&self) -> Result<Vec<(String, Tensor)>> {
        let mut parts = self.parts.lock()?;
        let all = parts.all(settled_ema, |part| {
            let averages = part.averages();
            Ok(averages.map(|(name, value)| (name.to_owned(), value.shallow_clone())).collect())
        });
        parts.ranks.gather(all)
    }

    /// Updates the averages by the current weights, on all devices or on none. Call it after every step of the
    /// optimizer; the host does not wait for the device.
    ///
    /// # Errors
    /// When the averages are swapped in, or memory runs out. The averages are unchanged then.
    pub fn update(&mut self) -> Result<()> {
        let mut parts = self.parts.lock()?;
        let ranks = parts.ranks;
        let prepare = || parts.all(settled_ema, |part| part.prepare());
        let scratch = ranks.all_or_none("update averages", prepare)?;
        let before = self.updates as f64;
        let first = (1.0 + before) / (10.0 + before);
        let decay = if self.warmup { self.decay.min(first) } else { self.decay };
        parts.each(scratch, settled_ema, move |part, scratch| part.commit(&scratch, decay))?;
        self.updates += 1;
        Ok(())
    }

    /// Swaps the averages into the model, on all devices or on none. Keeps the model's own weights until
    /// [`Ema::swap_out`]; until then there is no update. Does nothing if the averages are swapped in already.
    ///
    /// # Errors
    /// When memory runs out; the model is unchanged then.
    pub fn swap_in(&mut self) -> Result<()> {
        let mut parts = self.parts.lock()?;
        let ranks = parts.ranks;
        let swap = || parts.all(settled_ema, EmaPart::swap_in);
        let swapped = ranks.all_or_none("swap averages in", swap);
        if swapped.is_err() {
            parts.all(settled_ema, EmaPart::swap_out)?;
        }
        swapped.map(drop)
    }

    /// Restores the model's own weights, to the last bit. Does nothing if the averages are not swapped in.
    ///
    /// # Errors
    /// When libtorch refuses, or a worker has ended.
    pub fn swap_out(&mut self) -> Result<()> {
        self.parts.lock()?.all(settled_ema, EmaPart::swap_out).map(drop)
    }

    /// Returns the whole state: averages by name, and texts for the rest. The tensors are the averages
    /// themselves, which the next update changes.
    ///
    /// # Errors
    /// As [`Ema::averages`].
    pub fn state(&self) -> Result<(Vec<(String, Tensor)>, Metadata)> {
        let texts = Metadata::from([
            (FORMAT.0.to_owned(), FORMAT.1.to_owned()),
            // Debug format, which is read back to the last bit.
            (DECAY.to_owned(), format!("{:?}", self.decay)),
            (WARMUP.to_owned(), self.warmup.to_string()),
            (UPDATES.to_owned(), self.updates.to_string()),
        ]);
        Ok((self.averages()?, texts))
    }

    /// Loads a state that [`Ema::state`] returned, with its decay.
    ///
    /// # Errors
    /// When the state belongs to other variables or shapes (the error names the first difference), the averages
    /// are swapped in, or memory runs out. Nothing is changed then.
    pub fn load_state(&mut self, tensors: &[(String, Tensor)], metadata: &Metadata) -> Result<()> {
        let mut parts = self.parts.lock()?;
        let texts = parts.ranks.all_or_none("load state", || read_texts(metadata))?;
        let names = parts.names("load state", settled_ema, EmaPart::names)?;
        let states = parts.split(&names, (tensors, &Metadata::new()), |name| name, |_| None);
        parts.load(states, settled_ema, |part, (tensors, _)| part.read(&tensors), EmaPart::take)?;
        drop(parts);
        (self.decay, self.warmup, self.updates) = texts;
        Ok(())
    }
}

/// Reads decay, warm-up and number of updates.
fn read_texts(metadata: &Metadata) -> Result<(f64, bool, u64)> {
    if metadata.get(FORMAT.0).map(String::as_str) != Some(FORMAT.1) {
        let saved = metadata.get(FORMAT.0).map_or("nothing", String::as_str);
        return Err(averages_mismatch(FORMAT.0, format!("'{saved}'"), format!("'{}'", FORMAT.1)));
    }
    let decay = read(metadata, DECAY)?;
    check_decay(decay)?;
    Ok((decay, read(metadata, WARMUP)?, read(metadata, UPDATES)?))
}

fn read<T: FromStr>(metadata: &Metadata, key: &str) -> Result<T> {
    let text = metadata.get(key);
    text.and_then(|text| text.parse().ok()).ok_or_else(|| {
        let saved = text.map_or("missing".to_owned(), |text| format!("'{text}'"));
        averages_mismatch(key, saved, "a number, or true or false".into())
    })
}
