//! Runs the backward of one stage, whole or split into dX and dW: from its output's gradients to its
//! input's.

use tch::Tensor;

use super::failure::Stop;
use super::worker_run::{Output, WorkerRun};
use crate::Result;
use crate::accumulate::Accumulator;
use crate::batch::as_wide_as;
use crate::loss::{MicroBatchWeight, Term};
use crate::pipeline::error::PipelineError;
use crate::pipeline::site::{Boundary, HeldInput, Site};
use crate::pipeline::transfers::Tensors;
use crate::step::{NonFinitePolicy, TermGroup, roots};
use brimful_plan::schedule::Action;

/// Tensors to start a backward from, each with its gradient, for every group of loss terms.
type Roots = Vec<Vec<(Tensor, Tensor)>>;

/// Returns a loss's terms as roots, grouped by denominator.
fn roots_of_terms(
    terms: &[Term],
    weight: &MicroBatchWeight,
    groups: &[TermGroup],
) -> Result<Roots> {
    let groups = roots(terms, groups, |_, term| term.root_gradient(weight))?;
    let owned = |(value, gradient): (&Tensor, Tensor)| (value.shallow_clone(), gradient);
    Ok(groups.into_iter().map(|roots| roots.into_iter().map(owned).collect()).collect())
}

/// Returns a stage's output values and skips as roots, each with its gradient.
fn roots_of_boundary(output: &Boundary, gradients: Vec<Tensors>) -> Result<Roots> {
    let count = gradients.iter().map(Vec::len).max().unwrap_or(0);
    let mut groups: Roots = (0..count).map(|_| Vec::new()).collect();
    let parts = std::iter::once(&output.values).chain(&output.skips);
    for (values, gradients) in parts.zip(gradients) {
        for (roots, gradients) in groups.iter_mut().zip(gradients) {
            // The first forward of a recomputed stage had no graph and guessed which outputs would require
            // a gradient, so some gradients come for outputs that require none.
            let pairs = values.iter().zip(gradients).filter(|(value, _)| value.requires_grad());
            for (value, gradient) in pairs {
                let gradient = gradient.map(|gradient| as_wide_as(value, gradient));
                roots.extend(gradient.transpose()?.map(|found| (value.shallow_clone(), found)));
            }
        }
    }
    Ok(groups)
}

impl WorkerRun {
    /// Runs a whole backward, or only its input gradient (dX) and keeps the weight gradient (dW) for later.
    pub(super) fn backward(
        &mut self,
        site: &mut Site,
        at: usize,
        action: Action,
    ) -> Result<(), Stop> {
        let i = action.micro_batch.index();
        let is_whole = action.kind.releases();
        let (roots, input) = self.start(site, at, i)?;
        // These calls free the graph, except for what dW needs, before this stage may wait for its neighbour. So a
        // waiting stage keeps no activations of a whole backward.
        let mut gradients = match is_whole {
            true => self.run_whole(at, roots, input)?,
            false => self.run_input_gradients(site, at, i, roots, input)?,
        };
        if let (Some(barriers), Some(accumulator)) = (&mut self.barriers, &mut self.accumulator) {
            barriers.note_probe(site, at, &mut gradients, accumulator)?;
        }
        if is_whole {
            self.note_largest(site, i)?;
        }
        self.timeline.end(action)?;
        self.hand_back(site, at, action, gradients)
    }

    /// Runs backward from the roots; returns the gradients of the input's values, of each skip, and of the
    /// normalising statistics.
    fn run_whole(&mut self, at: usize, groups: Roots, input: Boundary) -> Result<Vec<Tensors>> {
        self.expect_gradients(at);
        let accumulator = self.accumulator();
        accumulator.expect_groups(groups.len());
        // The last group with roots frees the graph; an empty group after it could not.
        let last = groups.iter().rposition(|roots| !roots.is_empty());
        let ends: Vec<&Tensor> = input.leaves().flatten().collect();
        let mut gradients = Vec::with_capacity(groups.len());
        for (group, roots) in groups.iter().enumerate() {
            if !roots.is_empty() {
                accumulator.add(group, roots, &ends, Some(group) != last)?;
            }
            // Taken after each group: otherwise the next group's gradient would add to it in the same leaf.
            gradients.push(ends.iter().map(|leaf| taken(leaf)).collect::<Result<_>>()?);
        }
        Ok(by_part(&input, gradients))
    }

    /// Computes the input gradient (dX) from the roots; returns the same gradients as `run_whole`.
    fn run_input_gradients(
        &mut self,
        site: &mut Site,
        at: usize,
        i: usize,
        roots: Roots,
        input: Boundary,
    ) -> Result<Vec<Tensors>> {
        let leaves: Vec<Tensor> = input.leaves().flatten().map(Tensor::shallow_clone).collect();
        let (gradients, weights) = self.accumulator().begin_split(&roots, &leaves)?;
        if let Some(nodes) = weights.run_whole() {
            site.tell_of_whole(at, &nodes);
        }
        self.begun[at][i] = Some((weights, site.generation(at)));
        Ok(by_part(&input, gradients))
    }

