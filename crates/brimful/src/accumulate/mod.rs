//! Accumulation of gradients over micro-batches, with an atomic commit.
//!
//! Before a step, the existing gradients are set aside, so that autograd makes new ones, which are the step's own.
//! On success, the new gradients are scaled and added to the existing ones. On failure, the new gradients are
//! dropped and the existing ones are restored. Nothing is copied.
//!
//! The denominators of some terms of a loss are known only at the end. Such terms need sums of their own, because
//! one sum cannot be divided by two numbers: [`Sums`] has one list for each group of terms.

mod others;
mod part;
mod sums;

use std::borrow::Borrow;
use std::sync::{Mutex, PoisonError};

use brimful_torch::TorchError;
use brimful_torch::autograd::{backward_to, set_gradient, watched};
use brimful_torch::foreach;
use brimful_torch::gradients::{collect, offering, own};
use brimful_torch::leaves::{KnownLeaves, Reach};
use brimful_torch::split_backward::{Begun, SplitBackward};
use tch::nn::Variables;
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::batch::summed_in;
use crate::ranks::{Buckets, RankSum};
use part::ModelPart;
pub(crate) use sums::{Addends, Finished, Named, Sum, Sums, Total, check_dense, name_of};
use sums::{add_sum, gradient};

/// Accumulator of a step's gradients. The parameters' earlier gradients are set aside during the step.
#[derive(Debug)]
pub(crate) struct Accumulator {
    /// The model's own parameters, followed by other leaves that a backward has reached.
    parameters: Vec<Tensor>,
    /// The parameters, indexed for lookup in a graph.
    known: KnownLeaves,
    /// Number of parameters that are the model's own.
    own: usize,
    sums_others: bool,
    named: Named,
    aside: Sum,
    /// Sums of the step so far.
    sums: Sums,
    /// True if sums are kept apart from the parameters: see [`sums_apart`].
    apart: bool,
    /// Channel on which the last micro-batch's gradients are summed over the ranks.
    collective: Option<RankSum>,
    /// True if the current micro-batch is the last.
    last: bool,
    /// Parts of the model that run backward one at a time, and the current one.
    parts: Vec<ModelPart>,
    part: Option<usize>,
}

impl Accumulator {
    /// Sets aside the gradients of the parameters, which are some of these variables. Dropping the accumulator
    /// restores them.
    pub(crate) fn begin(parameters: Vec<Tensor>, named: &Named) -> Result<Self> {
        check_dense(&parameters, named)?;
        // Existing gradients that share memory are copied, because the step's gradients are added to each one in
        // place.
        own(&parameters)?;
        // Pointers, not copies: a step needs no memory for gradients that existed before.
        let aside = parameters.iter().map(fitting_gradient).collect::<Result<_>>()?;
        let apart = parameters.iter().any(is_summed_apart);
        let mut accumulator = Self {
            known: KnownLeaves::new(&parameters)?,
            own: parameters.len(),
            sums_others: false,
            parameters,
            named: Named::clone(named),
            aside,
            sums: Sums::default(),
            apart,
            collective: None,
            last: false,
            parts: Vec::new(),
            part: None,
        };
        accumulator.clear()?;
        Ok(accumulator)
    }

    /// Sends gradients to other ranks on this channel while the last backward is still running.
    pub(crate) fn summing(mut self, collective: Option<RankSum>) -> Self {
        self.collective = collective;
        self
    }

    /// Sets whether leaves besides the parameters are summed too. Otherwise they are refused: replicas, stages and
    /// ranks would add to one leaf at the same time, or one of them would miss another's gradients.
    pub(crate) fn summing_others(mut self, wanted: bool) -> Self {
        self.sums_others = wanted;
        self
    }

    /// Sets the parameters of each part of the model, by index: gradients of a part's backward are collected
    /// from these alone.
    pub(crate) fn in_parts(mut self, parts: Vec<Vec<usize>>) -> Self {
        let part = |places| ModelPart::new(places, &self.parameters);
        self.parts = parts.into_iter().map(part).collect();
        self
    }

