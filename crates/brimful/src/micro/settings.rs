//! Settings of a `MicroBatcher`.

use std::error::Error as StdError;
use std::path::Path;
use std::time::Duration;

use super::graphs::{MicroGraphs, report};
use super::{MemoryFormat, MicroBatcher};
use crate::accumulate::parameters;
use crate::memory::Memory;
use crate::memory_format::FormatChoice;
use crate::step::{MicroBatches, NonFinitePolicy, Team, names};
use crate::update::Method;
use crate::world::World;
use crate::{Error, Result, retry_on_oom};

impl MicroBatcher {
    /// Runs every step inside this memory, and reports the peak memory of each step.
    pub fn memory(mut self, memory: Memory) -> Self {
        self.memory = Some(memory);
        self
    }

    /// Sets the policy for non-finite losses and gradients.
    pub fn non_finite(mut self, policy: NonFinitePolicy) -> Self {
        self.state.non_finite = policy;
        self
    }

    /// Captures one micro-batch of each shape as a CUDA graph, and replays the graph for later micro-batches: one
    /// launch replaces thousands, so that small micro-batches are as fast as large ones. The first three
    /// micro-batches of a shape run eagerly. The third is also captured, and its replay is compared with the eager
    /// run.
    ///
    /// A replay does not call the closure, so the closure must do the same work each time:
    ///
    /// - the shapes, and the tensors that it uses besides the micro-batch, stay the same;
    /// - it reads nothing from the device (`double_value`, `nonzero`, an `if` on a tensor's value);
    /// - it changes nothing but tensors on the device: no counter, no log, no changing number on the host;
    /// - it draws random numbers on the device only, as dropout does there;
    /// - its backward reaches no leaf but the store's parameters;
    /// - it is passed by its own type, because a trait object or a function pointer may stand for several
    ///   closures.
    ///
    /// Work that cannot be captured is detected and runs eagerly; on a CPU, all work runs eagerly. The log reports
    /// the cause once, and [`MicroBatcher::eager_cause`] returns it.
    ///
    /// In the two steps after a capture, and ever more rarely later (in the end every 256th step), one micro-batch
    /// also runs eagerly, and its replay is compared with the eager run. If the closure has changed by then, the
    /// step reruns eagerly and the graph is dropped. The log reports as an error what changed and how many steps
    /// may have replayed the old work.
    pub fn cuda_graphs(mut self, wanted: bool) -> Self {
        self.set_cuda_graphs(wanted);
        self
    }

    /// Returns the reason why micro-batches run eagerly although [`MicroBatcher::cuda_graphs`] was requested;
    /// `None` if there is no such reason.
    pub fn eager_cause(&self) -> Option<&str> {
        let known = self.graphs.as_ref().and_then(|graphs| graphs.cause.as_deref());
        known.or(self.eager_cause.as_deref())
    }

    /// Sets the memory format of images and convolutions. Formats other than [`MemoryFormat::AsIs`] change the
    /// strides of inputs and of parameters of four or five dimensions, so a closure must not `view` across
    /// them. With [`MemoryFormat::Measured`], a closure with such a `view` stays in the user's format. In a
    /// [world](MicroBatcher::join) no format is measured.
    pub fn memory_format(mut self, memory_format: MemoryFormat) -> Self {
        self.set_memory_format(memory_format);
        self
    }

    /// Returns whether the memory format is channels last now.
    pub fn is_channels_last(&self) -> bool {
        self.format_choice.as_ref().is_some_and(FormatChoice::is_channels_last)
    }

    /// Reserves memory for the state that an optimizer allocates at its first step. The reservation ends with the
    /// first step of this `MicroBatcher`. The optimizer is [`Sgd`](crate::optim::Sgd),
    /// [`Adam`](crate::optim::Adam), [`AdamW`](crate::optim::AdamW), or an equivalent one of another library. The
    /// variables must exist by now.
    pub fn reserve(mut self, method: impl Into<Method>) -> Self {
        let bytes = method.into().state_bytes(&parameters(&self.variables));
        self.state.reserved = vec![bytes];
        self
    }

    /// Reads automatic sizes that an earlier run has found for this model on this device, and writes the sizes
    /// that this run finds to the same file. A file that cannot be used is left unchanged, and a warning is
    /// logged.
    pub fn remember(mut self, path: impl AsRef<Path>) -> Self {
        self.state.remember(path.as_ref());
        self
    }

