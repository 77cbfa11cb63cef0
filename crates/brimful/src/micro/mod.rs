//! The micro-batched step on one device: split, stream in, forward, backward, accumulate.
//!
//! ```
//! use brimful::{Loss, MicroBatcher, MicroBatches};
//! use tch::nn::{self, ModuleT, OptimizerConfig};
//! use tch::{Device, Kind, Tensor};
//!
//! let store = nn::VarStore::new(Device::Cpu);
//! let model = nn::seq_t().add(nn::linear(store.root(), 8, 3, Default::default()));
//! let mut optimizer = nn::Sgd::default().build(&store, 0.1)?;
//! let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(16));
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

mod attempt;
mod evaluate;
mod graphs;
mod pass;
mod settings;
mod whole;

use std::sync::{Arc, Mutex};
use std::time::Instant;

use tch::nn::{VarStore, Variables};
use tch::{Device, Tensor};

pub use crate::memory_format::MemoryFormat;

use crate::accumulate::parameters;
use crate::auto::{Kind, Use};
use crate::batch::{self, Arranged, Batch};
use crate::loss::IntoLoss;
use crate::memory::{Arena, Memory};
use crate::memory_format::FormatChoice;
use crate::step::{
    self, AttemptContext, BatchRole, Ending, Engine, Hints, MicroBatches, Parts, PartsEngine,
    Seeding, StepReport, StepRequest, StepState, Team, Trained, UnmanagedStatistics,
    gradient_bytes, names,
};
use crate::streams::CopyStreams;
use crate::{Error, Result, device};
pub(crate) use attempt::{AttemptSettings, identity};
use brimful_plan::bytes::Bytes;
use graphs::MicroGraphs;

/// Runs mini-batches through one device in micro-batches, with exactly the full batch's gradient.
#[derive(Debug)]
pub struct MicroBatcher {
    variables: Arc<Mutex<Variables>>,
    device: Device,
    /// Copy streams of micro-batches to the device.
    copy_streams: CopyStreams,
    memory: Option<Memory>,
    unmanaged: UnmanagedStatistics,
    /// CUDA graphs; `None` unless they are wanted and available.
    graphs: Option<Box<MicroGraphs>>,
    /// Reason why micro-batches run eagerly although CUDA graphs were requested; kept here while `graphs` is
    /// `None`.
    eager_cause: Option<String>,
    /// Memory format; `None` for the user's own.
    format_choice: Option<FormatChoice>,
    state: StepState<Parts>,
}

impl MicroBatcher {
    /// Creates a micro-batcher for the variables of this store, which may still grow, on its device.
    pub fn new(store: &VarStore, size: MicroBatches) -> Self {
        let device = store.device();
        Self {
            variables: store.variables_.clone(),
            device,
            copy_streams: CopyStreams::new(device),
            memory: (device != Device::Cpu).then_some(Memory::Accelerator(device)),
            unmanaged: UnmanagedStatistics::default(),
            graphs: None,
            eager_cause: None,
            format_choice: None,
            state: StepState::new(size),
        }
    }

    /// Runs forward and backward, and adds to the parameters' gradients exactly what the full batch
    /// would have added.
    ///
    /// The closure receives each micro-batch on the device and returns its [`Loss`](crate::Loss), or a
    /// pair of the loss and outputs, or a `Result` of one of them.
    ///
    /// # Errors
    /// After any failure, gradients, BatchNorm statistics and random state are as they were before the call. Once
    /// they are restored, a panic of the closure resumes, unless it reports out-of-memory.
    pub fn backward<B: Batch, R: IntoLoss>(
        &mut self,
        batch: &B,
        mut f: impl FnMut(B) -> R,
    ) -> Result<StepReport<R::Outputs>> {
        let arranged = Arranged::of(batch);
        let request = StepRequest::new(Use::Train, &arranged);
        let step = step::run(self, request, Ending::Commit, |this, context| {
            let start = Instant::now();
            let AttemptContext { cut, handshake, exchange } = context;
            let how = this.settings(handshake, exchange, true, &f);
            let ran = this.attempt(arranged.batch(), cut, &how, &mut f);
            this.only_part(start, ran)
        })?;
        // Measured over whole steps: a memory format also affects the backward and the cost of conversion.
        self.learn_format(step.samples, step.time);
        Ok(step)
    }

