//! Cuts the layers into stages: by given sizes, evenly, or by measurement.

use brimful_torch::threads::limit_threads;
use tch::Tensor;

use super::Builder;
use super::balance::Choice;
use crate::Result;
use crate::accumulate::{gradient_factor, sums_apart};
use crate::batch;
use crate::measure::measure_of_kind;
use crate::memory::Memory;
use crate::workers::DeviceSpec;
use brimful_plan::balance::{self, LayerCost, Load, Profile, Slot};
use brimful_plan::bytes::Bytes;
use brimful_plan::plan::{self, Misfit, Request};
use brimful_plan::schedule::{DeviceId, ScheduleRecipe, StageId};

/// Inputs of the search for a balance.
pub(super) struct Question<'a> {
    pub(super) builder: &'a Builder,
    /// Device that layers are measured on.
    pub(super) first: &'a DeviceSpec,
    /// Memory limit of each device, if known.
    pub(super) limits: &'a [Option<u64>],
    pub(super) micro_batches: usize,
}

/// Balance in numbers.
pub(super) struct ResolvedBalance {
    pub(super) balance: balance::Balance,
    /// Costs that automatic schedules are made from, if the stages' times are known.
    pub(super) recipe: Option<ScheduleRecipe>,
}

impl Question<'_> {
    /// Finds the balance in numbers.
    pub(super) fn resolve(&self) -> Result<ResolvedBalance> {
        let Builder { layers, balance, kind, recipe, .. } = self.builder;
        let state = balance.method.map_or(0.0, |method| method.state_factor_in(*kind));
        let balance = match &balance.choice {
            Choice::ByTime(sample) => return self.by_time(sample, state),
            Choice::Given(sizes) => balance::Balance::new(sizes.clone(), layers.len())?,
            Choice::Even => self.evenly()?,
            Choice::ByBytes(sample) => self.by_bytes(sample, state)?,
        };
        Ok(ResolvedBalance { balance, recipe: recipe.clone() })
    }

    fn evenly(&self) -> Result<balance::Balance> {
        let load = Load { time: 1.0, ..Load::default() };
        let Builder { layers, .. } = self.builder;
        let stages = self.limits.len() * self.builder.order().stages_per_device();
        Ok(balance::by_time(&vec![load; layers.len()], &vec![Slot::default(); stages])?)
    }

    /// Returns the planner's balance for this schedule, with the sample as a micro-batch.
    fn by_time(&self, sample: &Vec<Tensor>, state: f64) -> Result<ResolvedBalance> {
        let &Builder { recompute, kind, .. } = self.builder;
        let profile = self.profile(sample)?;
        let samples = batch::len(sample)? * self.micro_batches;
        let device = |memory: &Option<u64>| plan::PlanDevice { memory: *memory, speed: 1.0 };
        let devices = self.limits.iter().map(device).collect();
        let mut request = Request::new(&profile, devices, samples);
        request.schedules = vec![self.builder.order()];
        request.micro_batches = vec![self.micro_batches];
        request.recompute = Some(recompute);
        request.gradient_bytes = gradient_factor(kind);
        request.sums_apart = sums_apart(self.first.device, kind);
        request.optimizer_bytes = state;
        let best = plan::plan(&request)?.rows.swap_remove(0);
        if let Some(Misfit { device, needed, memory }) = best.misfits.first() {
            let (needed, memory) = (Bytes(*needed), Bytes(*memory));
            tracing::warn!(%device, %needed, %memory, "no balance fits by plan: this one lacks the least");
        }
        Ok(ResolvedBalance { balance: best.balance, recipe: best.recipe })
    }

    fn by_bytes(&self, sample: &Vec<Tensor>, state: f64) -> Result<balance::Balance> {
        let &Builder { recompute, kind, .. } = self.builder;
        let profile = self.profile(sample)?;
        let samples = batch::len(sample)? as u64;
        let of_parameters = 1.0 + gradient_factor(kind) + state;
        let load = |layer: &LayerCost| Load {
            time: 0.0,
            bytes: (layer.parameter_bytes as f64 * of_parameters) as u64,
            activation_bytes: layer.activation_bytes * samples,
            output_bytes: layer.output_bytes * samples,
        };
        let (devices, m) = (self.limits.len(), self.micro_batches);
        let actions = self.builder.order().actions(devices, m, recompute)?;
        let slot = |(j, device): (usize, &DeviceId)| Slot {
            speed: 1.0,
            memory: self.limits[device.index()],
            held: actions.held(StageId::at(j)) as u64,
        };
        let loads: Vec<_> = profile.layers.iter().map(load).collect();
        let slots: Vec<_> = actions.placement().iter().enumerate().map(slot).collect();
        Ok(balance::by_bytes(&loads, &slots)?)
    }

    /// Measures the layers on the first device.
    fn profile(&self, sample: &Vec<Tensor>) -> Result<Profile> {
        // Uses as many threads as the worker will: with all of the caller's threads, layers would seem faster.
        let _threads = self.first.threads.map(limit_threads);
        let Builder { layers, kind, .. } = self.builder;
        measure_of_kind(layers, self.first.device, sample, *kind, |_| {})
    }
}

/// Returns the device's memory limit, if known.
pub(super) fn limit(device: &DeviceSpec) -> Option<u64> {
    match device.memory()? {
        Memory::Arena(arena) => arena.limit(),
        accelerator => accelerator.usage().ok()?.available.map(|bytes| bytes.0),
    }
}
