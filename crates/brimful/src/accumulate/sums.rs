//! Gradient sums of a step: summed over groups, replicas and ranks, and committed to the parameters.

use std::sync::{Arc, Mutex, PoisonError};

use brimful_torch::autograd::set_gradient;
use brimful_torch::gradients::first_sparse;
use brimful_torch::{foreach, transfer};
use tch::nn::Variables;
use tch::{Device, Kind, Tensor};

use crate::ranks::{Buckets, RankSum};
use crate::{Error, Result};

/// One gradient sum for each parameter; `None` without a gradient.
pub(crate) type Sum = Vec<Option<Tensor>>;

/// Gradient sums of a step so far, one list for each group of terms.
#[derive(Debug, Default)]
pub(crate) struct Sums {
    pub(super) groups: Vec<Sum>,
    /// True if some sums are in memory of CUDA graphs, which the next step will overwrite.
    pub(super) lent: bool,
    /// True if sums on the host belong to offloaded parameters: they keep the dtype in which they were sent.
    pub(super) on_host: bool,
    /// Buckets of a single group that are in flight to other ranks.
    pub(super) buckets: Option<Buckets>,
}

/// One sum, and the tensors to be added to it in this order.
#[derive(Debug)]
pub(crate) struct Addends {
    pub(crate) into: Tensor,
    pub(crate) what: Vec<Tensor>,
}

impl Sums {
    /// Creates empty sums for a rank that has run no backward in a step, with offloaded parameters or not.
    pub(crate) fn none(on_host: bool) -> Self {
        Self { on_host, ..Self::default() }
    }

    /// Merges the sums of several replicas of one model: returns those of the first replica that has any, and
    /// the addends of the others.
    pub(crate) fn of_replicas(replicas: Vec<Self>) -> (Self, Vec<Addends>) {
        let mut whole = Self::default();
        let mut addends: Vec<Vec<Option<Addends>>> = Vec::new();
        for Self { groups, lent, on_host, .. } in replicas {
            whole.lent |= lent;
            whole.on_host |= on_host;
            addends.resize_with(groups.len().max(addends.len()), Vec::new);
            for (columns, sum) in addends.iter_mut().zip(groups) {
                columns.resize_with(sum.len().max(columns.len()), || None);
                for (column, new) in columns.iter_mut().zip(sum) {
                    let Some(new) = new else { continue };
                    match column {
                        Some(column) => column.what.push(new),
                        None => *column = Some(Addends { into: new, what: Vec::new() }),
                    }
                }
            }
        }
        let sum = |columns: &Vec<Option<Addends>>| {
            columns.iter().map(|c| c.as_ref().map(|c| c.into.shallow_clone())).collect()
        };
        whole.groups = addends.iter().map(sum).collect();
        (whole, addends.into_iter().flatten().flatten().collect())
    }

    /// Transfers the sums to this device, where their parameters are: a parameter that the first replica has not
    /// reached has its sum on another replica's device.
    pub(crate) fn on(mut self, device: Device) -> Result<Self> {
        for sum in self.groups.iter_mut().flatten().flatten() {
            *sum = sum.f_to_device(device)?;
        }
        Ok(self)
    }

    pub(crate) fn are_on(&self, device: Device) -> bool {
        self.groups.iter().flatten().flatten().all(|sum| sum.device() == device)
    }

    /// Adds a later part of the same step, group by group; `places` are the indices of the later part's sums.
    pub(crate) fn extend(&mut self, later: Self, places: &[usize]) -> Result<()> {
        self.on_host |= later.on_host;
        self.groups.resize_with(later.groups.len().max(self.groups.len()), Vec::new);
        for (mine, theirs) in self.groups.iter_mut().zip(later.groups) {
            let count = places.iter().map(|place| place + 1).max().unwrap_or(0);
            mine.resize_with(count.max(mine.len()), || None);
            let mut placed: Sum = mine.iter().map(|_| None).collect();
            theirs.into_iter().zip(places).for_each(|(sum, &place)| placed[place] = sum);
            add_sum(mine, placed)?;
        }
        Ok(())
    }

    /// Returns whether no backward has run.
    pub(crate) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Copies borrowed sums, so that they outlast the step.
    pub(crate) fn own(&mut self) -> Result<()> {
        if self.lent {
            let copy = |sum: &Sum| copied(sum, sum.iter().map(Option::as_ref));
            self.groups = self.groups.iter().map(copy).collect::<Result<_>>()?;
            self.lent = false;
        }
        Ok(())
    }

    /// Combines the sums of all groups, each times its factor.
    pub(crate) fn total(self, parameters: usize, factors: &[f64]) -> Result<Total> {
        let (lent, on_host) = (self.lent, self.on_host);
        Ok(Total { sum: self.combined(parameters, factors)?, lent, on_host })
    }

