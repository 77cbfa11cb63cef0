//! Captures micro-batches as CUDA graphs and replays them, if the user has requested CUDA graphs.
//!
//! ```text
//!   for each shape   1st, 2nd  eager: kernels are chosen, memory is allocated
//!                    3rd       eager, then captured and replayed on the same samples: both alike?
//!                    4th …     samples copied in, replayed
//!   now and then               replayed, and eager too: still alike?
//! ```
//!
//! Micro-batches that cannot be captured, or whose replay differs from an eager run, run eagerly.

mod blocks;
mod capture;
mod check;
mod compare;
mod program;
mod readout;
mod room;
mod shape;
mod trial;
mod trust;

use std::sync::{Mutex, PoisonError};

use brimful_torch::graph::{self, Pool};
use brimful_torch::memory::empty_cache;
use brimful_torch::stream::Stream;
use tch::Device;
use tch::nn::Variables;

use super::pass::BatchPass;
use crate::Result;
use crate::accumulate::Sum;
use crate::batch::Batch;
use crate::loss::{IntoLoss, MicroBatchWeight};
use crate::memory_format::FormatChoice;
use crate::step::MicroBatchRun;
use blocks::Blocks;
use brimful_plan::bytes::Bytes;
use program::Program;
use room::CaptureRoom;
pub(crate) use shape::Closure;
use shape::Shape;
use trust::Trust;

/// Number of micro-batches of a shape that run eagerly before one is captured: cuDNN chooses kernels in the
/// first, and the allocator reaches its steady state in the second.
const WARM_UP: usize = 2;
/// A quarter of the memory stays free for captures, which cannot use the cache of eager work.
const CAPTURE_DIVISOR: u64 = 4;
/// Largest number of shapes. Near-equal splitting makes two in a mini-batch.
const MAX_SHAPES: usize = 16;

/// State of each shape of micro-batch, and the resources that all CUDA graphs share.
#[derive(Debug)]
pub(super) struct MicroGraphs {
    device: Device,
    entries: Vec<ShapeEntry>,
    /// Sums to which graphs add gradients, one list for each group of terms.
    sums: Vec<Sum>,
    /// Memory that graphs use and do not own.
    blocks: Blocks,
    /// Number of trained parameters.
    parameters: usize,
    /// Addresses of all variables at the capture, and whether each was trained.
    places: Vec<(usize, bool)>,
    /// Number of mini-batches so far.
    step: u64,
    /// True if this mini-batch runs without replays.
    eager: bool,
    pool: Pool,
    /// Stream of captures; made at the first one.
    stream: Option<Stream>,
    pub(super) room: CaptureRoom,
    /// Number of micro-batches that were replayed since the last report.
    pub(super) replayed: usize,
    /// True if the mini-batch has had a shape that is not captured yet but may be.
    pub(super) new: bool,
    /// True if the mini-batch has used a graph.
    used: bool,
    /// True if graphs and an eager micro-batch of the same mini-batch do not fit into memory together.
    cramped: bool,
    /// Reason why a shape runs eagerly although CUDA graphs were requested.
    pub(super) cause: Option<String>,
}

/// Context of a micro-batch, besides its mini-batch.
#[derive(Debug)]
pub(super) struct Surroundings<'a> {
    pub(super) format_choice: Option<&'a FormatChoice>,
    /// Closure that runs on the micro-batch.
    pub(super) closure: Closure,
    /// True if the micro-batch's size is no longer being tried. A size on trial is not worth a capture.
    pub(super) is_steady: bool,
}

impl Surroundings<'_> {
    /// Converts a micro-batch's images to the memory format.
    fn formatted<B: Batch>(&self, micro_batch: B) -> Result<B> {
        match self.format_choice {
            Some(choice) => choice.of(micro_batch),
            None => Ok(micro_batch),
        }
    }
}

#[derive(Debug)]
struct ShapeEntry {
    shape: Shape,
    uses: u64,
    state: ShapeState,
    /// Bytes in use during a replay, and the number of samples of the captured micro-batch.
    need: Bytes,
    samples: f64,
    trust: Trust,
}

#[derive(Debug)]
enum ShapeState {
    /// Number of micro-batches that ran eagerly.
    New(usize),
    Captured(Box<Program>),
    /// Runs eagerly from now on.
    Eager,
}

impl ShapeEntry {
    /// Drops the captured graph.
    fn give_up(&mut self, state: ShapeState) {
        self.state = state;
        self.need = Bytes(0);
        self.trust = Trust::default();
    }
}