    /// Keeps sums apart from the parameters, because some parameters leave the device before the step's end.
    pub(crate) fn keep_apart(&mut self) {
        self.apart = true;
    }

    /// Takes the sums of the wanted parameters out, by group.
    pub(crate) fn take(&mut self, wanted: &[bool]) -> Vec<Sum> {
        let take = |sum: &mut Sum| {
            let places = sum.iter_mut().zip(wanted);
            places.map(|(sum, wanted)| sum.take_if(|_| *wanted)).collect()
        };
        self.sums.groups.iter_mut().map(take).collect()
    }

    /// Adds sums of the same step that were offloaded to the host with their parameters.
    pub(crate) fn add_offloaded(&mut self, groups: Vec<Sum>) -> Result<()> {
        self.sums.on_host = true;
        self.add_sums(groups)
    }

    /// Marks the next micro-batch as the last.
    pub(crate) fn expect_the_last(&mut self) {
        self.last = true;
    }

    /// Marks the next backward as this part's; `None` if the backward may reach any parameter.
    pub(crate) fn expect_part(&mut self, part: Option<usize>) {
        self.part = part;
    }

    /// Adds empty sums until there are at least `count` groups of terms.
    pub(crate) fn expect_groups(&mut self, count: usize) {
        let empty = || self.parameters.iter().map(|_| None).collect();
        self.sums.groups.resize_with(count.max(self.sums.groups.len()), empty);
    }

    /// Returns whether autograd itself adds up the gradients.
    fn in_place(&self) -> bool {
        self.sums.groups.len() == 1 && !self.apart
    }

    /// Runs backward from one group's roots, to the parameters and to `ends`, and adds the parameters'
    /// gradients to the group's sums.
    pub(crate) fn add(
        &mut self,
        group: usize,
        roots: &[(impl Borrow<Tensor>, Tensor)],
        ends: &[&Tensor],
        keep_graph: bool,
    ) -> Result<()> {
        let (roots, gradients): (Vec<_>, Vec<_>) =
            roots.iter().map(|(root, gradient)| (root.borrow(), Some(gradient))).unzip();
        loop {
            let mut other = None;
            self.add_from(group, |known| {
                let reach = backward_to(known, ends, &roots, &gradients, keep_graph)?;
                other = if let Reach::Other(leaf) = reach { Some(leaf) } else { None };
                Ok(())
            })?;
            let Some(leaf) = other else { return Ok(()) };
            self.take_in(leaf)?;
        }
    }

    /// Runs the first part of a split backward (dX) from each group's roots, and returns the inputs' gradients.
    pub(crate) fn begin_split(
        &mut self,
        groups: &[Vec<(Tensor, Tensor)>],
        inputs: &[Tensor],
    ) -> Result<Begun> {
        self.expect_groups(groups.len());
        loop {
            match SplitBackward::input_gradients_to(&self.known, groups, inputs)? {
                Reach::Known(begun) => return Ok(begun),
                Reach::Other(leaf) => self.take_in(leaf)?,
            }
        }
    }

    /// Runs the second part of a split backward (dW) for one group, and adds the gradients to the group's sums.
    pub(crate) fn add_split(&mut self, group: usize, split: &mut SplitBackward) -> Result<()> {
        self.add_from(group, |_| split.add_weight_gradients(group))
    }

