//! How replicas run their parts: as a `MicroBatcher` is told, and what replicas alone have.

use std::path::Path;
use std::sync::PoisonError;

use super::{Replicas, error, mirror};
use crate::auto::Identity;
use crate::memory;
use crate::micro::world::join;
use crate::micro::{Layout, MicroBatcher, NonFinite, state_bytes};
use crate::optim::Method;
use crate::replicas::shares::Speeds;
use crate::world::World;
use crate::{Bytes, Result, device};

impl<M: 'static> Replicas<M> {
    /// Says what is refused because it is not finite.
    ///
    /// # Errors
    /// When a replica's thread has ended.
    pub fn non_finite(self, policy: NonFinite) -> Result<Self> {
        self.set(move |micro| micro.non_finite = policy)
    }

    /// Captures micro-batches of each shape once and replays them, on every replica that has a CUDA
    /// device: see [`MicroBatcher::replay`], and what it asks of the closure.
    ///
    /// # Errors
    /// When a replica's thread has ended.
    pub fn replay(mut self, wanted: bool) -> Result<Self> {
        self.replays = wanted;
        self.set(move |micro| micro.set_replay(wanted))
    }

    /// Why a replica's micro-batches run eagerly although [`Replicas::replay`] was asked for; none
    /// where nothing stands in the way on any of them.
    ///
    /// # Errors
    /// When a replica's thread has ended.
    pub fn eager_cause(&self) -> Result<Option<String>> {
        Ok(self.crew.all(|replica| Ok(replica.eager_cause()))?.into_iter().flatten().next())
    }

    /// Says in which order images and convolutions are to be in memory, as
    /// [`MicroBatcher::layout`] does. What is measured is measured by each replica for itself.
    ///
    /// # Errors
    /// When a replica's thread has ended.
    pub fn layout(self, layout: Layout) -> Result<Self> {
        let measures = self.world.is_none();
        self.set(move |micro| {
            micro.set_layout(layout);
            if !measures {
                micro.measure_no_layout();
            }
        })
    }

    /// Keeps memory on the first device for the state that an optimizer makes at its first step, as
    /// [`MicroBatcher::reserve`] does.
    pub fn reserve(mut self, method: impl Into<Method>) -> Self {
        self.reserved = state_bytes(&self.store.variables_, method.into());
        self
    }

    /// Reads automatic sizes that an earlier run has found for this model on these devices, and
    /// writes there what is found now.
    ///
    /// # Errors
    /// When a memory does not answer. A file that cannot be used is left as it is, with a warning.
    pub fn remember(mut self, path: impl AsRef<Path>) -> Result<Self> {
        let names: Vec<String> = self.devices.iter().map(|d| device::name(d.device)).collect();
        let ends = self.devices.iter().map(|device| memory::end_of(device.memory().as_ref()));
        let total = ends.collect::<Result<Vec<Bytes>>>()?.into_iter().map(|end| end.0).sum();
        let identity = {
            let variables = self.store.variables_.lock().unwrap_or_else(PoisonError::into_inner);
            Identity::new(&variables, names.join("+"), total, format!("{:?}", self.size))
        };
        self.sizes.remember(path.as_ref().to_owned(), identity);
        Ok(self)
    }

    /// How fast each replica is, relative to the others, in place of what is measured: the parts
    /// then depend on nothing else, so that a run can be repeated bit by bit on unlike devices.
    ///
    /// # Errors
    /// When there is not one number a replica, or one is not above 0.
    pub fn speeds(mut self, speeds: &[f64]) -> Result<Self> {
        error::check_speeds(speeds, self.devices.len())?;
        self.speeds = Speeds::given(speeds);
        Ok(self)
    }

    /// Trains together with the other ranks of a world, each of which gives its own part of every
    /// mini-batch, as [`MicroBatcher::world`] does.
    ///
    /// # Errors
    /// As there.
    pub fn world(mut self, world: &World) -> Result<Self> {
        if world.size() > 1 {
            join(world, mirror::named(&self.store))?;
            self.world = Some(world.clone());
            return self.set(MicroBatcher::measure_no_layout);
        }
        Ok(self)
    }

    fn set(self, f: impl Fn(&mut MicroBatcher) + Clone + Send + 'static) -> Result<Self> {
        self.crew.all(move |replica| {
            replica.set(&f);
            Ok(())
        })?;
        Ok(self)
    }
}