    /// Trains together with the other ranks of a world. Each rank passes its own part of every mini-batch, or an
    /// empty one. After a step, every rank has the gradient, the loss and the statistics of all parts together.
    /// Statistics that move at every micro-batch are those of the first rank that has a sample. The variables must
    /// exist by now; every rank gets the values of the first rank's variables.
    ///
    /// All ranks make the same calls in the same order. A step that fails on one rank fails on all ranks, with an
    /// error that names the failed rank. All ranks use the same automatic size. Each step, rank and micro-batch
    /// has its own random numbers, derived from the first rank's seed. [`MicroBatcher::map`] and
    /// [`MicroBatcher::accumulate`] run on each rank by itself, until [`MicroBatcher::commit`].
    /// [`MicroBatcher::backward_whole`] needs all samples in one process, and fails.
    ///
    /// # Errors
    /// When the ranks have different models, or one is lost.
    pub fn join(mut self, world: &World) -> Result<Self> {
        if world.size() > 1 {
            names(&self.variables).join(world)?;
            self.measure_no_format();
            self.state.team = Team { world: world.clone(), replicas: world.size() };
        }
        Ok(self)
    }

    /// Returns how mini-batches are cut.
    pub fn micro_batches(&self) -> MicroBatches {
        self.state.size
    }

    /// Sets how mini-batches are cut from now on.
    pub fn set_micro_batches(&mut self, micro_batches: MicroBatches) {
        self.state.set_size(micro_batches);
    }

    /// Runs work outside forward and backward, such as an optimizer's step, in this memory: see
    /// [`retry_on_oom`](crate::retry_on_oom()).
    ///
    /// # Errors
    /// As for [`retry_on_oom`](crate::retry_on_oom()).
    pub fn retry_on_oom<T, E>(&self, mut f: impl FnMut() -> Result<T, E>) -> Result<T>
    where
        E: Into<Box<dyn StdError + Send + Sync>>,
    {
        match &self.memory {
            Some(memory) => retry_on_oom(memory, f),
            None => f().map_err(Error::of_closure),
        }
    }

    pub(crate) fn set_cuda_graphs(&mut self, wanted: bool) {
        match (wanted, self.graphs.take()) {
            (true, Some(graphs)) => self.graphs = Some(graphs),
            (true, None) => match MicroGraphs::check_available(self.device) {
                Ok(()) => {
                    let cause = self.eager_cause.take();
                    self.graphs = Some(Box::new(MicroGraphs::new(self.device, cause)));
                }
                Err(cause) => report(&mut self.eager_cause, cause),
            },
            (false, Some(mut graphs)) => {
                self.eager_cause = graphs.cause.take();
                // The graphs' memory is freed even if this call fails. The next step then fails with the cause.
                let _ = graphs.clear();
            }
            (false, None) => {}
        }
    }

    pub(crate) fn set_memory_format(&mut self, memory_format: MemoryFormat) {
        self.format_choice = FormatChoice::wanted(memory_format);
        if !self.state.team.is_alone() {
            self.measure_no_format();
        }
    }

    /// Stops measuring memory formats, because ranks might find different formats faster. The current format
    /// stays.
    pub(crate) fn measure_no_format(&mut self) {
        self.format_choice.take_if(|choice| choice.is_measured());
    }

    /// Learns from a step which memory format is faster.
    pub(crate) fn learn_format(&mut self, samples: usize, time: Duration) {
        let Some(choice) = &mut self.format_choice else { return };
        let new = self.graphs.as_ref().is_some_and(|graphs| graphs.new);
        if let Some(factor) = choice.observe(samples, time, new) {
            self.state.sizes.rearranged(factor);
        }
    }

    /// Returns whether the memory format is on trial.
    pub(crate) fn is_on_trial(&self) -> bool {
        self.format_choice.as_ref().is_some_and(FormatChoice::is_on_trial)
    }

    /// Converts the parameters to the current memory format, unless an accumulation window is open.
    pub(super) fn convert(&mut self) -> Result<()> {
        match (&self.state.window, &mut self.format_choice) {
            (None, Some(choice)) => choice.begin(&parameters(&self.variables)),
            // A window's sums have the memory format that the parameters had when it began.
            _ => Ok(()),
        }
    }
}