    /// Combines the sums over all ranks; `present` says for each parameter whether any rank has a gradient. With
    /// `alike`, all ranks have a single, equal factor, which is applied at the end, so that gradients may be in
    /// flight before the factor is known.
    pub(crate) fn total_over_ranks(
        mut self,
        parameters: &[Tensor],
        factors: &[f64],
        alike: bool,
        collective: &RankSum,
        present: &[bool],
    ) -> Result<Total> {
        let mut buckets = match self.buckets.take() {
            Some(buckets) => buckets,
            None => Buckets::new(collective.clone(), parameters)?,
        };
        // One factor for all ranks is applied once, after the exchange. Otherwise each rank applies its own
        // factors before the exchange, because the buckets add up the groups.
        let last = factors.first().copied().filter(|_| alike);
        let first = if alike { &[][..] } else { factors };
        let on_host = self.on_host;
        buckets.fill(&self.combined(parameters.len(), first)?)?;
        let here = |((sum, parameter), present): ((Tensor, &Tensor), &bool)| {
            let here = || match parameter.device() {
                Device::Cpu => Ok(sum.shallow_clone()),
                device => transfer::send(&sum, device),
            };
            present.then(here).transpose()
        };
        let sums = buckets.summed()?.into_iter().zip(parameters).zip(present);
        let sum = sums.map(here).collect::<Result<Sum, _>>()?;
        scale(&sum, last)?;
        Ok(Total { sum, lent: false, on_host })
    }

    /// Returns whether each parameter has a sum.
    pub(crate) fn present(&self, parameters: usize) -> Vec<bool> {
        let has =
            |at: usize| self.groups.iter().any(|sum| sum.get(at).is_some_and(Option::is_some));
        (0..parameters).map(has).collect()
    }

    /// Combines the sums of all groups, each times its factor.
    fn combined(self, parameters: usize, factors: &[f64]) -> Result<Sum> {
        let mut groups = self.groups.into_iter();
        let mut total = groups.next().unwrap_or_default();
        scale(&total, factors.first().copied())?;
        for (sum, factor) in groups.zip(factors.iter().skip(1)) {
            scale(&sum, Some(*factor))?;
            add_sum(&mut total, sum)?;
        }
        total.resize_with(parameters, || None);
        Ok(total)
    }
}

/// Gradients of a step, one for each parameter, in the dtype in which they were summed.
#[derive(Debug, Default)]
pub(crate) struct Total {
    sum: Sum,
    lent: bool,
    on_host: bool,
}

impl Total {
    /// Takes a parameter's gradient out.
    pub(crate) fn take(&mut self, parameter: usize) -> Option<Tensor> {
        self.sum.get_mut(parameter)?.take()
    }

    /// Adds gradients of the same parameters, which were summed apart.
    pub(crate) fn add(&mut self, other: Sum) -> Result<()> {
        self.sum.resize_with(other.len().max(self.sum.len()), || None);
        add_sum(&mut self.sum, other)
    }

    /// Casts the gradients to their parameters' dtypes, ready to be added to existing ones.
    pub(crate) fn finish(self, parameters: &[Tensor]) -> Result<Finished> {
        Ok(Finished(cast(self.sum, parameters, self.lent, self.on_host)?))
    }
}

/// Gradients of a step, one for each parameter, not yet visible to the user.
#[derive(Debug)]
pub(crate) struct Finished(Sum);

impl Finished {
    /// Returns the index and the dtype of the first gradient that would not be finite after the commit.
    pub(crate) fn first_non_finite(&self, parameters: &[Tensor]) -> Result<Option<(usize, Kind)>> {
        let all = || {
            let pairs = self.0.iter().zip(parameters).enumerate();
            pairs.filter_map(|(at, (new, p))| Some((at, new.as_ref()?, gradient(p))))
        };
        let fresh = all().filter(|(.., old)| old.is_none()).map(|(_, new, _)| new.shallow_clone());
        let is_fresh_finite = are_finite(&fresh.collect::<Vec<_>>())?;
        for (at, new, old) in all() {
            let (kind, is_finite) = match old {
                None => (new.kind(), is_fresh_finite || are_finite(&[new.shallow_clone()])?),
                // Checked one after the other, because all results together would take as much memory as all
                // gradients.
                Some(old) => {
                    let kind = old.kind();
                    (kind, are_finite(&[old.f_add(new)?.f_to_kind(kind)?])?)
                }
            };
            if !is_finite {
                return Ok(Some((at, kind)));
            }
        }
        Ok(None)
    }

    /// Adds these gradients to the parameters' existing ones. Allocates nothing.
    pub(crate) fn apply(self, parameters: &mut [Tensor]) -> Result<()> {
        // Added in place, so that optimizers find the gradients in the same tensors as before.
        let mut gradients: Sum = parameters.iter().map(gradient).collect();
        add_sum(&mut gradients, self.0)?;
        for (parameter, new) in parameters.iter_mut().zip(&gradients) {
            set_gradient(parameter, new.as_ref())?;
        }
        Ok(())
    }
}

