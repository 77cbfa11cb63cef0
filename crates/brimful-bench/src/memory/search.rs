//! Search for the largest model of a family whose step fits, by plan only.

use std::collections::HashMap;

use anyhow::{Context, Result};
use brimful::Bytes;
use brimful::balance::{self, LayerCost, Profile};
use brimful::internal::{measure_host_link, sums_apart};
use brimful::plan::{PlanDevice, Request, plan};
use brimful::schedule::{Recompute, Schedule};
use brimful_cli::setting::ModelName;
use brimful_plan::plan::{self};
use brimful_plan::schedule::HostLinkCost;

use super::family::{Family, TYPICAL};
use super::trial::MemoryCapacity;
use super::{Experiment, Way};
use crate::work::Workload;

/// Exclusive upper bound of the searched sizes.
const TOO_LARGE: usize = 1 << 14;

/// Measured layers of a family, and the capacity that its models must fit.
#[derive(Debug)]
pub(super) struct LargestSearch {
    pub(super) family: Family,
    pub(super) smallest: Workload,
    input_bytes: u64,
    /// Layers of a typical model, by name.
    layers: HashMap<String, LayerCost>,
    host_link: HostLinkCost,
    pub(super) capacity: MemoryCapacity,
}

/// Model whose step fits.
#[derive(Debug)]
pub(super) struct FoundModel {
    pub(super) size: usize,
    pub(super) work: Workload,
    pub(super) row: plan::PlanRow,
}

impl LargestSearch {
    /// Measures the layers with one sample, because larger micro-batches would only cost memory.
    pub(super) fn measure(
        family: Family,
        work: Workload,
        capacity: MemoryCapacity,
    ) -> Result<Self> {
        let typical = with_size(&work, family, TYPICAL);
        let sample = typical.samples(1).0;
        let Profile { input_bytes, layers } =
            balance::measure(&typical.layers()?, capacity.device, &sample)?;
        let layers = layers.into_iter().map(|layer| (layer.name.clone(), layer)).collect();
        let host_link = measure_host_link(capacity.device)?;
        Ok(Self { family, smallest: work, input_bytes, layers, host_link, capacity })
    }

    /// Returns whether host or device memory prevents a larger model with offloaded stages.
    pub(super) fn bound(&self, found: &FoundModel) -> Result<&'static str> {
        let experiment = Experiment { devices: 1, way: Way::Offload };
        let unbounded = MemoryCapacity { host: Bytes(u64::MAX), ..self.capacity };
        let fits = self.plan(experiment, unbounded, found.size + 1)?.is_some();
        Ok(if fits { "host" } else { "device" })
    }

    /// Returns the largest model within this much memory per device: doubles the size while it fits, then
    /// bisects.
    pub(super) fn largest(
        &self,
        experiment: Experiment,
        limit: Bytes,
    ) -> Result<Option<FoundModel>> {
        let capacity = MemoryCapacity { limit, ..self.capacity };
        let Some(mut best) = self.first(experiment, capacity)? else { return Ok(None) };
        let mut too_large = TOO_LARGE;
        while too_large - best.size > 1 {
            let next = (2 * best.size).min(usize::midpoint(best.size, too_large));
            match self.plan(experiment, capacity, next)? {
                Some(found) => best = found,
                None => too_large = next,
            }
        }
        Ok(Some(best))
    }

    /// Plans the smallest model that has a layer for each stage.
    fn first(
        &self,
        experiment: Experiment,
        capacity: MemoryCapacity,
    ) -> Result<Option<FoundModel>> {
        let mut size = 1;
        while with_size(&self.smallest, self.family, size).layers()?.len() < experiment.devices {
            size += 1;
        }
        self.plan(experiment, capacity, size)
    }

    /// Plans the fastest step that fits, for the model of this size.
    fn plan(
        &self,
        experiment: Experiment,
        capacity: MemoryCapacity,
        size: usize,
    ) -> Result<Option<FoundModel>> {
        let work = with_size(&self.smallest, self.family, size);
        let profile = self.profile(&work, size)?;
        let device = PlanDevice { memory: Some(capacity.limit.0), ..PlanDevice::default() };
        let mut request = Request::new(&profile, vec![device; experiment.devices], work.batch);
        request.sums_apart = sums_apart(capacity.device, work.dtype.kind());
        request.optimizer_bytes = self.family.method().state_factor();
        request.schedules = vec![Schedule::OneFOneB];
        request.micro_batches = vec![work.batch];
        match experiment.way {
            Way::Naive => {
                (request.micro_batches, request.recompute) = (vec![1], Some(Recompute::Never));
            }
            Way::Pipeline => {}
            Way::Offload => {
                request.host_memory = Some(capacity.host.0);
                request.host_link = self.host_link;
            }
        }
        let row = plan(&request)?.best().cloned();
        Ok(row.map(|row| FoundModel { size, work, row }))
    }

    fn profile(&self, work: &Workload, size: usize) -> Result<Profile> {
        let layers = work.layers()?;
        let layer = |name: &str| {
            let twin = self.layers.get(&self.family.twin(name, size));
            let twin = twin.with_context(|| format!("no layer like {name} was measured"))?;
            Ok(LayerCost { name: name.to_owned(), ..twin.clone() })
        };
        let layers = layers.names().map(layer).collect::<Result<_>>()?;
        Ok(Profile { input_bytes: self.input_bytes, layers })
    }
}

