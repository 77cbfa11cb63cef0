//! Collects gradients over micro-batches; commits them whole or not at all.
//!
//! Before a step the gradients that are already there are set aside, so that autograd makes new
//! ones. Those are the step's own: on success they are scaled and added to what was there, on
//! failure they are dropped and what was there comes back. Nothing is copied for it.
//!
//! Terms of a loss whose denominators are known only at the end each need sums of their own
//! ([`Sums`] has one list a group), because one sum cannot be divided by two numbers.

use std::borrow::Borrow;

use brimful_torch::autograd::{backward, set_gradient};
use brimful_torch::foreach;
use brimful_torch::gradients::collect;
use tch::{Kind, Tensor};

use crate::Result;

/// One gradient sum a parameter, or none where nothing has reached it.
pub(crate) type Sum = Vec<Option<Tensor>>;

/// Gradient sums of a step so far, one list for each group of terms.
#[derive(Debug, Default)]
pub(crate) struct Sums {
    groups: Vec<Sum>,
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
}

impl Accumulator {
    /// Sets aside what the parameters have. Dropped, it puts that back.
    pub(crate) fn begin(parameters: Vec<Tensor>) -> Result<Self> {
        let aside = parameters.iter().map(gradient).collect();
        let apart = parameters.iter().any(|p| is_half(p) || p.device().is_cuda());
        let mut accumulator = Self { parameters, aside, groups: Vec::new(), apart };
        accumulator.clear()?;
        Ok(accumulator)
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
        Ok(Sums { groups: std::mem::take(&mut self.groups) })
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

impl Sums {
    /// Adds a later part of the same step, group by group.
    pub(crate) fn extend(&mut self, later: Self) -> Result<()> {
        for (mine, theirs) in self.groups.iter_mut().zip(later.groups) {
            add_sum(mine, theirs)?;
        }
        Ok(())
    }

    /// Adds the sums, each group times its factor, to the parameters' gradients. Everything that
    /// needs memory comes before the first change.
    pub(crate) fn commit(self, parameters: &mut [Tensor], factors: &[f64]) -> Result<()> {
        self.finish(parameters, factors)?.apply(parameters)
    }

    /// The sums of all groups, each times its factor, ready to be added to the gradients.
    pub(crate) fn finish(self, parameters: &[Tensor], factors: &[f64]) -> Result<Finished> {
        let mut groups = self.groups.into_iter();
        let mut total = groups.next().unwrap_or_default();
        scale(&total, factors.first().copied())?;
        for (sum, factor) in groups.zip(&factors[1..]) {
            scale(&sum, Some(*factor))?;
            add_sum(&mut total, sum)?;
        }
        total.resize_with(parameters.len(), || None);
        Ok(Finished(cast(total, parameters)?))
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

/// Gives each sum its parameter's type.
fn cast(sum: Sum, parameters: &[Tensor]) -> Result<Sum> {
    let pairs = sum.into_iter().zip(parameters);
    let cast = pairs.map(|(sum, p)| sum.map(|sum| sum.f_to_kind(p.kind())).transpose());
    Ok(cast.collect::<std::result::Result<_, _>>()?)
}

fn gradient(parameter: &Tensor) -> Option<Tensor> {
    let gradient = parameter.grad();
    gradient.defined().then_some(gradient)
}

fn is_half(parameter: &Tensor) -> bool {
    matches!(parameter.kind(), Kind::Half | Kind::BFloat16)
}