/// Returns a parameter's gradient, if it has one.
pub(super) fn gradient(parameter: &Tensor) -> Option<Tensor> {
    let gradient = parameter.grad();
    gradient.defined().then_some(gradient)
}

/// Returns whether all numbers are finite; the host waits for the device.
fn are_finite(tensors: &[Tensor]) -> Result<bool> {
    if tensors.is_empty() {
        return Ok(true);
    }
    Ok(foreach::largest(tensors)?.f_double_value(&[])?.is_finite())
}

pub(super) fn add_sum(mine: &mut [Option<Tensor>], theirs: Sum) -> Result<()> {
    let mut into = Vec::new();
    let mut what = Vec::new();
    for (mine, theirs) in mine.iter_mut().zip(theirs) {
        match (mine, theirs) {
            (Some(sum), Some(new)) => {
                into.push(sum.shallow_clone());
                what.push(new);
            }
            (mine @ None, new) => *mine = new,
            (Some(_), None) => {}
        }
    }
    Ok(foreach::add(&into, &what, 1.0)?)
}

fn scale(sum: &Sum, factor: Option<f64>) -> Result<()> {
    let Some(factor) = factor.filter(|factor| *factor != 1.0) else { return Ok(()) };
    let present: Vec<Tensor> = sum.iter().flatten().map(Tensor::shallow_clone).collect();
    Ok(foreach::scale(&present, factor)?)
}

/// Casts each sum to its parameter's dtype. Sums of that dtype stay as they are, or are copied if they are
/// borrowed.
fn cast(mut sum: Sum, parameters: &[Tensor], lent: bool, on_host: bool) -> Result<Sum> {
    let stays = |sum: &Tensor, parameter: &Tensor| {
        let stays = on_host && sum.device() == Device::Cpu;
        stays || !lent && sum.kind() == parameter.kind()
    };
    let pairs = sum.iter_mut().zip(parameters);
    let moving = pairs.map(|(sum, parameter)| sum.take_if(|sum| !stays(sum, parameter))).collect();
    let moved = copied(&moving, parameters.iter().map(Some))?;
    Ok(sum.into_iter().zip(moved).map(|(stayed, moved)| stayed.or(moved)).collect())
}

/// Copies the sums, in the dtype and memory format of `like`, by a few kernels for all of them.
fn copied<'a>(sum: &Sum, like: impl Iterator<Item = Option<&'a Tensor>>) -> Result<Sum> {
    let pairs = sum.iter().zip(like);
    let empty =
        pairs.map(|(sum, like)| sum.as_ref().and(like).map(Tensor::f_empty_like).transpose());
    let copy = empty.collect::<std::result::Result<Sum, _>>()?;
    let present = |sum: &Sum| sum.iter().flatten().map(Tensor::shallow_clone).collect::<Vec<_>>();
    foreach::copy(&present(&copy), &present(sum))?;
    Ok(copy)
}

/// Variables of a model, which give parameters their names.
pub(crate) type Named = Arc<Mutex<Variables>>;

/// Fails if any of these parameters has a sparse gradient. Reads nothing from a device.
pub(crate) fn check_dense(parameters: &[Tensor], named: &Named) -> Result<()> {
    match first_sparse(parameters) {
        Some(at) => Err(Error::SparseGradient { parameter: name_of(&parameters[at], named) }),
        None => Ok(()),
    }
}

/// Returns the parameter's name in the model.
pub(crate) fn name_of(parameter: &Tensor, named: &Named) -> String {
    let variables = named.lock().unwrap_or_else(PoisonError::into_inner);
    let mut all = variables.named_variables.iter();
    let found = all.find(|(_, tensor)| tensor.data_ptr() == parameter.data_ptr());
    found.map_or_else(|| "(no variable of the store)".into(), |(name, _)| name.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_of_a_later_replica_is_told_from_those_on_the_host_and_those_stay() {
        let number = |value: f64| Some(Tensor::from_slice(&[value]));
        let replica = |sum: Sum| Sums { groups: vec![sum], ..Sums::default() };
        let parts = vec![replica(vec![number(1.0), None]), replica(vec![number(2.0), number(3.0)])];
        let (whole, addends) = Sums::of_replicas(parts);
        assert_eq!(addends.iter().map(|sum| sum.what.len()).collect::<Vec<_>>(), [1, 0]);
        assert!(!whole.are_on(Device::Cuda(0)) && whole.are_on(Device::Cpu));
        let places = |sums: &Sums| {
            sums.groups.iter().flatten().flatten().map(Tensor::data_ptr).collect::<Vec<_>>()
        };
        let before = places(&whole);
        assert_eq!(places(&whole.on(Device::Cpu).expect("on the host")), before);
    }
}
