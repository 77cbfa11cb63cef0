//! Gradient sums of a step: added up over groups, replicas and ranks, and given to the parameters.

use brimful_torch::autograd::set_gradient;
use brimful_torch::{foreach, transfer};
use tch::{Device, Kind, Tensor};

use super::gradient;
use crate::Result;
use crate::ranks::{Buckets, RanksTurn};

/// One gradient sum a parameter, or none where nothing has reached it.
pub(crate) type Sum = Vec<Option<Tensor>>;

/// Gradient sums of a step so far, one list for each group of terms.
#[derive(Debug, Default)]
pub(crate) struct Sums {
    pub(super) groups: Vec<Sum>,
    /// Whether some of them are captured graphs' own, which the next step will overwrite.
    pub(super) lent: bool,
    /// Whether those on the host are of parameters that live there: they stay f32, as the optimizer at
    /// home takes them.
    pub(super) at_home: bool,
    /// Those of a single group that are on their way to other ranks.
    pub(super) buckets: Option<Buckets>,
}

/// One sum, and what is to be added to it in this order.
#[derive(Debug)]
pub(crate) struct Addends {
    pub(crate) into: Tensor,
    pub(crate) what: Vec<Tensor>,
}

impl Sums {
    /// Those of who has run no backward in a step of others, with parameters that live on the host or not.
    pub(crate) fn none(at_home: bool) -> Self {
        Self { at_home, ..Self::default() }
    }