    /// Runs a backward, and adds the parameters' gradients to the group's sums.
    fn add_from(
        &mut self,
        group: usize,
        run: impl FnOnce(&KnownLeaves) -> Result<(), TorchError>,
    ) -> Result<()> {
        let run = || run(&self.known);
        // If sums are kept apart, a parameter's own gradient is that of the last micro-batch alone, not the sum
        // to be sent.
        if self.last
            && self.in_place()
            && let Some(collective) = self.collective.take()
        {
            let parameters = &self.parameters;
            let mut buckets = Buckets::new(collective, parameters)?;
            watched(parameters, |at| buckets.arrived(at, &parameters[at].grad()), run)?;
            self.sums.buckets = Some(buckets);
            return check_dense(&self.parameters, &self.named);
        }
        let named = &self.named;
        // With several groups, gradients of another part's parameters could not be assigned to a group at the
        // end.
        let only = self.sums.groups.len() == 1;
        let part = self.part.filter(|_| only).and_then(|part| self.parts.get(part));
        if self.in_place() {
            run()?;
            return check_dense(part.map_or(&self.parameters, |part| &part.parameters), named);
        }
        let sums = &mut self.sums.groups[group];
        match part {
            Some(part) => part.with_sums(sums, |own, sums| gather(own, sums, named, run)),
            None => gather(&self.parameters, sums, named, run),
        }
    }

    /// Adds a gradient of a parameter that no backward of this accumulator has computed. Without an earlier
    /// sum, this tensor becomes the sum and is changed in place.
    pub(crate) fn add_gradient(
        &mut self,
        group: usize,
        parameter: &Tensor,
        gradient: Tensor,
    ) -> Result<()> {
        let same = |p: &Tensor| p.data_ptr() == parameter.data_ptr();
        let Some(at) = self.parameters.iter().position(same) else { return Ok(()) };
        let added = vec![Some(gradient)];
        if !self.in_place() {
            return add_sum(std::slice::from_mut(&mut self.sums.groups[group][at]), added);
        }
        let mut sum = [self::gradient(parameter)];
        add_sum(&mut sum, added)?;
        Ok(set_gradient(&mut self.parameters[at], sum[0].as_ref())?)
    }

    /// Restores the parameters' earlier gradients, and returns the parameters with the step's sums.
    pub(crate) fn finish(mut self) -> Result<(Vec<Tensor>, Sums)> {
        self.look_everywhere()?;
        if self.in_place() {
            self.sums.groups[0] = self.parameters.iter().map(gradient).collect();
        }
        self.put_back()?;
        // Taken out, so that the drop does not restore gradients a second time, over those that were set
        // meanwhile.
        let parameters = std::mem::take(&mut self.parameters);
        Ok((parameters, std::mem::take(&mut self.sums)))
    }

    /// Collects gradients that a part's backward has left in parameters of other parts: a layer may use tensors
    /// that are not its own.
    fn look_everywhere(&mut self) -> Result<()> {
        if self.parts.is_empty() {
            return Ok(());
        }
        check_dense(&self.parameters, &self.named)?;
        match &mut self.sums.groups[..] {
            [sums] if self.apart => Ok(collect(&self.parameters, sums)?),
            _ => Ok(()),
        }
    }

    /// Returns the parameters of the sums.
    pub(crate) fn parameters(&self) -> &[Tensor] {
        &self.parameters
    }

    /// Returns the model's own parameters.
    pub(crate) fn own_parameters(&self) -> &[Tensor] {
        &self.parameters[..self.own]
    }

    /// Replaces the sums, and returns the earlier ones.
    pub(crate) fn exchange(&mut self, mut groups: Vec<Sum>) -> Vec<Sum> {
        // Leaves may have been added since these sums were begun.
        groups.iter_mut().for_each(|sum| sum.resize_with(self.parameters.len(), || None));
        std::mem::replace(&mut self.sums.groups, groups)
    }

    /// Adds gradients of the same step that were summed apart.
    pub(crate) fn add_sums(&mut self, groups: Vec<Sum>) -> Result<()> {
        self.expect_groups(groups.len());
        let mut pairs = self.sums.groups.iter_mut().zip(groups);
        pairs.try_for_each(|(mine, theirs)| add_sum(mine, theirs))
    }

