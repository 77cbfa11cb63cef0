//! The micro-batched step on one device: split, stream in, forward, backward, accumulate.
//!
//! ```
//! use brimful::{Loss, MicroBatcher, Size};
//! use tch::nn::{self, ModuleT, OptimizerConfig};
//! use tch::{Device, Kind, Tensor};
//!
//! let store = nn::VarStore::new(Device::Cpu);
//! let model = nn::seq_t().add(nn::linear(store.root(), 8, 3, Default::default()));
//! let mut optimizer = nn::Sgd::default().build(&store, 0.1)?;
//! let mut micro = MicroBatcher::new(&store, Size::Fixed(16));
//!
//! let batch = (
//!     Tensor::randn([65, 8], (Kind::Float, Device::Cpu)),
//!     Tensor::randint(3, [65], (Kind::Int64, Device::Cpu)),
//! );
//! let step = micro.backward(&batch, |(x, y)| {
//!     Loss::mean(model.forward_t(&x, true).cross_entropy_for_logits(&y))
//! })?; // gradients now equal the full batch's
//! optimizer.step();
//! optimizer.zero_grad();
//! assert_eq!(step.sizes, [13, 13, 13, 13, 13]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub(crate) mod attempt;
pub(crate) mod foreign;
mod outcome;
pub(crate) mod tally;
mod whole;

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tch::nn::{VarStore, Variables};
use tch::{Device, Tensor};

use crate::accumulate::Sums;
use crate::batch::{self, Batch};
use crate::bytes::Bytes;
use crate::memory::Memory;
use crate::{Error, Result, feed, split};

use attempt::{Scale, Undo, part, samples};
pub use outcome::Outcome;
use tally::{Group, Tally};

/// How a mini-batch is cut into micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Size {
    /// At most so many samples each.
    Fixed(usize),
    /// So many micro-batches, or one a sample where there are fewer.
    Count(usize),
}

/// What is refused because it is not a finite number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NonFinite {
    /// A loss. It is read at the end of the step anyway, so this costs nothing.
    #[default]
    RefuseLoss,
    /// A loss or a gradient: one more pass over the gradients for each micro-batch.
    RefuseGradients,
    /// Nothing.
    Allow,
}

/// Runs mini-batches through one device in micro-batches, with exactly the full batch's gradient.
#[derive(Debug)]
pub struct MicroBatcher {
    variables: Arc<Mutex<Variables>>,
    device: Device,
    size: Size,
    memory: Option<Memory>,
    non_finite: NonFinite,
    window: Option<Window>,
    foreign: foreign::Search,
}

/// What one step did.
#[derive(Debug)]
#[non_exhaustive]
pub struct Step<O = ()> {
    /// The mini-batch's loss.
    pub loss: f64,
    /// The loss's terms, in the order in which they were added, each with its factor.
    pub terms: Vec<f64>,
    /// Samples in the mini-batch.
    pub samples: usize,
    /// Samples in each micro-batch.
    pub sizes: Vec<usize>,
    /// The closure's outputs, joined in sample order.
    pub outputs: O,
    /// How long it took on the host, the reading of the loss included.
    pub time: Duration,
    /// The most memory in use at one moment, where it is counted: on an accelerator, or in an arena
    /// that was given.
    pub peak: Option<Bytes>,
}

/// Mini-batches that have been run but not committed.
#[derive(Debug)]
struct Window {
    sums: Sums,
    tally: Tally,
    groups: Vec<Group>,
    undo: Undo,
    /// See [`crate::loss::Part::unit`].
    unit: f64,
    sizes: Vec<usize>,
}

impl MicroBatcher {
    /// For the variables of this store, which may still grow, on its device.
    pub fn new(store: &VarStore, size: Size) -> Self {
        let device = store.device();
        let memory = (device != Device::Cpu).then_some(Memory::Accelerator(device));
        Self {
            variables: store.variables_.clone(),
            device,
            size,
            memory,
            non_finite: NonFinite::default(),
            window: None,
            foreign: foreign::Search::default(),
        }
    }