    /// The sums of several replicas of one model as those of the first that has any, and what is
    /// still to be added to them.
    pub(crate) fn of_replicas(replicas: Vec<Self>) -> (Self, Vec<Addends>) {
        let mut whole = Self::default();
        let mut addends: Vec<Vec<Option<Addends>>> = Vec::new();
        for Self { groups, lent, at_home, .. } in replicas {
            whole.lent |= lent;
            whole.at_home |= at_home;
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

    /// The same on this device, where their parameters are: a parameter that the first replica has not
    /// reached has its sum where another one has.
    pub(crate) fn on(mut self, device: Device) -> Result<Self> {
        for sum in self.groups.iter_mut().flatten().flatten() {
            *sum = sum.f_to_device(device)?;
        }
        Ok(self)
    }

    pub(crate) fn are_on(&self, device: Device) -> bool {
        self.groups.iter().flatten().flatten().all(|sum| sum.device() == device)
    }

    /// Adds a later part of the same step, group by group; these are the places of its sums.
    pub(crate) fn extend(&mut self, later: Self, places: &[usize]) -> Result<()> {
        self.at_home |= later.at_home;
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

    /// Whether no backward has been run.
    pub(crate) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Makes them its own, so that they outlast the step.
    pub(crate) fn own(&mut self) -> Result<()> {
        if self.lent {
            let copy = |sum: &Sum| copied(sum, sum.iter().map(Option::as_ref));
            self.groups = self.groups.iter().map(copy).collect::<Result<_>>()?;
            self.lent = false;
        }
        Ok(())
    }

    /// The sums of all groups, each times its factor, ready to be added to the gradients.
    pub(crate) fn finish(self, parameters: &[Tensor], factors: &[f64]) -> Result<Finished> {
        let (lent, at_home) = (self.lent, self.at_home);
        let total = self.total(parameters.len(), factors)?;
        Ok(Finished(cast(total, parameters, lent, at_home)?))
    }

    /// The same over all ranks; `present` says which parameters any of them has a gradient for.
    /// Where `alike`, all ranks have one and the same factor, which is left to the end: so gradients
    /// may have set out before it was known.
    pub(crate) fn finish_over_ranks(
        mut self,
        parameters: &[Tensor],
        factors: &[f64],
        alike: bool,
        turn: &RanksTurn,
        present: &[bool],
    ) -> Result<Finished> {
        let mut buckets = match self.buckets.take() {
            Some(buckets) => buckets,
            None => Buckets::new(turn.clone(), parameters)?,
        };
        // With one factor for all, sums of undivided gradients are divided once, after the exchange; else
        // each rank divides its own before, because groups are added up on the way.
        let last = factors.first().copied().filter(|_| alike);
        let first = if alike { &[][..] } else { factors };
        let at_home = self.at_home;
        buckets.fill(&self.total(parameters.len(), first)?)?;
        let here = |((sum, parameter), present): ((Tensor, &Tensor), &bool)| {
            let here = || match parameter.device() {
                Device::Cpu => Ok(sum.shallow_clone()),
                device => transfer::send(&sum, device),
            };
            present.then(here).transpose()
        };
        let sums = buckets.summed()?.into_iter().zip(parameters).zip(present);
        let total = sums.map(here).collect::<Result<Sum, _>>()?;
        scale(&total, last)?;
        Ok(Finished(cast(total, parameters, false, at_home)?))
    }

    /// Which parameters have a sum.
    pub(crate) fn present(&self, parameters: usize) -> Vec<bool> {
        let has =
            |at: usize| self.groups.iter().any(|sum| sum.get(at).is_some_and(Option::is_some));
        (0..parameters).map(has).collect()
    }

    /// The sums of all groups, each times its factor.
    fn total(self, parameters: usize, factors: &[f64]) -> Result<Sum> {
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

/// A step's gradients, one a parameter, which nobody has seen yet.
#[derive(Debug)]
pub(crate) struct Finished(pub(crate) Sum);

impl Finished {
    /// The place and the kind of the first gradient that would not be finite with them.
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
                // One after the other: together they would take as much memory as all gradients.
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

    /// Adds them to the parameters' gradients. Nothing is allocated.
    pub(crate) fn apply(self, parameters: &mut [Tensor]) -> Result<()> {
        // In place of the old gradients where there are such, so that optimizers find them where they were.
        let mut gradients: Sum = parameters.iter().map(gradient).collect();
        add_sum(&mut gradients, self.0)?;
        for (parameter, new) in parameters.iter_mut().zip(&gradients) {
            set_gradient(parameter, new.as_ref())?;
        }
        Ok(())
    }
}

/// Whether all of their numbers are finite, for which the host waits.
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

/// Gives each sum its parameter's type. One that has it already stays as it is, or is copied where it
/// is lent.
fn cast(mut sum: Sum, parameters: &[Tensor], lent: bool, at_home: bool) -> Result<Sum> {
    let stays = |sum: &Tensor, parameter: &Tensor| {
        let home = at_home && sum.device() == Device::Cpu;
        home || !lent && sum.kind() == parameter.kind()
    };
    let pairs = sum.iter_mut().zip(parameters);
    let moving = pairs.map(|(sum, parameter)| sum.take_if(|sum| !stays(sum, parameter))).collect();
    let moved = copied(&moving, parameters.iter().map(Some))?;
    Ok(sum.into_iter().zip(moved).map(|(stayed, moved)| stayed.or(moved)).collect())
}

/// Copies of the sums, in kind and layout like those tensors, by a few kernels for all of them.
fn copied<'a>(sum: &Sum, like: impl Iterator<Item = Option<&'a Tensor>>) -> Result<Sum> {
    let pairs = sum.iter().zip(like);
    let empty =
        pairs.map(|(sum, like)| sum.as_ref().and(like).map(Tensor::f_empty_like).transpose());
    let copy = empty.collect::<std::result::Result<Sum, _>>()?;
    let present = |sum: &Sum| sum.iter().flatten().map(Tensor::shallow_clone).collect::<Vec<_>>();
    foreach::copy(&present(&copy), &present(sum))?;
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_of_a_later_replica_is_told_from_those_at_home_and_those_stay() {
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
        assert_eq!(places(&whole.on(Device::Cpu).expect("at home")), before);
    }
}
