//! Collects gradients over micro-batches; commits them whole or not at all.
//!
//! Before a step the gradients that are already there are set aside, so that autograd makes new
//! ones. Those are the step's own: on success they are scaled and added to what was there, on
//! failure they are dropped and what was there comes back. Nothing is copied for it.
//!
//! Terms of a loss whose denominators are known only at the end each need sums of their own
//! ([`Sums`] has one list a group), because one sum cannot be divided by two numbers.

use std::borrow::Borrow;

use brimful_torch::autograd::{backward, backward_watched, set_gradient};
use brimful_torch::foreach;
use brimful_torch::gradients::collect;
use tch::{Kind, Tensor};

use crate::Result;
use crate::ranks::{Buckets, RanksTurn};

/// One gradient sum a parameter, or none where nothing has reached it.
pub(crate) type Sum = Vec<Option<Tensor>>;

/// Gradient sums of a step so far, one list for each group of terms.
#[derive(Debug, Default)]
pub(crate) struct Sums {
    groups: Vec<Sum>,
    /// Whether some of them are captured graphs' own, which the next step will overwrite.
    lent: bool,
    /// Those of a single group that are on their way to other ranks.
    buckets: Option<Buckets>,
}

/// Parameters whose earlier gradients are set aside while a step makes its own.
#[derive(Debug)]
pub(crate) struct Accumulator {
    parameters: Vec<Tensor>,
    aside: Sum,
    groups: Vec<Sum>,
    /// Whether sums must be kept apart: for f32 sums of half precision, and on CUDA, where a few
    /// kernels add what takes autograd one a parameter.
    apart: bool,
    /// See [`Sums`].
    lent: bool,
    /// In which the last micro-batch's gradients are to be added up over the ranks.
    turn: Option<RanksTurn>,
    /// Whether the micro-batch under way is the last.
    last: bool,
    buckets: Option<Buckets>,
}

impl Accumulator {
    /// Sets aside what the parameters have. Dropped, it puts that back.
    pub(crate) fn begin(parameters: Vec<Tensor>) -> Result<Self> {
        let aside = parameters.iter().map(gradient).collect();
        let apart = parameters.iter().any(|p| is_half(p) || p.device().is_cuda());
        let mut accumulator = Self {
            parameters,
            aside,
            groups: Vec::new(),
            apart,
            lent: false,
            turn: None,
            last: false,
            buckets: None,
        };
        accumulator.clear()?;
        Ok(accumulator)
    }

    /// Lets gradients set out to other ranks, in this turn, while the last backward still runs.
    pub(crate) fn summing(mut self, turn: Option<RanksTurn>) -> Self {
        self.turn = turn;
        self
    }

    /// The next micro-batch is the last.
    pub(crate) fn expect_the_last(&mut self) {
        self.last = true;
    }

    /// Says how many groups of terms there are; the same at every call.
    pub(crate) fn expect_groups(&mut self, count: usize) {
        let empty = || self.parameters.iter().map(|_| None).collect();
        while self.groups.len() < count {
            self.groups.push(empty());
        }
    }

    /// Whether autograd itself adds up.
    fn in_place(&self) -> bool {
        self.groups.len() == 1 && !self.apart
    }

    /// Runs backward from one group's roots and adds what arrives to the group's sums.
    pub(crate) fn add(
        &mut self,
        group: usize,
        roots: &[(impl Borrow<Tensor>, Tensor)],
        keep_graph: bool,
    ) -> Result<()> {
        let (roots, gradients): (Vec<_>, Vec<_>) =
            roots.iter().map(|(root, gradient)| (root.borrow(), Some(gradient))).unzip();
        if self.last
            && self.in_place()
            && let Some(turn) = self.turn.take()
        {
            let (parameters, mut buckets) =
                (&self.parameters, Buckets::new(turn, &self.parameters)?);
            let arrived = |at: usize| buckets.arrived(at, &parameters[at].grad());
            backward_watched(&roots, &gradients, parameters, arrived)?;
            self.buckets = Some(buckets);
            return Ok(());
        }
        backward(&roots, &gradients, keep_graph)?;
        if self.in_place() {
            return Ok(());
        }
        Ok(collect(&self.parameters, &mut self.groups[group])?)
    }

