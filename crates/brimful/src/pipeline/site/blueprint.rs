//! Builds the site of a worker: its stages, and all that the stages need to run.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use tch::Tensor;
use tch::nn::VarStore;

use super::{ActivationCache, HostLead, Site, Stage, taken};
use crate::Result;
use crate::memory::Arena;
use crate::pipeline::offload::{HostMemory, OffloadSettings, OffloadedStage, OffloadedStages};
use crate::pipeline::stage_layout::{StageLayout, StagePlan};
use crate::pipeline::transfers::HostStaging;
use crate::random::{Generator, StepRng};
use crate::step::NonFinitePolicy;
use crate::streams::CopyStreams;
use crate::workers::DeviceSpec;
use brimful_plan::schedule::{Location, StageLocation};

/// Specification that a worker is built from.
#[derive(Debug)]
pub(crate) struct Blueprint {
    pub(crate) layout: Arc<StageLayout>,
    /// Number of the worker in its pipeline.
    pub(crate) number: usize,
    /// Index of the worker's pipeline among the pipelines of this process.
    pub(crate) replica: usize,
    pub(crate) device: DeviceSpec,
    /// Lock of workers that share an accelerator, and so its random generator.
    pub(crate) device_lock: Option<Arc<Mutex<()>>>,
    pub(crate) build: StageBuild,
    /// Seed of the parameters' initial values.
    pub(crate) seed: u64,
}

/// Settings by which every worker builds its stages.
#[derive(Debug, Clone)]
pub(crate) struct StageBuild {
    pub(crate) kind: tch::Kind,
    /// Device or host for each stage's weights and boundaries; `host` is the arena that host memory is
    /// charged to.
    pub(crate) locations: Vec<StageLocation>,
    pub(crate) host: Option<Arena>,
    /// Whether to keep activations on a device with enough free bytes.
    pub(crate) keeps_activations: bool,
    pub(crate) offload: OffloadSettings,
    pub(crate) non_finite: NonFinitePolicy,
}

impl Blueprint {
    /// Builds the stages in this store. Offloads each offloaded stage before the next stage is built, so that the
    /// device never holds all stages.
    fn stages(
        &self,
        store: &VarStore,
        generator: &Generator,
    ) -> Result<(Vec<Stage>, Option<OffloadedStages>)> {
        let Self { layout, number, device_lock, seed, .. } = self;
        let first = StepRng::new(*seed, 0);
        let mut stages = Vec::new();
        let mut offloaded: Vec<Option<OffloadedStage>> = Vec::new();
        let memory = HostMemory { arena: self.build.host.clone(), device: self.device.device };
        for (id, plan) in layout.of_worker(*number) {
            // Held for a whole stage, because a different worker of this accelerator could draw in between.
            let _alone = device_lock.as_ref().map(taken);
            // Each layer has its own seed, so that initial values do not depend on the balance.
            let built =
                layout.layers.build_range_watched(&store.root(), plan.range.clone(), |position| {
                    generator.seed(first.seed(position))
                });
            stages.push(Stage::new(id, built?, plan));
            offloaded.push(match self.build.locations[id.index()].weights {
                Location::Host => Some(self.copy_to_host(plan, store, &offloaded, &memory)?),
                Location::Device => None,
            });
        }
        Ok((stages, OffloadedStages::new(offloaded, memory, self.build.offload)?))
    }

    /// Builds the stages in this store, and all that they need to run.
    pub(crate) fn site(&self, store: &VarStore) -> Result<Site> {
        let device = self.device.device;
        // Made before the layers, which on a CPU would otherwise draw from the generator that all threads share.
        let generator = Generator::new(device);
        let (stages, offloaded) = self.stages(store, &generator)?;
        let cache = self.activation_cache(&stages, offloaded.as_ref());
        Ok(Site {
            device,
            stages,
            // Stages and inputs have separate streams, because a neighbour's gradient must not queue after the
            // next inputs.
            copy_streams: CopyStreams::new(device),
            inputs: CopyStreams::new(device),
            generator,
            device_lock: self.device_lock.clone(),
            layer: Cell::new(None),
            layout: Arc::clone(&self.layout),
            trains: true,
            non_finite: self.build.non_finite,
            unmanaged: Vec::new(),
            host_staging: self.host_staging(offloaded.as_ref(), cache.is_some())?,
            in_flight: RefCell::default(),
            lead: HostLead::new(device),
            cache,
            offloaded,
            optimizer: None,
            stage_locations: self.build.locations.clone(),
            channels_last: false,
            told_of_whole: HashSet::new(),
        })
    }

    /// Makes host staging for boundaries; none if no boundary can wait on the host.
    fn host_staging(
        &self,
        offloaded: Option<&OffloadedStages>,
        may_be_full: bool,
    ) -> Result<Option<HostStaging>> {
        let StageBuild { locations: stages, host, .. } = &self.build;
        if !may_be_full && stages.iter().all(|location| location.boundaries == Location::Device) {
            return Ok(None);
        }
        // Boundaries and gradients share one stream to the host.
        let shared = offloaded.map(|offloaded| offloaded.outward.clone());
        let own = || HostStaging::new(self.device.device, host.clone());
        shared.map_or_else(own, Ok).map(Some)
    }

    /// Makes the activation cache, if micro-batches meet at a barrier on a device whose memory is counted.
    fn activation_cache(
        &self,
        stages: &[Stage],
        offloaded: Option<&OffloadedStages>,
    ) -> Option<ActivationCache> {
        let has_barriers =
            offloaded.is_none() && stages.iter().any(|stage| stage.exact_norm().is_some());
        let memory = self.device.memory().filter(|_| has_barriers)?;
        Some(ActivationCache::new(memory, self.build.keeps_activations))
    }

    /// Offloads the stage's parameters, frozen ones too. Running statistics stay on the device: they are
    /// small, and every micro-batch updates them.
    fn copy_to_host(
        &self,
        plan: &StagePlan,
        store: &VarStore,
        earlier: &[Option<OffloadedStage>],
        memory: &HostMemory,
    ) -> Result<OffloadedStage> {
        let places: HashSet<_> = store.trainable_variables().iter().map(Tensor::data_ptr).collect();
        let mut own: Vec<_> = (store.variables().into_iter())
            .filter(|(name, tensor)| {
                let is_parameter = tensor.numel() > 0 && places.contains(&tensor.data_ptr());
                is_parameter && self.layout.uses(plan, name)
            })
            .collect();
        own.sort_by(|(a, _), (b, _)| a.cmp(b));
        let mut shared = Vec::new();
        own.retain(|(name, _)| {
            let on_host = earlier.iter().flatten().find_map(|stage| stage.share(name));
            let is_new = on_host.is_none();
            shared.extend(on_host);
            is_new
        });
        OffloadedStage::take_in(own, shared, self.build.kind, memory)
    }
}