    /// Runs every step inside this memory, and reports its peak.
    pub fn memory(mut self, memory: Memory) -> Self {
        self.memory = Some(memory);
        self
    }

    /// Says what is refused because it is not finite.
    pub fn non_finite(mut self, policy: NonFinite) -> Self {
        self.non_finite = policy;
        self
    }

    /// Runs forward and backward, and adds to the parameters' gradients exactly what the full batch
    /// would have added.
    ///
    /// The closure gets each micro-batch on the device and returns its [`Loss`](crate::Loss), or a
    /// pair of the loss and outputs, or a `Result` of one of them.
    ///
    /// # Errors
    /// Whatever fails, gradients, BatchNorm statistics and random state are as before. A panic of
    /// the closure that is not out-of-memory goes on after they have been put back.
    pub fn backward<B: Batch, R: Outcome>(
        &mut self,
        batch: &B,
        f: impl FnMut(B) -> R,
    ) -> Result<Step<R::Outputs>> {
        self.check_no_window()?;
        let start = Instant::now();
        let ranges = self.ranges(batch::len(batch)?)?;
        let unit = samples(&ranges);
        let attempt = self.attempt(batch, &ranges, Scale { unit, last: true }, f)?;
        let (window, outputs) = attempt.into_window(unit, &ranges);
        Ok(self.settle(window, start)?.with_outputs(outputs))
    }

    /// Runs forward and backward, and keeps the result for [`MicroBatcher::commit`]: a step over
    /// several mini-batches, each of which may have its own length.
    ///
    /// # Errors
    /// As [`MicroBatcher::backward`]; the mini-batches before are kept.
    pub fn accumulate<B: Batch, R: Outcome>(
        &mut self,
        batch: &B,
        f: impl FnMut(B) -> R,
    ) -> Result<R::Outputs> {
        let ranges = self.ranges(batch::len(batch)?)?;
        let unit = self.window.as_ref().map_or(samples(&ranges), |window| window.unit);
        let attempt = self.attempt(batch, &ranges, Scale { unit, last: false }, f)?;
        let (later, outputs) = attempt.into_window(unit, &ranges);
        match &mut self.window {
            None => self.window = Some(later),
            Some(window) => window.extend(later)?,
        }
        Ok(outputs)
    }

    /// Adds the gradients of all mini-batches since the last commit, as if they had been one.
    ///
    /// # Errors
    /// When there is none; when a denominator is 0 or the loss is not finite: then all of them are
    /// forgotten, and gradients, statistics and random state are as before the first.
    pub fn commit(&mut self) -> Result<Step> {
        let window = self.window.take().ok_or(Error::NothingAccumulated)?;
        self.settle(window, Instant::now())
    }

    /// Runs `f` on every micro-batch without gradients, and joins what it returns in sample order.
    ///
    /// # Errors
    /// When a micro-batch fails; random state is then as before.
    pub fn map<B: Batch, O: Batch>(&mut self, batch: &B, mut f: impl FnMut(B) -> O) -> Result<O> {
        let ranges = self.ranges(batch::len(batch)?)?;
        let (outputs, undo) = self.guarded(ranges.len(), |this| {
            let _without = tch::no_grad_guard();
            let mut outputs = Vec::with_capacity(ranges.len());
            feed::each(batch, &ranges, this.device, |_, micro_batch| {
                outputs.push(f(micro_batch));
                Ok(())
            })?;
            batch::join(outputs)
        })?;
        undo.keep()?;
        Ok(outputs)
    }

