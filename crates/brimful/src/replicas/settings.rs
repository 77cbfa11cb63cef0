//! Settings of replicas: the settings of `MicroBatcher`, and some that only replicas have.

use std::path::Path;
use std::sync::Arc;

use super::Replicas;
use super::error;
use super::replica::{Replica, Setting};
use super::shares::Speeds;
use crate::Result;
use crate::accumulate::parameters;
use crate::micro::{MemoryFormat, MicroBatcher};
use crate::step::{Engine, MicroBatches, NonFinitePolicy, Team, names};
use crate::update::Method;
use crate::world::World;

impl<M: 'static> Replicas<M> {
    /// Sets the policy for non-finite values.
    pub fn non_finite(mut self, policy: NonFinitePolicy) -> Self {
        self.state.non_finite = policy;
        self.set(move |micro| micro.state().non_finite = policy)
    }

    /// Captures micro-batches of each shape once as CUDA graphs, on every replica with a CUDA device: see
    /// [`MicroBatcher::cuda_graphs`], and what it requires of the closure.
    pub fn cuda_graphs(mut self, wanted: bool) -> Self {
        self.cuda_graphs = wanted;
        self.set(move |micro| micro.set_cuda_graphs(wanted))
    }

    /// Returns the reason why a replica's micro-batches run eagerly although [`Replicas::cuda_graphs`] was set;
    /// none if all replicas can run CUDA graphs.
    ///
    /// # Errors
    /// When a replica's thread has ended.
    pub fn eager_cause(&mut self) -> Result<Option<String>> {
        self.apply_settings()?;
        let cause = |replica: &mut Replica<M>| Ok(replica.micro.eager_cause().map(str::to_owned));
        Ok(self.workers.all(cause)?.into_iter().flatten().next())
    }

    /// Sets the memory format of images and convolutions, as [`MicroBatcher::memory_format`] does. Each replica
    /// measures formats for itself.
    pub fn memory_format(self, memory_format: MemoryFormat) -> Self {
        let measures = self.state.team.is_alone();
        self.set(move |micro| {
            micro.set_memory_format(memory_format);
            if !measures {
                micro.measure_no_format();
            }
        })
    }

    /// Reserves memory on the first device for the state that an optimizer makes at its first step, as
    /// [`MicroBatcher::reserve`] does.
    pub fn reserve(mut self, method: impl Into<Method>) -> Self {
        let bytes = method.into().state_bytes(&parameters(&self.store.variables_));
        // Reserved only on the first replica, because the others copy its parameters.
        self.state.reserved = vec![bytes];
        self
    }

    /// Reads automatic sizes that an earlier run found for this model on these devices, and writes the
    /// sizes of this run to the same file, as [`MicroBatcher::remember`] does.
    pub fn remember(mut self, path: impl AsRef<Path>) -> Self {
        self.state.remember(path.as_ref());
        self
    }

    /// Sets each replica's speed relative to the others, instead of measuring it: the parts then depend on
    /// nothing else, so that a run repeats bit by bit on unlike devices.
    ///
    /// # Errors
    /// When there is not one number for each replica, or one is not above 0.
    pub fn set_speeds(&mut self, speeds: &[f64]) -> Result<()> {
        error::check_speeds(speeds, self.devices.len())?;
        self.speeds = Speeds::given(speeds);
        Ok(())
    }

    /// Trains together with the other ranks of a world, each of which passes its own part of every
    /// mini-batch, as [`MicroBatcher::join`] does.
    ///
    /// # Errors
    /// As [`MicroBatcher::join`].
    pub fn join(mut self, world: &World) -> Result<Self> {
        if world.size() == 1 {
            return Ok(self);
        }
        names(&self.store.variables_).join(world)?;
        self.state.team = Team { world: world.clone(), replicas: world.size() };
        Ok(self.set(MicroBatcher::measure_no_format))
    }

    /// Returns the size by which each replica's part is cut.
    pub fn micro_batches(&self) -> MicroBatches {
        self.state.size
    }

    /// Sets the size by which each replica's part is cut from now on.
    pub fn set_micro_batches(&mut self, micro_batches: MicroBatches) {
        self.state.set_size(micro_batches);
    }

    fn set(mut self, setting: impl Fn(&mut MicroBatcher) + Send + Sync + 'static) -> Self {
        // Applied at the next step: a thread may have ended, which `cuda_graphs` and others cannot report.
        self.settings.push(Box::new(setting));
        self
    }

    /// Applies the settings that were made since the last step to every replica.
    pub(super) fn apply_settings(&mut self) -> Result<()> {
        if self.settings.is_empty() {
            return Ok(());
        }
        let settings: Arc<[Setting]> = std::mem::take(&mut self.settings).into();
        let set = move |replica: &mut Replica<M>| {
            settings.iter().for_each(|setting| setting(&mut replica.micro));
            Ok(())
        };
        self.workers.all(set).map(drop)
    }
}
