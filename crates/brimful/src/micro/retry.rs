//! Runs a mini-batch with an automatic size: again, in smaller micro-batches, where memory ran out.

use std::error::Error as StdError;
use std::path::Path;
use std::sync::PoisonError;

use super::cut::Cut;
use super::watch::Watch;
use super::{MicroBatcher, Size, gradient_bytes, state_bytes};
use crate::auto::{Identity, Kind, Story, Use};
use crate::batch::{self, Batch};
use crate::bytes::Bytes;
use crate::memory::{self, Arena, Memory};
use crate::optim::Method;
use crate::{Error, Result, device, guard};

impl MicroBatcher {
    /// Keeps memory for the state that an optimizer makes at its first step, until the first step
    /// of this `MicroBatcher` is over: by [`Sgd`](crate::optim::Sgd), [`Adam`](crate::optim::Adam)
    /// or [`AdamW`](crate::optim::AdamW), or what is their like elsewhere.
    pub fn reserve(mut self, method: impl Into<Method>) -> Self {
        self.reserved = state_bytes(&self.variables, method.into());
        self
    }

    /// Reads automatic sizes that an earlier run has found for this model on this device, and
    /// writes there what is found now. The variables must have been made by now.
    ///
    /// # Errors
    /// When the memory does not answer. A file that cannot be used is left as it is, with a warning.
    pub fn remember(mut self, path: impl AsRef<Path>) -> Result<Self> {
        let memory = memory::end_of(self.memory.as_ref())?;
        let identity = {
            let variables = self.variables.lock().unwrap_or_else(PoisonError::into_inner);
            let goal = format!("{:?}", self.size);
            Identity::new(&variables, device::name(self.device), memory.0, goal)
        };
        self.sizes.remember(path.as_ref().to_owned(), identity);
        Ok(self)
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

    /// Runs a mini-batch as the size says: `run` is called until memory suffices.
    pub(super) fn sized<B: Batch, T>(
        &mut self,
        used: Use,
        batch: &B,
        mut run: impl FnMut(&mut Self, &mut Cut) -> Result<T>,
    ) -> Result<(T, Story)> {
        self.in_order(|this| this.sized_once(used, batch, &mut run))
    }

    fn sized_once<B: Batch, T>(
        &mut self,
        used: Use,
        batch: &B,
        mut run: impl FnMut(&mut Self, &mut Cut) -> Result<T>,
    ) -> Result<(T, Story)> {
        let samples = batch::len(batch)?;
        if let Some(ranges) = self.size.cut(samples)? {
            return Ok((run(self, &mut Cut::given(ranges))?, Story::default()));
        }
        let unlimited = || Memory::Arena(Arena::new("cpu"));
        let memory = self.memory.get_or_insert_with(unlimited).clone();
        self.retried(&memory, Kind::of(used, batch), samples, run)
    }

    fn retried<T>(
        &mut self,
        memory: &Memory,
        kind: Kind,
        samples: usize,
        mut run: impl FnMut(&mut Self, &mut Cut) -> Result<T>,
    ) -> Result<(T, Story)> {
        let mut story = Story::default();
        loop {
            let variables = &self.variables;
            let floor = || if kind.is_training() { gradient_bytes(variables) } else { 0 };
            let mut sizer = self.sizes.take(&kind, || vec![floor()]);
            sizer.hold(self.arrangement.is_measuring());
            // Each shape is captured by itself, and keeps memory for that.
            sizer.even(self.replay.is_wanted());
            let reserved = self.reserved(&kind, memory)?;
            let rehearses = kind.is_training() && sizer.is_blank();
            let watch = Watch::new(sizer, memory, reserved)?.rehearsing(rehearses);
            let mut cut = Cut::watched(samples, watch);
            let result = run(self, &mut cut);
            let Some(mut watch) = cut.into_watch() else { return Ok((result?, story)) };
            let ended = match result {
                Err(Error::OutOfMemory(oom)) => {
                    self.replay.clear()?;
                    memory.empty_cache()?;
                    watch.failed()?;
                    let decisions = std::mem::take(&mut watch.decisions);
                    if decisions.is_empty() {
                        tracing::warn!(
                            %oom,
                            "memory ran out before the first micro-batch: the mini-batch is run again"
                        );
                    }
                    story.failed(decisions, &watch.sizer, &[watch.room()], oom).map(|()| None)
                }
                Ok(value) => {
                    self.calm_end(&mut watch)?;
                    story.decisions.append(&mut watch.decisions);
                    Ok(Some(value))
                }
                Err(Error::Rehearsed) => {
                    story.decisions.append(&mut watch.decisions);
                    Ok(None)
                }
                Err(other) => Err(other),
            };
            self.sizes.put(kind.clone(), watch.sizer);
            if let Some(value) = ended? {
                return Ok((value, story));
            }
        }
    }

    /// Bytes that a step is not to plan with. Captured work gives way to training, but not to anything
    /// else.
    fn reserved(&self, kind: &Kind, memory: &Memory) -> Result<u64> {
        let for_captures = match (kind.is_training(), memory.usage()?.available) {
            (false, _) => self.replay.kept(),
            (true, Some(available)) if self.size == Size::Auto => self.replay.spare(available),
            (true, _) => Bytes(0),
        };
        Ok(self.reserved + for_captures.0)
    }

    /// Takes note of a success, and of what it hides.
    fn calm_end(&mut self, watch: &mut Watch) -> Result<()> {
        let ending = watch.succeeded(self.replay.is_new())?;
        if ending.retried && watch.size() == 1 {
            tracing::warn!(
                "the allocator emptied its cache to run a single sample: the memory is nearly full"
            );
        }
        if ending.hidden && !std::mem::replace(&mut self.told_of_hidden, true) {
            tracing::warn!(
                "memory ran out within a step that went on all the same: if the closure catches \
                 errors, let it pass out-of-memory on, because its result may be wrong"
            );
        }
        Ok(())
    }
}
