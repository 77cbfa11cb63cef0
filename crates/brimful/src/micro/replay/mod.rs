//! Replays micro-batches that have been captured, where the user has asked for it.
//!
//! ```text
//!   of each shape    1st, 2nd  eager: kernels are chosen, memory is found
//!                    3rd       eager, then captured and replayed on the same samples: both alike?
//!                    4th …     samples copied in, replayed
//!   now and then               replayed, and eager too: still alike?
//! ```
//!
//! What cannot be captured, or gives something else when replayed, stays eager.

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

use super::Outcome;
use super::pass::BatchPass;
use crate::Result;
use crate::accumulate::Sum;
use crate::batch::Batch;
use crate::bytes::Bytes;
use crate::layout::Arrangement;
use crate::loss::MicroBatchWeight;
use crate::step::MicroBatchRun;
use blocks::Blocks;
use program::Program;
use room::CaptureRoom;
pub(crate) use shape::Closure;
use shape::Shape;
use trust::Trust;

/// 2 micro-batches of a shape run eagerly before one is captured: cuDNN chooses kernels in the first, and
/// the allocator settles in the second.
const WARM_UP: usize = 2;
/// A quarter of a memory is left free for captures, which cannot use what eager work has cached.
const CAPTURE_DIVISOR: u64 = 4;
/// 16 shapes are kept. Near-equal splitting gives two a mini-batch.
const MAX_SHAPES: usize = 16;

/// What is known of each shape of micro-batch, and what captured work shares.
#[derive(Debug)]
pub(super) struct MicroReplay {
    device: Device,
    pub(super) wanted: bool,
    entries: Vec<ShapeEntry>,
    /// What captured work adds gradients to, one list a group of terms.
    sums: Vec<Sum>,
    /// What it uses that is not its own.
    blocks: Blocks,
    /// How many parameters are trained.
    parameters: usize,
    /// Where all variables were when it was captured, and which of them were trained.
    places: Vec<(usize, bool)>,
    /// Mini-batches so far.
    step: u64,
    /// Whether this one is run without replays.
    eager: bool,
    pool: Pool,
    /// Where captures take place; made at the first.
    stream: Option<Stream>,
    pub(super) room: CaptureRoom,
    /// How many micro-batches were replayed since that was told.
    pub(super) replayed: usize,
    /// Whether the mini-batch has had a shape that was not captured yet but may be.
    pub(super) new: bool,
    /// Whether it has used captured work.
    used: bool,
    /// Whether there is no room for captured work and an eager micro-batch of the same mini-batch.
    cramped: bool,
    /// Why some shape runs eagerly although replay was asked for.
    pub(super) cause: Option<String>,
}

/// What a micro-batch runs in, besides its mini-batch.
#[derive(Debug)]
pub(super) struct Surroundings<'a> {
    pub(super) arrangement: &'a Arrangement,
    /// Which closure runs on it.
    pub(super) closure: Closure,
    /// Whether its size is settled on. One that is just tried is not worth a capture.
    pub(super) settled: bool,
}

#[derive(Debug)]
struct ShapeEntry {
    shape: Shape,
    uses: u64,
    state: ShapeState,
    /// What a captured one has in use while it is replayed, and for how many samples.
    need: Bytes,
    samples: f64,
    trust: Trust,
}

#[derive(Debug)]
enum ShapeState {
    /// So many ran eagerly.
    New(usize),
    Captured(Box<Program>),
    /// Not to be captured.
    Eager,
}

impl ShapeEntry {
    /// Gives up what was captured.
    fn give_up(&mut self, state: ShapeState) {
        self.state = state;
        self.need = Bytes(0);
        self.trust = Trust::default();
    }
}

impl MicroReplay {
    pub(super) fn new(device: Device) -> Self {
        Self {
            device,
            wanted: false,
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
            cause: None,
        }
    }

    /// Turns it on or off.
    pub(super) fn set(&mut self, wanted: bool) {
        self.wanted = wanted;
        let available = match self.device {
            Device::Cuda(_) => graph::available().map_err(|error| error.to_string()),
            _ => Err("replay is for CUDA devices".to_owned()),
        };
        if let (true, Err(cause)) = (wanted, available) {
            self.wanted = false;
            self.tell(cause);
        }
    }

    /// What a step is to leave free of a memory in which captured work is to lie beside what eager
    /// work leaves behind.
    pub(super) fn spare(&self, available: Bytes) -> Bytes {
        Bytes(if self.wanted { available.0 / CAPTURE_DIVISOR } else { 0 })
    }

    /// What captured work keeps from everyone else.
    pub(super) fn kept(&self) -> Bytes {
        Bytes(self.entries.iter().map(|entry| entry.need.0).sum())
    }

    /// Forgets all captured work and gives its memory back.
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

