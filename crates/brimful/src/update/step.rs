//! Optimizer step: all that can fail first, then the update, which allocates nothing.
//!
//! ```text
//!   prepare   gradients found · missing state, copies and scratch space allocated     may fail
//!   commit    gradients converted · parameters and state updated · copies written     cannot fail
//! ```

use std::collections::BTreeMap;

use brimful_torch::foreach;
use brimful_torch::optim::{self as fused, fits};
use tch::{Device, Kind, Tensor};

use super::OptimError;
use super::scratch::{ScratchPiece, convert, scratch_elements, scratch_for};
use super::state::{self, Moment, ParameterState, refresh_scratch};
use super::{Method, OptimizerPart, Parameter};
use crate::Result;

/// Part of a step for one parameter.
#[derive(Debug)]
struct Item {
    index: usize,
    /// Tensor that is updated: the parameter, or a copy of it.
    work: Tensor,
    gradient: Tensor,
    /// New state of the parameter; `None` if its present state is used.
    state: Option<ParameterState>,
    /// Whether the parameter was set since its last update, so that the state's f32 master must be refreshed.
    stale: bool,
    /// Whether `work` must be copied to the parameter afterwards.
    write_back: bool,
}

/// Properties that the parameters of one fused call share.
#[derive(Debug, PartialEq)]
struct Key {
    /// Part of offloaded parameters; `None` for others.
    part: Option<usize>,
    group: usize,
    method: Method,
    /// Device that updates them.
    device: Device,
    kind: Kind,
    /// Whether this is their first step.
    first: bool,
    /// Dtype to which their gradients are converted; `None` if they are read as they are.
    converted: Option<Kind>,
}

/// Parameters of one fused call.
type FusedBatch = ScratchPiece<Key, Item>;

/// Prepared step, with all the memory that its commit needs.
#[derive(Debug, Default)]
pub(crate) struct OptimizerPlan {
    buckets: Vec<FusedBatch>,
    scratch: Vec<Tensor>,
    /// Scratch space of methods that update whole parameters.
    whole: Vec<Tensor>,
    /// Learning rates of the groups as tensors; empty where the groups' own numbers apply.
    pub(super) rates: Vec<Tensor>,
}

impl OptimizerPlan {
    /// Splits the step into the part of parameters that are not offloaded, and the parts of offloaded ones.
    pub(crate) fn split(self) -> (Self, BTreeMap<usize, Self>) {
        let of = |buckets| {
            let [scratch, whole, rates] = [&self.scratch, &self.whole, &self.rates]
                .map(|list| list.iter().map(Tensor::shallow_clone).collect());
            Self { buckets, scratch, whole, rates }
        };
        let (mut here, mut parts) = (of(Vec::new()), BTreeMap::new());
        for bucket in self.buckets {
            match bucket.key.part {
                None => here.buckets.push(bucket),
                Some(part) => {
                    parts.entry(part).or_insert_with(|| of(Vec::new())).buckets.push(bucket);
                }
            }
        }
        (here, parts)
    }

    /// Returns the gradients.
    pub(crate) fn gradients(&self) -> Vec<Tensor> {
        let items = self.buckets.iter().flat_map(|bucket| &bucket.items);
        items.map(|item| item.gradient.shallow_clone()).collect()
    }

    /// Replaces the [gradients](Self::gradients) by copies.
    pub(crate) fn set_gradients(&mut self, gradients: Vec<Tensor>) {
        let items = self.buckets.iter_mut().flat_map(|bucket| &mut bucket.items);
        items.zip(gradients).for_each(|(item, gradient)| item.gradient = gradient);
    }
}

impl OptimizerPart {
    /// Updates every parameter that has a gradient. If the preparation fails, no parameter has changed.
    pub(crate) fn step(&mut self) -> Result<()> {
        if self.step_again()? {
            return Ok(());
        }
        let mut plan = self.prepare()?;
        self.commit(&mut plan)
    }

    /// Prepares a step. All that can fail is here.
    pub(crate) fn prepare(&self) -> Result<OptimizerPlan> {
        self.prepare_from(|parameter| Ok(parameter.tensor.f_grad()?))
    }

    /// Prepares a step of these parameters only, with these gradients in place of the parameters' own.
    pub(crate) fn prepare_with(&self, gradients: &[(String, Tensor)]) -> Result<OptimizerPlan> {
        self.prepare_from(|parameter| {
            let given = gradients.iter().find(|(name, _)| *name == parameter.name);
            Ok(given.map_or_else(Tensor::new, |(_, gradient)| gradient.shallow_clone()))
        })
    }

    /// Prepares a step with the gradients that `gradient_of` returns, undefined where there is none.
    fn prepare_from(
        &self,
        gradient_of: impl Fn(&Parameter) -> Result<Tensor>,
    ) -> Result<OptimizerPlan> {
        let _no_grad = tch::no_grad_guard();
        let mut buckets: Vec<FusedBatch> = Vec::new();
        for (index, parameter) in self.parameters.iter().enumerate() {
            if let Some(item) = self.prepare_one(index, parameter, gradient_of(parameter)?)? {
                let key = self.key_of(parameter, &item);
                let needed = key.converted.map_or(0, |_| scratch_elements(&item.work));
                ScratchPiece::put(&mut buckets, key, item, needed);
            }
        }
        let converted = buckets.iter().filter_map(|bucket| {
            Some(((bucket.key.converted?, bucket.key.device), bucket.scratch))
        });
        let stale = buckets.iter().flat_map(|bucket| {
            let items = bucket.items.iter().filter(|item| item.stale);
            items.flat_map(|item| refresh_scratch(&item.work, bucket.key.device))
        });
        let scratch = scratch_for(converted.chain(stale))?;
        let whole = buckets.iter().flat_map(|bucket| {
            bucket.items.iter().filter_map(|item| {
                let (kind, elements) = bucket.key.method.scratch(&item.work, bucket.key.device)?;
                Some(((kind, bucket.key.device), elements))
            })
        });
        let whole = scratch_for(whole)?;
        Ok(OptimizerPlan { buckets, scratch, whole, rates: Vec::new() })
    }