    /// Puts back what the parameters had, and gives the step's sums.
    pub(crate) fn finish(mut self) -> Result<Sums> {
        if self.in_place() {
            self.groups[0] = self.parameters.iter().map(gradient).collect();
        }
        self.put_back()?;
        self.parameters.clear();
        let (groups, buckets) = (std::mem::take(&mut self.groups), self.buckets.take());
        Ok(Sums { groups, lent: self.lent, buckets })
    }

    pub(crate) fn parameters(&self) -> &[Tensor] {
        &self.parameters
    }

    /// Puts other sums in place, and gives those that were there.
    pub(crate) fn exchange(&mut self, groups: Vec<Sum>) -> Vec<Sum> {
        std::mem::replace(&mut self.groups, groups)
    }

    /// Adds gradients of the same step that were summed apart.
    pub(crate) fn add_sums(&mut self, groups: Vec<Sum>) -> Result<()> {
        self.expect_groups(groups.len());
        let mut pairs = self.groups.iter_mut().zip(groups);
        pairs.try_for_each(|(mine, theirs)| add_sum(mine, theirs))
    }

    /// Goes on summing in these tensors, which a captured graph adds to, from what there is so far.
    pub(crate) fn adopt(&mut self, lenders: &[Sum]) -> Result<()> {
        self.expect_groups(lenders.len());
        self.lent = true;
        let (mut empty, mut into, mut from) = (Vec::new(), Vec::new(), Vec::new());
        for (mine, lender) in self.groups.iter_mut().flatten().zip(lenders.iter().flatten()) {
            let Some(lender) = lender else { continue };
            match mine {
                Some(sum) if sum.data_ptr() == lender.data_ptr() => continue,
                Some(sum) => {
                    into.push(lender.shallow_clone());
                    from.push(sum.shallow_clone());
                }
                None => empty.push(lender.shallow_clone()),
            }
            *mine = Some(lender.shallow_clone());
        }
        foreach::zero(&empty)?;
        Ok(foreach::copy(&into, &from)?)
    }

    /// Goes on summing in tensors of its own.
    pub(crate) fn disown(&mut self) -> Result<()> {
        if self.lent {
            self.groups = self.groups.iter().map(copy_of).collect::<Result<_>>()?;
            self.lent = false;
        }
        Ok(())
    }

    fn clear(&mut self) -> Result<()> {
        self.parameters.iter_mut().try_for_each(|p| Ok(set_gradient(p, None)?))
    }

    fn put_back(&mut self) -> Result<()> {
        let pairs = self.parameters.iter_mut().zip(&self.aside);
        pairs.into_iter().try_for_each(|(p, old)| Ok(set_gradient(p, old.as_ref())?))
    }

    /// The norm of the step's gradients so far, as a tensor that nobody has read yet: finite only if
    /// they all are.
    pub(crate) fn norm(&self) -> Result<Option<Tensor>> {
        let sums = self.groups.iter().flatten().flatten().map(Tensor::shallow_clone);
        let all: Vec<Tensor> = self.parameters.iter().filter_map(gradient).chain(sums).collect();
        if all.is_empty() { Ok(None) } else { Ok(Some(foreach::norm(&all)?)) }
    }
}

impl Drop for Accumulator {
    fn drop(&mut self) {
        // Cannot fail: what is put back was there before.
        let _ = self.put_back();
    }
}

/// One sum, and what is to be added to it in this order.
#[derive(Debug)]
pub(crate) struct Addends {
    pub(crate) into: Tensor,
    pub(crate) what: Vec<Tensor>,
}