    /// Continues to sum in these tensors, which belong to a CUDA graph, from the sums so far.
    pub(crate) fn adopt(&mut self, lenders: &[Sum]) -> Result<()> {
        self.expect_groups(lenders.len());
        self.sums.lent = true;
        // Collected first, so that a few kernels serve all parameters: one kernel each would cost the launches
        // that a replay saves.
        let mut empty = Vec::new();
        let mut into = Vec::new();
        let mut from = Vec::new();
        let groups = self.sums.groups.iter_mut().zip(lenders);
        for (mine, lender) in groups.flat_map(|(mine, lender)| mine.iter_mut().zip(lender)) {
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

    /// Continues to sum in tensors of its own.
    pub(crate) fn disown(&mut self) -> Result<()> {
        self.sums.own()
    }

    /// Removes the parameters' gradients, such as those of a failed backward.
    pub(crate) fn clear(&mut self) -> Result<()> {
        self.parameters.iter_mut().try_for_each(|p| Ok(set_gradient(p, None)?))
    }

    fn put_back(&mut self) -> Result<()> {
        let pairs = self.parameters.iter_mut().zip(&self.aside);
        pairs.into_iter().try_for_each(|(p, old)| Ok(set_gradient(p, old.as_ref())?))
    }

    /// Returns the largest of the step's gradients so far, as a tensor on the device: it is finite if they all
    /// are.
    pub(crate) fn largest(&self) -> Result<Option<Tensor>> {
        let sums = self.sums.groups.iter().flatten().flatten().map(Tensor::shallow_clone);
        let all: Vec<Tensor> = self.parameters.iter().filter_map(gradient).chain(sums).collect();
        if all.is_empty() { Ok(None) } else { Ok(Some(foreach::largest(&all)?)) }
    }
}

impl Drop for Accumulator {
    fn drop(&mut self) {
        // Cannot fail: these gradients were there before.
        let _ = self.put_back();
    }
}

/// Returns the variables that are being trained.
pub(crate) fn parameters(variables: &Mutex<Variables>) -> Vec<Tensor> {
    let variables = variables.lock().unwrap_or_else(PoisonError::into_inner);
    let all = variables.trainable_variables.iter().map(|variable| &variable.tensor);
    all.filter(|tensor| tensor.requires_grad()).map(Tensor::shallow_clone).collect()
}

/// Runs a backward, and adds these parameters' gradients to their sums.
fn gather(
    parameters: &[Tensor],
    sums: &mut [Option<Tensor>],
    named: &Named,
    run: impl FnOnce() -> Result<(), TorchError>,
) -> Result<()> {
    offering(parameters, sums, run)?;
    check_dense(parameters, named)?;
    Ok(collect(parameters, sums)?)
}

/// Returns whether gradients of parameters of this dtype on this device are summed in tensors of their own. Then
/// a micro-batch's gradients exist beside the sums until its backward is over. For
/// [`plan::Request::sums_apart`](brimful_plan::plan::Request).
///
/// True in half precision, whose sums are in f32, and on CUDA, where a few kernels add all gradients and
/// autograd would launch one for each parameter. Stages with offloaded weights always sum so.
pub fn sums_apart(device: Device, kind: Kind) -> bool {
    summed_in(kind) != kind || device.is_cuda()
}

/// Returns the bytes of summed gradients for each byte of parameters of this dtype: 1, or 2 in half precision.
/// For [`plan::Request::gradient_bytes`](brimful_plan::plan::Request).
pub fn gradient_factor(kind: Kind) -> f64 {
    summed_in(kind).elt_size_in_bytes() as f64 / kind.elt_size_in_bytes() as f64
}

fn is_summed_apart(parameter: &Tensor) -> bool {
    sums_apart(parameter.device(), parameter.kind())
}

/// Returns a parameter's gradient in a form that can be restored and added to: a model that was converted to
/// another dtype or device keeps its old gradients.
fn fitting_gradient(parameter: &Tensor) -> Result<Option<Tensor>> {
    let Some(gradient) = gradient(parameter) else { return Ok(None) };
    let (kind, device) = (parameter.kind(), parameter.device());
    let fits = [kind, summed_in(kind)].contains(&gradient.kind()) && gradient.device() == device;
    Ok(Some(if fits { gradient } else { gradient.f_to_device(device)?.f_to_kind(kind)? }))
}
