//! The backward of one stage: from its output's gradients to its input's.

use tch::Tensor;

use super::stage::Boundary;
use super::transfer::Tensors;
use crate::Result;
use crate::accumulate::Accumulator;
use crate::loss::{MicroBatchWeight, Term};
use crate::step::{TermGroup, roots};

/// Tensors to start from, each with its gradient, for every group of loss terms.
#[derive(Debug)]
pub(crate) struct Roots {
    groups: Vec<Vec<(Tensor, Tensor)>>,
}

impl Roots {
    /// The terms of a loss, in groups of one common denominator.
    pub(crate) fn of_terms(
        terms: &[Term],
        weight: &MicroBatchWeight,
        groups: &[TermGroup],
    ) -> Result<Self> {
        let groups = roots(terms, groups, |_, term| term.root_gradient(weight))?;
        let owned = |(value, gradient): (&Tensor, Tensor)| (value.shallow_clone(), gradient);
        let groups = groups.into_iter().map(|roots| roots.into_iter().map(owned).collect());
        Ok(Self { groups: groups.collect() })
    }

    /// A stage's output, with the gradients of its values and of each skip.
    pub(crate) fn of_boundary(output: &Boundary, gradients: Vec<Tensors>) -> Self {
        let count = gradients.iter().map(Vec::len).max().unwrap_or(0);
        let mut groups: Vec<Vec<_>> = (0..count).map(|_| Vec::new()).collect();
        let parts = std::iter::once(&output.values).chain(&output.skips);
        for (values, gradients) in parts.zip(gradients) {
            for (roots, gradients) in groups.iter_mut().zip(gradients) {
                // A forward that is run again had no graph, and guessed what would be traced: some
                // of these gradients come for values that have none either.
                let pairs = values.iter().zip(gradients).filter(|(value, _)| value.requires_grad());
                let pairs = pairs.filter_map(|(value, gradient)| {
                    gradient.map(|gradient| (value.shallow_clone(), gradient))
                });
                roots.extend(pairs);
            }
        }
        Self { groups }
    }
}

/// Runs backward from the roots; gives the gradients of the input's values and of each skip.
pub(crate) fn run(
    accumulator: &mut Accumulator,
    roots: Roots,
    input: Boundary,
) -> Result<Vec<Tensors>> {
    let groups = roots.groups;
    accumulator.expect_groups(groups.len());
    // Of those with roots: it frees the graph, which an empty group behind it could not.
    let last = groups.iter().rposition(|roots| !roots.is_empty());
    let mut gradients: Vec<Tensors> = (0..=input.skips.len()).map(|_| Vec::new()).collect();
    for (group, roots) in groups.iter().enumerate() {
        if !roots.is_empty() {
            accumulator.add(group, roots, Some(group) != last)?;
        }
        let parts = std::iter::once(&input.values).chain(&input.skips);
        for (gradients, leaves) in gradients.iter_mut().zip(parts) {
            // Taken after each group, or the next group's would be added to it in the same leaf.
            gradients.push(leaves.iter().map(taken).collect::<Result<_>>()?);
        }
    }
    Ok(gradients)
}

/// The gradients of both, tensor by tensor; of one, where the other is still empty.
pub(crate) fn add(sum: Tensors, what: Tensors) -> Result<Tensors> {
    if sum.is_empty() {
        return Ok(what);
    }
    let add = |pair| {
        Ok(match pair {
            (Some(a), Some(b)) => Some(Tensor::f_add(&a, &b)?),
            (a, b) => a.or(b),
        })
    };
    let rows = sum.into_iter().zip(what);
    rows.map(|(sum, what)| sum.into_iter().zip(what).map(add).collect()).collect()
}

/// The gradient that has gathered in a leaf, which is without one afterwards.
fn taken(leaf: &Tensor) -> Result<Option<Tensor>> {
    if !leaf.requires_grad() {
        return Ok(None);
    }
    let gradient = leaf.f_grad()?;
    brimful_torch::autograd::set_gradient(&mut leaf.shallow_clone(), None)?;
    Ok(gradient.defined().then_some(gradient))
}