    /// Computes the weight gradient (dW), which no other stage waits for.
    pub(super) fn weight_gradient(&mut self, site: &Site, at: usize, action: Action) -> Result<()> {
        let i = action.micro_batch.index();
        let begun = self.begun[at][i].take();
        let (mut weights, generation) =
            begun.expect("a weight gradient comes after its input gradient");
        check_weights(site, at, generation)?;
        self.timeline.begin()?;
        self.expect_gradients(at);
        for group in 0..weights.groups() {
            self.accumulator().add_split(group, &mut weights)?;
        }
        drop(weights);
        self.note_largest(site, i)?;
        self.timeline.end(action)
    }

    /// Returns the roots of a backward and the input that it leads to, and starts the action's clock.
    fn start(&mut self, site: &mut Site, at: usize, i: usize) -> Result<(Roots, Boundary), Stop> {
        let kept = self.kept[at][i].take().expect("a backward comes after its forward");
        check_weights(site, at, kept.generation)?;
        let HeldInput::Here(input) = kept.input else {
            unreachable!("its recompute brought it back")
        };
        let roots = match kept.output.expect("a backward comes after its recompute") {
            Output::Terms(terms) => {
                self.timeline.begin()?;
                let groups = self.tally.groups(self.job.mode.is_last());
                roots_of_terms(&terms, &self.job.weights[i], &groups)?
            }
            Output::Boundary(output) => {
                let gradients = self.receive_gradients(site, at, i)?;
                self.timeline.begin()?;
                let gradients = match &self.barriers {
                    Some(barriers) => barriers.completed(at, &output, gradients)?,
                    None => gradients,
                };
                roots_of_boundary(&output, gradients)?
            }
        };
        Ok((roots, input))
    }

    fn accumulator(&mut self) -> &mut Accumulator {
        self.accumulator.as_mut().expect("training has an accumulator")
    }

    /// Announces which parameters get gradients next: the stage's own, or any if the user's closure follows,
    /// which may use others.
    ///
    /// Gradients are complete after the worker's last whole backward or weight gradient (dW), of any stage: from
    /// then on, they may be sent to the other replicas.
    fn expect_gradients(&mut self, at: usize) {
        let part = (!self.ends_in_closure(at)).then_some(at);
        self.accumulator().expect_part(part);
        if !self.list[self.next..].iter().any(|action| action.kind.releases()) {
            self.accumulator().expect_the_last();
        }
    }

    /// Records the largest gradient so far, if non-finite gradients are refused.
    fn note_largest(&mut self, site: &Site, i: usize) -> Result<()> {
        if site.non_finite != NonFinitePolicy::RefuseGradients {
            return Ok(());
        }
        let largest = self.accumulator().largest()?;
        let earlier = self.largest[i].take().filter(|_| site.offloaded.is_some());
        // Gradients that went to the host are not checked again, so the earlier maximum stays.
        self.largest[i] = match (earlier, largest) {
            (Some(earlier), Some(largest)) => Some(earlier.f_maximum(&largest)?),
            (earlier, largest) => earlier.or(largest),
        };
        Ok(())
    }
}

/// Fails unless the device still holds the weights of the fetch that the graph refers to.
fn check_weights(site: &Site, at: usize, generation: Option<u64>) -> Result<()> {
    match site.generation(at) == generation {
        true => Ok(()),
        false => Err(PipelineError::WeightsLeft.into()),
    }
}

/// Groups the gradients of an input's leaves by part: its values, each skip, and the normalising
/// statistics.
fn by_part(input: &Boundary, groups: Tensors) -> Vec<Tensors> {
    let mut gradients: Vec<Tensors> = input.leaves().map(|_| Vec::new()).collect();
    for group in groups {
        let mut all = group.into_iter();
        for (gradients, leaves) in gradients.iter_mut().zip(input.leaves()) {
            gradients.push(all.by_ref().take(leaves.len()).collect());
        }
    }
    gradients
}

/// Adds gradients tensor by tensor; returns `what` if `sum` is still empty.
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

/// Takes the accumulated gradient out of a leaf.
fn taken(leaf: &Tensor) -> Result<Option<Tensor>> {
    if !leaf.requires_grad() {
        return Ok(None);
    }
    let gradient = leaf.f_grad()?;
    brimful_torch::autograd::set_gradient(&mut leaf.shallow_clone(), None)?;
    Ok(gradient.defined().then_some(gradient))
}
