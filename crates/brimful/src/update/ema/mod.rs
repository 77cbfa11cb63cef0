//! Exponential moving averages of one thread's variables.

mod update;

use std::collections::BTreeMap;

use brimful_torch::arena::ArenaGuard;
use brimful_torch::foreach;
use brimful_torch::optim::fits;
use tch::Tensor;

use super::number_options::within;
use super::{OptimError, check_named};
use crate::batch::summed_in;
use crate::memory::Arena;
use crate::{Error, Result};

/// Averages of one thread's variables: see [`Ema`](crate::optim::Ema).
#[derive(Debug)]
pub(crate) struct EmaPart {
    averages: Vec<Average>,
    /// The model's own weights while the averages are swapped in, in the order of the averages.
    own: Option<Vec<Tensor>>,
}

/// Saved averages in the order of the part's averages, in their own memory.
pub(crate) struct ReadEma(Vec<Tensor>);

/// Variable and its average.
#[derive(Debug)]
struct Average {
    name: String,
    variable: Tensor,
    value: Tensor,
    /// The host's arena, if the variable is offloaded.
    offload: Option<Arena>,
}

impl EmaPart {
    /// Begins averages of these variables, each charged to the arena that `offload` returns for its name.
    pub(crate) fn new(
        mut named: Vec<(String, Tensor)>,
        offload: impl Fn(&str) -> Option<Arena>,
    ) -> Result<Self> {
        check_named(&named)?;
        named.sort_by(|(a, _), (b, _)| a.cmp(b));
        let average = |(name, variable): (String, Tensor)| {
            let offload = offload(&name);
            Average::of(name, variable, offload)
        };
        let averages = tch::no_grad(|| named.into_iter().map(average).collect::<Result<_>>())?;
        Ok(Self { averages, own: None })
    }

    /// Returns the averages with the names of their variables, sorted by name.
    pub(crate) fn averages(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.averages.iter().map(|average| (average.name.as_str(), &average.value))
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.averages.iter().map(|average| average.name.clone()).collect()
    }

    /// Swaps the averages into the model; changes nothing if that fails.
    pub(crate) fn swap_in(&mut self) -> Result<()> {
        if self.own.is_some() {
            return Ok(());
        }
        let _no_grad = tch::no_grad_guard();
        let variables = weights(&self.averages)?;
        let own = variables.iter().zip(&self.averages).map(|(variable, average)| {
            let _charged = average.enter_host_arena();
            Ok(variable.f_empty_like()?)
        });
        let own = own.collect::<Result<Vec<Tensor>>>()?;
        foreach::copy(&own, &variables)?;
        self.own = Some(own);
        Ok(foreach::copy(&variables, &values(&self.averages))?)
    }

    /// Restores the model's own weights. Does nothing if the averages are not swapped in.
    pub(crate) fn swap_out(&mut self) -> Result<()> {
        let Some(own) = &self.own else { return Ok(()) };
        let _no_grad = tch::no_grad_guard();
        foreach::copy(&weights(&self.averages)?, own)?;
        self.own = None;
        Ok(())
    }

    /// Reads saved averages into new memory. All of loading that can fail is here.
    ///
    /// # Errors
    /// When names or shapes differ, the averages are swapped in, or memory runs out.
    pub(crate) fn read(&self, tensors: &[(String, Tensor)]) -> Result<ReadEma> {
        if self.own.is_some() {
            return Err(OptimError::AveragesInPlace.into());
        }
        let _no_grad = tch::no_grad_guard();
        let mut left: BTreeMap<&str, &Tensor> =
            tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let mut found = Vec::new();
        for average in &self.averages {
            let Average { name, value, .. } = average;
            let saved = left.remove(name.as_str());
            let saved =
                saved.ok_or_else(|| averages_mismatch(name, "missing".into(), shape(value)))?;
            if saved.size() != value.size() {
                return Err(averages_mismatch(name, shape(saved), shape(value)));
            }
            let _charged = average.enter_host_arena();
            let mut copy = value.f_empty_like()?;
            copy.f_copy_(saved)?;
            found.push(copy);
        }
        match left.first_key_value() {
            Some((name, tensor)) => Err(averages_mismatch(name, shape(tensor), "missing".into())),
            None => Ok(ReadEma(found)),
        }
    }

    /// Replaces the averages with those that were read.
    pub(crate) fn take(&mut self, ReadEma(values): ReadEma) {
        self.averages.iter_mut().zip(values).for_each(|(average, value)| average.value = value);
    }
}

impl Average {
    fn of(name: String, variable: Tensor, offload: Option<Arena>) -> Result<Self> {
        let _charged = offload.as_ref().map(Arena::enter);
        let kind = summed_in(variable.kind());
        // Always a copy, with the variable's strides.
        let value = variable.f_detach()?.f_to_dtype(kind, false, true)?;
        Ok(Self { name, variable, value, offload })
    }

    /// Charges allocations to the host's arena while the guard lives, if the average is offloaded.
    fn enter_host_arena(&self) -> Option<ArenaGuard> {
        self.offload.as_ref().map(Arena::enter)
    }

    /// Returns whether the variable is averaged, not copied.
    fn is_averaged(&self) -> bool {
        self.variable.requires_grad()
    }

    /// Returns whether the average and its variable have the same dtype, device and strides.
    fn is_alike(&self) -> bool {
        fits(&self.value, &self.variable) && self.value.kind() == self.variable.kind()
    }
}

fn values<'a>(averages: impl IntoIterator<Item = &'a Average>) -> Vec<Tensor> {
    averages.into_iter().map(|average| average.value.shallow_clone()).collect()
}

/// Returns the variables as detached tensors, which may be written.
fn weights<'a>(averages: impl IntoIterator<Item = &'a Average>) -> Result<Vec<Tensor>> {
    averages.into_iter().map(|average| Ok(average.variable.f_detach()?)).collect()
}

/// Checks the decay of averages.
pub(crate) fn check_decay(decay: f64) -> Result<()> {
    within("decay", decay, (0.0..1.0).contains(&decay), "give a number of at least 0 and below 1")
}

fn shape(tensor: &Tensor) -> String {
    format!("of shape {:?}", tensor.size())
}

pub(crate) fn averages_mismatch(name: &str, saved: String, here: String) -> Error {
    OptimError::AveragesMismatch { name: name.into(), saved, here }.into()
}
