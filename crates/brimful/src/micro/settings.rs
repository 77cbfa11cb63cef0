//! How a `MicroBatcher` is to run.

use std::error::Error as StdError;
use std::path::Path;
use std::time::Duration;

use super::{Layout, MicroBatcher};
use crate::layout::{Arrangement, InOrder};
use crate::memory::Memory;
use crate::optim::Method;
use crate::step::{NonFinite, Size, Team, names, parameters};
use crate::world::World;
use crate::{Error, Result, guard};

impl MicroBatcher {
    /// Runs every step inside this memory, and reports its peak.
    pub fn memory(mut self, memory: Memory) -> Self {
        self.memory = Some(memory);
        self
    }

    /// Says what is refused because it is not finite.
    pub fn non_finite(mut self, policy: NonFinite) -> Self {
        self.state.non_finite = policy;
        self
    }

    /// On CUDA, captures micro-batches of each shape once and replays them: a single launch where
    /// there were thousands, so that small micro-batches are as fast as large ones. The first three
    /// of a shape run as ever, and the third is compared with a replay of it.
    ///
    /// The closure is then not called for every micro-batch, so it must do the same each time:
    ///
    /// - the shapes, and the tensors that it uses besides the micro-batch, stay the same;
    /// - it reads nothing from the device (`double_value`, `nonzero`, an `if` on a tensor's value);
    /// - it changes nothing but tensors of the device: no counter, no log, no number of the host that
    ///   changes;
    /// - it draws random numbers on the device alone, as dropout does there;
    /// - its backward reaches no leaf but the store's parameters;
    /// - its type is its own: trait objects and pointers to functions stand for many closures.
    ///
    /// What cannot be captured is noticed, said once with the cause in the log and by
    /// [`MicroBatcher::eager_cause`], and runs eagerly, as everything does on a CPU.
    ///
    /// In the two steps after a capture, and ever more rarely later (every 256th step in the end), one
    /// micro-batch is run eagerly too and compared. Where the closure does something else by then, the
    /// step is run again eagerly, the capture is given up, and the log says as an error what changed
    /// and how many steps may have been replayed with what was before.
    pub fn replay(mut self, wanted: bool) -> Self {
        self.set_replay(wanted);
        self
    }

    /// Why micro-batches run eagerly although [`MicroBatcher::replay`] was asked for; `None` where
    /// nothing stands in the way.
    pub fn eager_cause(&self) -> Option<&str> {
        self.replay.cause.as_deref()
    }

    /// Says in which order images and convolutions are to be in memory. Others than
    /// [`Layout::AsIs`] change the strides of inputs and of parameters of four or five dimensions,
    /// so that a closure must not ask for a `view` across them; one that does is run as before. In a
    /// [world](MicroBatcher::world) nothing is measured.
    pub fn layout(mut self, layout: Layout) -> Self {
        self.set_layout(layout);
        self
    }

    /// Whether channels are last in memory now.
    pub fn is_channels_last(&self) -> bool {
        self.arrangement.is_channels_last()
    }

    /// Keeps memory for the state that an optimizer makes at its first step, until the first step
    /// of this `MicroBatcher` is over: by [`Sgd`](crate::optim::Sgd), [`Adam`](crate::optim::Adam)
    /// or [`AdamW`](crate::optim::AdamW), or what is their like elsewhere. The variables must have
    /// been made by now.
    pub fn reserve(mut self, method: impl Into<Method>) -> Self {
        let bytes = method.into().state_bytes(&parameters(&self.variables));
        self.state.reserved = vec![bytes];
        self
    }

    /// Reads automatic sizes that an earlier run has found for this model on this device, and
    /// writes there what is found now. A file that cannot be used is left as it is, with a warning.
    pub fn remember(mut self, path: impl AsRef<Path>) -> Self {
        self.state.remember(path.as_ref());
        self
    }

    /// Trains together with the other ranks of a world, each of which gives its own part of every
    /// mini-batch, or an empty one: a step leaves on all of them the gradient, the loss and the
    /// statistics of all parts together; statistics that move at every micro-batch are those of the first rank
    /// that has a sample. The variables must have been made by now; all ranks get the first one's values.
    ///
    /// All ranks make the same calls in the same order. A step in which anything fails on one of
    /// them has failed on all, with an error that names it. An automatic size is the same for all.
    /// Random numbers belong to a step, a rank and a micro-batch, from the first rank's seed.
    /// [`MicroBatcher::map`] and [`MicroBatcher::accumulate`] are each rank's own matter, until
    /// [`MicroBatcher::commit`]; [`MicroBatcher::backward_whole`] needs all samples in one process,
    /// and is refused.
    ///
    /// # Errors
    /// When the ranks have different models, or one is lost.
    pub fn world(mut self, world: &World) -> Result<Self> {
        if world.size() > 1 {
            names(&self.variables).join(world)?;
            self.measure_no_layout();
            self.state.team = Team { world: world.clone(), replicas: world.size() };
        }
        Ok(self)
    }

    /// How mini-batches are cut.
    pub fn size(&self) -> Size {
        self.state.size
    }

    /// How mini-batches are cut from now on.
    pub fn set_size(&mut self, size: Size) {
        self.state.set_size(size);
    }

    /// Runs what is outside forward and backward, such as an optimizer's step, in this memory: see
    /// [`guard`](crate::guard()).
    ///
    /// # Errors
    /// As there.
    pub fn guard<T, E>(&self, mut f: impl FnMut() -> Result<T, E>) -> Result<T>
    where
        E: Into<Box<dyn StdError + Send + Sync>>,
    {
        match &self.memory {
            Some(memory) => guard(memory, f),
            None => f().map_err(Error::of_closure),
        }
    }

    pub(crate) fn set_replay(&mut self, wanted: bool) {
        self.replay.set(wanted);
    }

    pub(crate) fn set_layout(&mut self, layout: Layout) {
        self.arrangement = Arrangement::new(layout);
        if !self.state.team.is_alone() {
            self.measure_no_layout();
        }
    }

    /// Leaves the order in memory as it is, if it was to be measured: which one is faster would be
    /// another on each rank.
    pub(crate) fn measure_no_layout(&mut self) {
        if self.arrangement.is_measured() {
            self.arrangement = Arrangement::default();
        }
    }

    /// Learns from a step which order in memory is the faster.
    pub(crate) fn learn_order(&mut self, samples: usize, time: Duration) {
        if let Some(factor) = self.arrangement.observe(samples, time, self.replay.new) {
            self.state.sizes.rearranged(factor);
        }
    }
}

impl InOrder for MicroBatcher {
    fn arrangement(&mut self) -> &mut Arrangement {
        &mut self.arrangement
    }

    fn lay_out(&mut self) -> Result<()> {
        match &self.state.window {
            // Its sums lie in memory as the parameters did when it began.
            Some(_) => Ok(()),
            None => self.arrangement.begin(&parameters(&self.variables)),
        }
    }
}