impl MicroGraphs {
    /// Creates graphs for this device; `cause` is the reason that was logged before, if there was one.
    pub(super) fn new(device: Device, cause: Option<String>) -> Self {
        Self {
            device,
            entries: Vec::new(),
            sums: Vec::new(),
            blocks: Blocks::default(),
            parameters: 0,
            places: Vec::new(),
            step: 0,
            eager: false,
            pool: Pool::default(),
            stream: None,
            room: CaptureRoom::default(),
            replayed: 0,
            new: false,
            used: false,
            cramped: false,
            cause,
        }
    }

    /// Fails with the reason why this device has no CUDA graphs.
    pub(super) fn check_available(device: Device) -> Result<(), String> {
        match device {
            Device::Cuda(_) => graph::available().map_err(|error| error.to_string()),
            _ => Err("CUDA graphs are for CUDA devices".to_owned()),
        }
    }

    /// Returns the bytes that a step leaves free for CUDA graphs, beside the cache of eager work.
    pub(super) fn spare(available: Bytes) -> Bytes {
        Bytes(available.0 / CAPTURE_DIVISOR)
    }

    /// Returns the bytes that CUDA graphs keep for themselves.
    pub(super) fn kept(&self) -> Bytes {
        Bytes(self.entries.iter().map(|entry| entry.need.0).sum())
    }

    /// Drops all CUDA graphs and frees their memory.
    pub(super) fn clear(&mut self) -> Result<()> {
        self.sums.clear();
        self.blocks = Blocks::default();
        if self.entries.is_empty() {
            return Ok(());
        }
        self.entries.clear();
        self.room = CaptureRoom::default();
        Ok(empty_cache(self.device)?)
    }

    /// Begins a mini-batch, with replays or without. Graphs hold the addresses of variables: if any has moved,
    /// all graphs are dropped.
    pub(super) fn begin(
        &mut self,
        parameters: usize,
        variables: &Mutex<Variables>,
        eager: bool,
    ) -> Result<()> {
        self.new = false;
        self.used = false;
        self.eager = eager;
        self.step += 1;
        let now = places(variables);
        if now != self.places {
            self.clear()?;
            self.places = now;
            self.parameters = parameters;
        }
        self.drop_orphans();
        self.drop_thawed();
        Ok(())
    }

    /// Runs one micro-batch, eagerly or by CUDA graph, and adds it to its mini-batch.
    pub(super) fn run<B: Batch, R: IntoLoss>(
        &mut self,
        pass: &mut BatchPass<R::Outputs>,
        micro_batch: B,
        part: &MicroBatchWeight,
        f: &mut impl FnMut(B) -> R,
        surroundings: &Surroundings<'_>,
    ) -> Result<MicroBatchRun> {
        let Surroundings { closure, is_steady, .. } = *surroundings;
        if self.eager || !self.knows(closure) {
            pass.run(surroundings.formatted(micro_batch)?, part, f)?;
            return Ok(MicroBatchRun { typical: !self.eager, ..MicroBatchRun::PLAINLY });
        }
        let shape = Shape::of(&micro_batch, closure, pass.single);
        if self.runs_eagerly(&shape) && self.is_in_the_way(part.samples)? {
            self.release(pass)?;
        }
        let index = self.find(shape);
        let entry = &mut self.entries[index];
        entry.uses += 1;
        let new = matches!(entry.state, ShapeState::New(_));
        self.new |= new;
        let is_checked = self.is_due(index);
        self.run_entry(index, pass, micro_batch, part, f, surroundings)?;
        // If a check did not fit into memory beside the graphs, it has dropped all graphs and moved its entry.
        let unseen = self.entries.get(index).map_or(Bytes(0), |entry| entry.need);
        // A check runs the work twice, and a shape that is not captured yet runs slower than it will: the size
        // policy must not judge a size by these times.
        Ok(MicroBatchRun { unseen, typical: !(is_checked || new && is_steady) })
    }

    /// Returns whether the entry has a graph that must be compared with an eager run in this step.
    fn is_due(&self, index: usize) -> bool {
        let entry = &self.entries[index];
        matches!(entry.state, ShapeState::Captured(_)) && entry.trust.is_due(self.step)
    }