    /// Begins a mini-batch, with replays or without. Captured work uses the variables where they were:
    /// others make it worthless.
    pub(super) fn begin(
        &mut self,
        parameters: usize,
        variables: &Mutex<Variables>,
        eager: bool,
    ) -> Result<()> {
        if !self.wanted {
            return Ok(());
        }
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

    /// Runs one micro-batch, eagerly or by replay, and adds it to its mini-batch.
    pub(super) fn run<B: Batch, R: Outcome>(
        &mut self,
        pass: &mut BatchPass<R::Outputs>,
        micro_batch: B,
        part: &MicroBatchWeight,
        f: &mut impl FnMut(B) -> R,
        surroundings: &Surroundings<'_>,
    ) -> Result<MicroBatchRun> {
        let Surroundings { arrangement, closure, settled } = *surroundings;
        if !self.wanted || self.eager || !self.knows(closure) {
            pass.run(arrangement.of(micro_batch)?, part, f)?;
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
        // Where a check had no room beside captured work, there is none left.
        let unseen = self.entries.get(index).map_or(Bytes(0), |entry| entry.need);
        // A check runs the work twice, and what is still to be captured runs slower than it will: a size
        // is not to be judged by their times.
        Ok(MicroBatchRun { unseen, typical: !(is_checked || new && settled) })
    }

    /// Whether the entry is captured work that is to be compared with an eager run in this step.
    fn is_due(&self, index: usize) -> bool {
        let entry = &self.entries[index];
        matches!(entry.state, ShapeState::Captured(_)) && entry.trust.is_due(self.step)
    }

    /// Runs a micro-batch of an entry's shape as far as that has come: eagerly, to be captured, by
    /// replay, or both ways.
    fn run_entry<B: Batch, R: Outcome>(
        &mut self,
        index: usize,
        pass: &mut BatchPass<R::Outputs>,
        micro_batch: B,
        part: &MicroBatchWeight,
        f: &mut impl FnMut(B) -> R,
        surroundings: &Surroundings<'_>,
    ) -> Result<()> {
        let Surroundings { arrangement, settled, .. } = *surroundings;
        if self.is_due(index) {
            return self.check(index, pass, arrangement.of(micro_batch)?, part, f);
        }
        match &mut self.entries[index].state {
            // Its inputs are laid out already, and the samples will be as they are copied there.
            ShapeState::Captured(program) => {
                self.replayed += 1;
                self.used = true;
                program.run(pass, &micro_batch, part)?;
            }
            ShapeState::New(seen) if *seen < WARM_UP || !settled => {
                *seen += 1;
                pass.run(arrangement.of(micro_batch)?, part, f)?;
            }
            ShapeState::New(_) => {
                let (state, need) = self.capture(pass, arrangement.of(micro_batch)?, part, f)?;
                let entry = &mut self.entries[index];
                entry.state = state;
                entry.need = need;
                entry.samples = part.samples;
                entry.trust = entry.trust.captured(self.step);
            }
            ShapeState::Eager => pass.run(arrangement.of(micro_batch)?, part, f)?,
        }
        Ok(())
    }

    /// Whether the closure's type says which work it is; if not, says so.
    fn knows(&mut self, closure: Closure) -> bool {
        if !closure.is_distinct() {
            self.tell(
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

    /// Whether captured work keeps memory that so many samples of a new shape will need, as far as can
    /// be told from others.
    fn is_in_the_way(&self, samples: f64) -> Result<bool> {
        let kept = self.kept().0;
        // Graphs' memory cannot be lent to eager work, so an eager micro-batch may fail although it would
        // fit: that is seen beforehand, by what samples have needed so far.
        let expected = |entry: &ShapeEntry| (entry.need.0 as f64 / entry.samples * samples) as u64;
        let expected = self.entries.iter().map(expected).max().unwrap_or(0);
        Ok(kept > 0 && room::free_beside(self.device, kept)? < expected)
    }

    /// Forgets all captured work in the midst of a step. What the same mini-batch has used would be
    /// captured again, and in the way again, at every step.
    fn release<O>(&mut self, pass: &mut BatchPass<O>) -> Result<()> {
        self.cramped |= self.used;
        // The sums lie in the captured work's memory, which is about to be given back.
        pass.accumulator.disown()?;
        self.clear_within_step()
    }

    /// Forgets all captured work, but not what the step under way has needed with it.
    fn clear_within_step(&mut self) -> Result<()> {
        let interrupted = self.room.interrupted(self.device)?;
        self.clear()?;
        self.room = interrupted;
        Ok(())
    }

    /// The entry of this shape; a new one takes the place of the least used.
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
        self.tell(cause);
        ShapeState::Eager
    }

    /// Says once why micro-batches run eagerly.
    fn tell(&mut self, cause: String) {
        if self.cause.is_none() {
            tracing::warn!(%cause, "micro-batches are not replayed but run eagerly");
            self.cause = Some(cause);
        }
    }
}

/// Where all variables are, and which are trained. A frozen weight or a running statistic that has
/// moved is as bad as a parameter.
fn places(variables: &Mutex<Variables>) -> Vec<(usize, bool)> {
    let variables = variables.lock().unwrap_or_else(PoisonError::into_inner);
    let all = variables.named_variables.values();
    all.map(|tensor| (tensor.data_ptr() as usize, tensor.requires_grad())).collect()
}