fn with_size(work: &Workload, family: Family, size: usize) -> Workload {
    let (ModelName::UNet { channels: width, .. } | ModelName::AmoebaNet { filters: width, .. }) =
        work.model
    else {
        unreachable!("a family's models are U-Nets or AmoebaNets")
    };
    Workload { model: family.model(size, width), ..work.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    fn capacity(limit: u64) -> MemoryCapacity {
        MemoryCapacity { device: Device::Cpu, limit: Bytes(limit), host: Bytes(0) }
    }

    #[test]
    fn every_layer_of_every_size_has_its_twin_among_those_that_were_measured() {
        for (family, width, first) in [(Family::Unet, 2, 1), (Family::Amoebanet, 8, 2)] {
            let model = family.model(1, width);
            let work = Workload { batch: 2, image: 64, ..Workload::default_of(model, Device::Cpu) };
            let search = LargestSearch::measure(family, work, capacity(1 << 20)).expect("layers");
            for size in first..=6 {
                let work = with_size(&search.smallest, family, size);
                let profile = search.profile(&work, size).expect("a profile");
                let bytes: Vec<_> =
                    profile.layers.iter().map(|layer| layer.parameter_bytes).collect();
                let counts = work.layers().and_then(|layers| Ok(layers.parameter_counts()?));
                let expected: Vec<_> = counts.expect("counts").iter().map(|n| 4 * n).collect();
                assert_eq!(bytes, expected, "{}", work.model);
            }
        }
    }

    #[test]
    fn the_largest_one_fits_and_the_next_one_does_not() {
        let (family, limit) = (Family::Unet, Bytes(4 << 20));
        let work = Workload {
            batch: 4,
            image: 64,
            ..Workload::default_of(family.model(1, 2), Device::Cpu)
        };
        let search = LargestSearch::measure(family, work, capacity(limit.0)).expect("layers");
        for experiment in [1, 3].map(|devices| Experiment { devices, way: Way::Pipeline }) {
            let found = search.largest(experiment, limit).expect("a plan").expect("one that fits");
            assert!(found.row.largest_peak() <= limit.0);
            let next = search.plan(experiment, search.capacity, found.size + 1).expect("a plan");
            assert!(next.is_none(), "{next:?}");
        }
        let naive = Experiment { devices: 1, way: Way::Naive };
        assert!(search.largest(naive, Bytes(1 << 10)).expect("a plan").is_none());
    }
}