    fn prepare_one(
        &self,
        index: usize,
        parameter: &Parameter,
        gradient: Tensor,
    ) -> Result<Option<Item>> {
        let tensor = &parameter.tensor;
        if !tensor.requires_grad() || !gradient.defined() {
            return Ok(None);
        }
        if gradient.is_sparse() {
            let reason = "its gradient is sparse; make the layer's gradient dense".into();
            return Err(
                OptimError::BadParameter { parameter: parameter.name.clone(), reason }.into()
            );
        }
        let method = &self.method_of(parameter);
        let _charged = parameter.enter_host_arena();
        let old = parameter.state.as_ref();
        let (state, stale) = match old {
            Some(old) if old.suits(tensor, method) => (None, old.is_stale(tensor)),
            _ => (Some(ParameterState::new(tensor, method, old)?), false),
        };
        let (work, write_back) = match method.updates_in_place(tensor) {
            true => (tensor.shallow_clone(), false),
            false => (tensor.f_contiguous()?, true),
        };
        Ok(Some(Item { index, work, gradient, state, stale, write_back }))
    }

    fn key_of(&self, parameter: &Parameter, item: &Item) -> Key {
        let offload = parameter.offload.as_ref();
        Key {
            part: offload.map(|offload| offload.part),
            group: parameter.group,
            method: self.method_of(parameter),
            device: offload.map_or(item.work.device(), |offload| offload.device),
            kind: item.work.kind(),
            first: parameter.state.as_ref().is_none_or(|state| state.is_new),
            converted: converted(item),
        }
    }

    /// Commits a step without allocating.
    pub(crate) fn commit(&mut self, plan: &mut OptimizerPlan) -> Result<()> {
        let OptimizerPlan { buckets, scratch, whole, rates } = plan;
        buckets.iter_mut().try_for_each(|bucket| self.commit_batch(bucket, (scratch, whole), rates))
    }

    fn commit_batch(
        &mut self,
        batch: &mut FusedBatch,
        (scratch, whole): (&[Tensor], &[Tensor]),
        rates: &[Tensor],
    ) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let FusedBatch { key, items, .. } = batch;
        // `prepare` allocated the state. It is set only here, and stale masters are refreshed only here, so an
        // earlier failure changes nothing.
        for item in items.iter_mut() {
            let Parameter { tensor, state, .. } = &mut self.parameters[item.index];
            if let Some(new) = item.state.take() {
                *state = Some(new);
            }
            if let Some(state) = state.as_ref().filter(|_| item.stale) {
                state.refresh(tensor, scratch)?;
            }
        }
        if let Some(kind) = key.converted {
            let work: Vec<_> = items.iter().map(|item| &item.work).collect();
            let given: Vec<_> = items.iter().map(|item| item.gradient.shallow_clone()).collect();
            let gradients = convert(&given, &work, kind, scratch)?;
            items.iter_mut().zip(gradients).for_each(|(item, to)| item.gradient = to);
        }
        self.update(key, items, whole, rates.get(key.group))?;
        self.write_back(items)
    }

    fn update(
        &self,
        key: &Key,
        items: &[Item],
        whole: &[Tensor],
        rate: Option<&Tensor>,
    ) -> Result<()> {
        let states: Vec<_> =
            items.iter().filter_map(|item| self.parameters[item.index].state.as_ref()).collect();
        let moments: Vec<Vec<_>> =
            states.iter().map(|state| state.moments.iter().map(Moment::lend).collect()).collect();
        let updates: Vec<_> = (items.iter().zip(states).zip(&moments))
            .map(|((item, state), moments)| fused::Update {
                parameter: &item.work,
                gradient: &item.gradient,
                master: state.master.as_ref(),
                step: state.step.as_ref(),
                moments,
                first: key.first,
            })
            .collect();
        key.method.update(&updates, whole, rate)
    }

    /// Writes copies to their parameters, and records the parameters' new versions. A later change by others raises
    /// the version, which shows that an f32 master is stale.
    fn write_back(&mut self, items: &[Item]) -> Result<()> {
        let copies = || items.iter().filter(|item| item.write_back);
        let into: Vec<_> =
            copies().map(|item| self.parameters[item.index].tensor.shallow_clone()).collect();
        let from: Vec<_> = copies().map(|item| item.work.shallow_clone()).collect();
        foreach::copy(&into, &from)?;
        for item in items {
            let Parameter { tensor, state, .. } = &mut self.parameters[item.index];
            if let Some(state) = state {
                state.version = state::version(tensor);
                state.is_new = false;
            }
        }
        Ok(())
    }
}

/// Returns the dtype to which the item's gradient must be converted; `None` if it can be read as it is.
fn converted(item: &Item) -> Option<Kind> {
    let (work, gradient) = (item.work.kind(), item.gradient.kind());
    let is_double = |kind| kind == Kind::Double;
    let is_read = is_double(work) == is_double(gradient) && item.gradient.is_floating_point();
    match is_read {
        true if fits(&item.work, &item.gradient) => None,
        true => Some(gradient),
        // An f64 parameter's gradient is converted to f64, because the update computes in f64.
        false if is_double(work) => Some(work),
        false => Some(Kind::Float),
    }
}