    /// Runs forward and backward, and keeps the result for [`MicroBatcher::commit`]. All mini-batches between two
    /// commits make one step, and may differ in length.
    ///
    /// # Errors
    /// As [`MicroBatcher::backward`]; earlier mini-batches are kept.
    pub fn accumulate<B: Batch, R: IntoLoss>(
        &mut self,
        batch: &B,
        mut f: impl FnMut(B) -> R,
    ) -> Result<R::Outputs> {
        let start = Instant::now();
        let is_first = self.state.window.is_none();
        let arranged = Arranged::of(batch);
        let request = StepRequest::new(Use::Train, &arranged);
        let step = step::run(self, request, Ending::Keep, |this, context| {
            let start = Instant::now();
            let AttemptContext { cut, handshake, exchange } = context;
            let how = this.settings(handshake, exchange, false, &f);
            let ran = this.attempt(arranged.batch(), cut, &how, &mut f);
            this.only_part(start, ran)
        })?;
        // The memory format changes only between windows, so the first mini-batch of a window gives the speed of
        // its format.
        if is_first {
            self.learn_format(batch::len(batch)?, start.elapsed());
        }
        Ok(step.outputs)
    }

    /// Commits the gradients of all mini-batches since the last commit, as if they had been one mini-batch.
    ///
    /// # Errors
    /// When no mini-batch was accumulated. When parameters were frozen or thawed since the first mini-batch; all
    /// mini-batches are then kept, unless there are other ranks. When a denominator is 0 or the loss is not
    /// finite; all mini-batches are then dropped, and gradients, statistics and random state are as they were
    /// before the first mini-batch.
    pub fn commit(&mut self) -> Result<StepReport> {
        step::commit(self)
    }
}

impl Engine for MicroBatcher {
    type Attempt = Parts;

    fn state(&mut self) -> &mut StepState<Parts> {
        &mut self.state
    }

    fn seeding(&self, team: &Team) -> Seeding {
        match team.is_alone() {
            // Draws random numbers as a plain loop does, so that training without this library draws the same
            // ones.
            true => Seeding::Plain,
            false => Seeding::Step(vec![self.device]),
        }
    }

    fn trained(&mut self) -> Result<Option<Trained>> {
        Ok(Some(Trained::of(&parameters(&self.variables), &names(&self.variables))))
    }

    fn runs_in_pieces(&self, kind: &Kind) -> bool {
        // `backward_whole` cuts the whole mini-batch at once, before the memory need of any piece is known.
        kind.used != Use::TrainWhole
    }

    fn memories(&mut self) -> Vec<Option<Memory>> {
        // An automatic size is learnt from the memory in use, which on a CPU only an arena counts.
        let memory = self.memory.get_or_insert_with(|| Memory::Arena(Arena::new("cpu")));
        vec![Some(memory.clone())]
    }

    fn floors(&mut self, kind: &Kind) -> Result<Vec<u64>> {
        Ok(vec![if kind.is_training() { gradient_bytes(&self.variables) } else { 0 }])
    }

    fn named(&mut self) -> Result<Vec<(String, Tensor)>> {
        Ok(names(&self.variables).into_list())
    }

    fn place(&self) -> String {
        device::name(self.device)
    }

    fn kept_for_captures(&mut self, kind: &Kind) -> Result<Vec<u64>> {
        Ok(vec![self.captures_keep(kind, self.state.size)?.0])
    }

    fn hints(&mut self) -> Hints {
        let hold = self.format_choice.as_ref().is_some_and(FormatChoice::is_measuring);
        Hints { hold, even: self.graphs.is_some() }
    }

    fn falls_back(&mut self, error: &Error) -> Result<bool> {
        let falls_back = self.format_choice.as_mut().is_some_and(|choice| choice.fall_back(error));
        if falls_back {
            self.convert()?;
        }
        Ok(falls_back)
    }

    fn end_fallback(&mut self, works: bool) -> Result<()> {
        if let Some(choice) = &mut self.format_choice {
            choice.end_fallback(works);
        }
        if works { Ok(()) } else { self.convert() }
    }

    fn drop_captures(&mut self) -> Result<()> {
        self.graphs.as_mut().map_or(Ok(()), |graphs| graphs.clear())
    }
}

impl PartsEngine for MicroBatcher {
    fn main_memory(&self) -> Option<Memory> {
        self.memory.clone()
    }
}

impl MicroBatcher {
    /// Returns the bytes that a step must leave to CUDA graphs. An evaluation leaves the bytes that graphs keep.
    /// Training with `MicroBatches::Auto`, the fastest size, leaves room for captures. Training with any other
    /// size leaves nothing, and drops the graphs when it runs out of memory.
    pub(crate) fn captures_keep(&self, kind: &Kind, size: MicroBatches) -> Result<Bytes> {
        let (Some(memory), Some(graphs)) = (&self.memory, &self.graphs) else {
            return Ok(Bytes(0));
        };
        Ok(match (kind.is_training(), memory.usage()?.available) {
            (false, _) => graphs.kept(),
            // The fastest size is fast because of graphs. A user who requests the largest size wants all memory
            // for the micro-batch, so graphs get none.
            (true, Some(available)) if size == MicroBatches::Auto => MicroGraphs::spare(available),
            (true, _) => Bytes(0),
        })
    }
}