    /// Runs a micro-batch according to the state of its entry: eagerly, with a capture, by CUDA graph, or for a
    /// check by graph and eagerly.
    fn run_entry<B: Batch, R: IntoLoss>(
        &mut self,
        index: usize,
        pass: &mut BatchPass<R::Outputs>,
        micro_batch: B,
        part: &MicroBatchWeight,
        f: &mut impl FnMut(B) -> R,
        surroundings: &Surroundings<'_>,
    ) -> Result<()> {
        let is_steady = surroundings.is_steady;
        if self.is_due(index) {
            return self.check(index, pass, surroundings.formatted(micro_batch)?, part, f);
        }
        match &mut self.entries[index].state {
            // The graph's inputs have the memory format already, and samples take it on when they are copied in.
            ShapeState::Captured(program) => {
                self.replayed += 1;
                self.used = true;
                program.run(pass, &micro_batch, part)?;
            }
            ShapeState::New(seen) if *seen < WARM_UP || !is_steady => {
                *seen += 1;
                pass.run(surroundings.formatted(micro_batch)?, part, f)?;
            }
            ShapeState::New(_) => {
                let (state, need) =
                    self.capture(pass, surroundings.formatted(micro_batch)?, part, f)?;
                let entry = &mut self.entries[index];
                entry.state = state;
                entry.need = need;
                entry.samples = part.samples;
                entry.trust = entry.trust.captured(self.step);
            }
            ShapeState::Eager => pass.run(surroundings.formatted(micro_batch)?, part, f)?,
        }
        Ok(())
    }

    /// Returns whether the closure's type identifies its work; if not, warns.
    fn knows(&mut self, closure: Closure) -> bool {
        if !closure.is_distinct() {
            self.report(
                "the closure is a pointer to a function or a trait object (`fn`, `dyn`), and one type \
                 of these stands for many closures: hand over the closure itself"
                    .into(),
            );
        }
        closure.is_distinct()
    }

    fn runs_eagerly(&self, shape: &Shape) -> bool {
        let known = self.entries.iter().find(|entry| entry.shape == *shape);
        !known.is_some_and(|entry| matches!(entry.state, ShapeState::Captured(_)))
    }

    /// Returns whether graphs keep memory that this many samples of a new shape will need, as estimated from the
    /// needs of other shapes.
    fn is_in_the_way(&self, samples: f64) -> Result<bool> {
        let kept = self.kept().0;
        // Eager work cannot use the graphs' memory, so an eager micro-batch may fail although it would fit without
        // graphs. The need per sample of the known shapes predicts such a failure.
        let expected = |entry: &ShapeEntry| (entry.need.0 as f64 / entry.samples * samples) as u64;
        let expected = self.entries.iter().map(expected).max().unwrap_or(0);
        Ok(kept > 0 && room::free_beside(self.device, kept)? < expected)
    }

    /// Drops all graphs in the midst of a step. A mini-batch that has used graphs is marked as cramped:
    /// otherwise every step would capture them again and drop them again.
    fn release<O>(&mut self, pass: &mut BatchPass<O>) -> Result<()> {
        self.cramped |= self.used;
        // The sums lie in the graphs' memory, which is about to be freed.
        pass.accumulator.disown()?;
        self.clear_within_step()
    }

    /// Drops all graphs, but keeps the peak memory of the running step.
    fn clear_within_step(&mut self) -> Result<()> {
        let interrupted = self.room.interrupted(self.device)?;
        self.clear()?;
        self.room = interrupted;
        Ok(())
    }

    /// Returns the entry of this shape; a new one replaces the least used.
    fn find(&mut self, shape: Shape) -> usize {
        if let Some(index) = self.entries.iter().position(|entry| entry.shape == shape) {
            return index;
        }
        if self.entries.len() == MAX_SHAPES {
            let least = self.entries.iter().enumerate().min_by_key(|(_, entry)| entry.uses);
            let least = least.map_or(0, |(index, _)| index);
            self.entries.swap_remove(least);
        }
        self.entries.push(ShapeEntry {
            shape,
            uses: 0,
            state: ShapeState::New(0),
            need: Bytes(0),
            samples: 1.0,
            trust: Trust::default(),
        });
        self.entries.len() - 1
    }

    fn refuse(&mut self, cause: String) -> ShapeState {
        self.report(cause);
        ShapeState::Eager
    }

    /// Logs once why micro-batches run eagerly.
    fn report(&mut self, cause: String) {
        report(&mut self.cause, cause);
    }
}

/// Logs why micro-batches run eagerly, unless a cause is known already.
pub(super) fn report(known: &mut Option<String>, cause: String) {
    if known.is_none() {
        tracing::warn!(%cause, "micro-batches run eagerly, without CUDA graphs");
        *known = Some(cause);
    }
}

/// Returns the addresses of all variables, and whether each is trained. Frozen weights and running statistics
/// count too: a graph uses their addresses as it uses those of parameters.
fn places(variables: &Mutex<Variables>) -> Vec<(usize, bool)> {
    let variables = variables.lock().unwrap_or_else(PoisonError::into_inner);
    let all = variables.named_variables.values();
    all.map(|tensor| (tensor.data_ptr() as usize, tensor.requires_grad())).collect()
}