impl Sums {
    /// The sums of several replicas of one model as those of the first that has any, and what is
    /// still to be added to them.
    pub(crate) fn of_replicas(replicas: Vec<Self>) -> (Self, Vec<Addends>) {
        let mut whole = Self::default();
        let mut addends: Vec<Vec<Option<Addends>>> = Vec::new();
        for Self { groups, lent, .. } in replicas {
            whole.lent |= lent;
            addends.resize_with(groups.len().max(addends.len()), Vec::new);
            for (columns, sum) in addends.iter_mut().zip(groups) {
                columns.resize_with(sum.len().max(columns.len()), || None);
                for (column, new) in columns.iter_mut().zip(sum) {
                    match (column, new) {
                        (Some(column), Some(new)) => column.what.push(new),
                        (column @ None, Some(into)) => {
                            *column = Some(Addends { into, what: Vec::new() });
                        }
                        (_, None) => {}
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

    /// Adds a later part of the same step, group by group.
    pub(crate) fn extend(&mut self, later: Self) -> Result<()> {
        for (mine, theirs) in self.groups.iter_mut().zip(later.groups) {
            add_sum(mine, theirs)?;
        }
        Ok(())
    }

    /// Makes them its own, so that they outlast the step.
    pub(crate) fn own(&mut self) -> Result<()> {
        if self.lent {
            self.groups = self.groups.iter().map(copy_of).collect::<Result<_>>()?;
            self.lent = false;
        }
        Ok(())
    }

    /// Adds the sums, each group times its factor, to the parameters' gradients. Everything that
    /// needs memory comes before the first change.
    pub(crate) fn commit(self, parameters: &mut [Tensor], factors: &[f64]) -> Result<()> {
        if self.groups.is_empty() {
            return Ok(());
        }
        self.finish(parameters, factors)?.apply(parameters)
    }

    /// The sums of all groups, each times its factor, ready to be added to the gradients.
    pub(crate) fn finish(self, parameters: &[Tensor], factors: &[f64]) -> Result<Finished> {
        let lent = self.lent;
        Ok(Finished(cast(self.total(parameters.len(), factors)?, parameters, lent)?))
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
        let buckets =
            self.buckets.take().map_or_else(|| Buckets::new(turn.clone(), parameters), Ok);
        let (mut buckets, last) = (buckets?, factors.first().copied().filter(|_| alike));
        let first = if alike { &[][..] } else { factors };
        buckets.fill(&self.total(parameters.len(), first)?)?;
        let here = |((sum, parameter), present): ((Tensor, &Tensor), &bool)| {
            let here = || sum.f_to_device(parameter.device());
            present.then(here).transpose()
        };
        let sums = buckets.summed()?.into_iter().zip(parameters).zip(present);
        let total = sums.map(here).collect::<Result<Sum, _>>()?;
        scale(&total, last)?;
        Ok(Finished(cast(total, parameters, false)?))
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
    /// Adds them to the parameters' gradients. Nothing is allocated.
    pub(crate) fn apply(self, parameters: &mut [Tensor]) -> Result<()> {
        let mut gradients: Sum = parameters.iter().map(gradient).collect();
        add_sum(&mut gradients, self.0)?;
        for (parameter, new) in parameters.iter_mut().zip(&gradients) {
            set_gradient(parameter, new.as_ref())?;
        }
        Ok(())
    }
}

fn add_sum(mine: &mut Sum, theirs: Sum) -> Result<()> {
    let (mut into, mut what) = (Vec::new(), Vec::new());
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
    if into.is_empty() { Ok(()) } else { Ok(foreach::add(&into, &what, 1.0)?) }
}

fn scale(sum: &Sum, factor: Option<f64>) -> Result<()> {
    let present: Vec<Tensor> = sum.iter().flatten().map(Tensor::shallow_clone).collect();
    match factor {
        Some(factor) if factor != 1.0 && !present.is_empty() => {
            Ok(foreach::scale(&present, factor)?)
        }
        _ => Ok(()),
    }
}

/// Gives each sum its parameter's type. One that has it already stays as it is, or is copied where it
/// is lent.
fn cast(sum: Sum, parameters: &[Tensor], lent: bool) -> Result<Sum> {
    let kinds = parameters.iter().map(Tensor::kind);
    let moves = |(sum, kind): (&Option<Tensor>, Kind)| {
        sum.as_ref().is_some_and(|sum| lent || sum.kind() != kind)
    };
    if !sum.iter().zip(kinds).any(moves) {
        return Ok(sum);
    }
    copied(&sum, parameters.iter().map(Some))
}

/// The same sums in tensors of their own.
fn copy_of(sum: &Sum) -> Result<Sum> {
    copied(sum, sum.iter().map(Option::as_ref))
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

fn gradient(parameter: &Tensor) -> Option<Tensor> {
    let gradient = parameter.grad();
    gradient.defined().then_some(gradient)
}

fn is_half(parameter: &Tensor) -> bool {
    matches!(parameter.kind(), Kind::Half | Kind::BFloat16)
}