    /// Runs `f` on every micro-batch without gradients, and gives the mini-batch's loss and outputs.
    ///
    /// # Errors
    /// When a micro-batch fails; random state is then as before.
    pub fn evaluate<B: Batch, R: Outcome>(
        &mut self,
        batch: &B,
        mut f: impl FnMut(B) -> R,
    ) -> Result<Step<R::Outputs>> {
        let start = Instant::now();
        let ranges = self.ranges(batch::len(batch)?)?;
        let unit = samples(&ranges);
        let ((totals, outputs), undo) = self.guarded(ranges.len(), |this| {
            let _without = tch::no_grad_guard();
            let (mut tally, mut outputs) = (Tally::default(), Vec::with_capacity(ranges.len()));
            feed::each(batch, &ranges, this.device, |i, micro_batch| {
                let (loss, output) = f(micro_batch).into_parts()?;
                tally.count(&loss.into_terms(false)?, &part(&ranges, i, unit, true))?;
                outputs.push(output);
                Ok(())
            })?;
            Ok((tally.read(this.non_finite)?, batch::join(outputs)?))
        })?;
        undo.keep()?;
        let step = self.report(totals.loss, totals.terms, lengths(&ranges), start)?;
        Ok(step.with_outputs(outputs))
    }

    /// A whole step has no place between the parts of another.
    fn check_no_window(&self) -> Result<()> {
        match &self.window {
            Some(window) => Err(Error::WindowOpen { samples: window.sizes.iter().sum() }),
            None => Ok(()),
        }
    }

    /// Cuts the mini-batch.
    fn ranges(&self, samples: usize) -> Result<Vec<Range<usize>>> {
        match self.size {
            Size::Fixed(size) => split::by_size(samples, size),
            Size::Count(count) => split::by_count(samples, count),
        }
    }

    /// Reads the loss, and commits gradients and statistics if all is well; else undoes all.
    fn settle(&mut self, window: Window, start: Instant) -> Result<Step> {
        let _inside = self.memory.as_ref().and_then(Memory::enter);
        let Window { sums, tally, groups, mut undo, unit, sizes } = window;
        let total = sizes.iter().sum::<usize>() as f64;
        let committed = tally.read(self.non_finite).and_then(|totals| {
            let moved = undo.statistics.prepare()?;
            let groups = attempt::distinct(&groups).into_iter();
            let factors: Vec<f64> = groups.map(|g| totals.factor(g, unit, total)).collect();
            sums.commit(&mut self.parameters(), &factors)?;
            moved.apply()?;
            Ok(totals)
        });
        match committed {
            Ok(totals) => self.report(totals.loss, totals.terms, sizes, start),
            Err(error) => {
                undo.run()?;
                Err(error)
            }
        }
    }

    fn report(
        &self,
        loss: f64,
        terms: Vec<f64>,
        sizes: Vec<usize>,
        start: Instant,
    ) -> Result<Step> {
        let peak = self.memory.as_ref().map(|memory| Ok::<_, Error>(memory.usage()?.peak));
        let (samples, peak) = (sizes.iter().sum(), peak.transpose()?);
        Ok(Step { loss, terms, samples, sizes, outputs: (), time: start.elapsed(), peak })
    }

    fn parameters(&self) -> Vec<Tensor> {
        let variables = self.variables.lock().unwrap_or_else(PoisonError::into_inner);
        let all = variables.trainable_variables.iter().map(|variable| &variable.tensor);
        all.filter(|tensor| tensor.requires_grad()).map(Tensor::shallow_clone).collect()
    }
}

impl Window {
    /// Adds a later mini-batch; where there is no memory for that, it is as if it had not been run.
    fn extend(&mut self, mut later: Self) -> Result<()> {
        if let Err(error) = later.undo.statistics.pool() {
            later.undo.run()?;
            return Err(error);
        }
        self.undo.extend(later.undo);
        self.sums.extend(later.sums)?;
        self.tally.extend(later.tally);
        self.sizes.extend(later.sizes);
        Ok(())
    }
}

impl Step {
    fn with_outputs<O>(self, outputs: O) -> Step<O> {
        let Self { loss, terms, samples, sizes, outputs: (), time, peak } = self;
        Step { loss, terms, samples, sizes, outputs, time, peak }
    }
}

fn lengths(ranges: &[Range<usize>]) -> Vec<usize> {
    ranges.iter().map(ExactSizeIterator::len).collect()
}
