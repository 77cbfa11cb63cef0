//! Replays micro-batches that have been captured, where the user has asked for it.
//!
//! ```text
//!   of each shape    1st, 2nd  eager: kernels are chosen, memory is found
//!                    3rd       eager, then captured and replayed on the same samples: both alike?
//!                    4th …     samples copied in, replayed
//! ```
//!
//! What cannot be captured, or gives something else when replayed, stays eager.

mod compare;
mod program;
mod readout;
mod room;
mod shape;

use std::mem;
use std::sync::{Mutex, PoisonError};

use brimful_torch::graph::{self, Pool};
use brimful_torch::memory::empty_cache;
use brimful_torch::stream::Stream;
use tch::nn::Variables;
use tch::{Device, Kind, Tensor};

use super::Outcome;
use super::layout::Arrangement;
use super::pass::{Pass, forward};
use crate::Result;
use crate::accumulate::Sum;
use crate::batch::Batch;
use crate::bytes::Bytes;
use crate::loss::Part;
use crate::random::Randomness;
use compare::{Buffers, Verdict};
use program::{Program, Setting};
use readout::Readout;
use room::{Room, Watch};
use shape::Shape;

/// Micro-batches of a shape that run eagerly before one is captured.
const WARM_UP: usize = 2;
/// Shapes that are kept. Near-equal splitting gives two a mini-batch.
const SHAPES: usize = 16;

/// What is known of each shape of micro-batch, and what captured work shares.
#[derive(Debug)]
pub(super) struct Replay {
    device: Device,
    wanted: bool,
    entries: Vec<Entry>,
    /// What captured work adds gradients to, one list a group of terms.
    sums: Vec<Sum>,
    /// Where the parameters were when it was captured.
    parameters: Vec<usize>,
    pool: Pool,
    /// Where captures take place; made at the first.
    stream: Option<Stream>,
    room: Room,
    replayed: usize,
    /// Whether a shape was seen that may yet be captured.
    new: bool,
    /// Why some shape runs eagerly.
    cause: Option<String>,
}

/// What a micro-batch runs in, besides its mini-batch.
#[derive(Debug)]
pub(super) struct Surroundings<'a> {
    pub(super) arrangement: &'a Arrangement,
    pub(super) variables: &'a Mutex<Variables>,
}

#[derive(Debug)]
struct Entry {
    shape: Shape,
    uses: u64,
    state: State,
}

#[derive(Debug)]
enum State {
    /// So many ran eagerly.
    New(usize),
    Captured(Box<Program>),
    /// Not to be captured.
    Eager,
}

impl Replay {
    pub(super) fn new(device: Device) -> Self {
        Self {
            device,
            wanted: false,
            entries: Vec::new(),
            sums: Vec::new(),
            parameters: Vec::new(),
            pool: Pool::default(),
            stream: None,
            room: Room::default(),
            replayed: 0,
            new: false,
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

    /// Why micro-batches run eagerly although replay was asked for.
    pub(super) fn cause(&self) -> Option<&str> {
        self.cause.as_deref()
    }

    /// How many micro-batches were replayed since the last call.
    pub(super) fn take_replayed(&mut self) -> usize {
        mem::take(&mut self.replayed)
    }

    /// Whether a shape was seen since the last call that may yet be captured.
    pub(super) fn take_new(&mut self) -> bool {
        mem::take(&mut self.new)
    }

    /// Micro-batches of a shape before it runs at its full speed, besides the first.
    pub(super) fn warm_up(&self) -> usize {
        if self.wanted { WARM_UP } else { 0 }
    }

    /// What captured work has in use while it is replayed, which the memory's account does not show.
    pub(super) fn needed(&self) -> Bytes {
        self.room.needed()
    }

    /// The most memory in use since the last call, where `usage` is what was in use besides captured
    /// work.
    pub(super) fn take_peak(&mut self, usage: Bytes) -> Bytes {
        self.room.take_peak(usage)
    }

    /// Forgets all captured work and gives its memory back.
    pub(super) fn clear(&mut self) -> Result<()> {
        self.sums.clear();
        if self.entries.is_empty() {
            return Ok(());
        }
        self.entries.clear();
        self.room = Room::default();
        Ok(empty_cache(self.device)?)
    }

    /// Captured work uses the parameters where they were: others make it worthless.
    pub(super) fn begin(&mut self, parameters: &[Tensor]) -> Result<()> {
        if !self.wanted {
            return Ok(());
        }
        let now: Vec<usize> = parameters.iter().map(|p| p.data_ptr() as usize).collect();
        if now != self.parameters {
            self.clear()?;
            self.parameters = now;
        }
        Ok(())
    }

    /// Runs one micro-batch, eagerly or by replay, and adds it to its mini-batch.
    pub(super) fn run<B: Batch, R: Outcome, F: FnMut(B) -> R>(
        &mut self,
        pass: &mut Pass<R::Outputs>,
        micro_batch: B,
        part: &Part,
        f: &mut F,
        surroundings: &Surroundings<'_>,
    ) -> Result<()> {
        let laid_out = |micro_batch| surroundings.arrangement.of(micro_batch);
        if !self.wanted {
            return pass.run(laid_out(micro_batch)?, part, f);
        }
        let index = self.find(Shape::of::<B, F>(&micro_batch, pass.single));
        let entry = &mut self.entries[index];
        entry.uses += 1;
        self.new |= matches!(entry.state, State::New(_));
        match &mut entry.state {
            // Its inputs are laid out already, and the samples will be as they are copied there.
            State::Captured(program) => {
                self.replayed += 1;
                program.run(pass, &micro_batch, part)
            }
            State::New(seen) if *seen < WARM_UP => {
                *seen += 1;
                pass.run(laid_out(micro_batch)?, part, f)
            }
            State::New(_) => {
                let buffers = without_gradient(surroundings.variables);
                let state = self.capture(pass, laid_out(micro_batch)?, part, f, &buffers)?;
                self.entries[index].state = state;
                Ok(())
            }
            State::Eager => pass.run(laid_out(micro_batch)?, part, f),
        }
    }

    /// The entry of this shape; a new one takes the place of the least used.
    fn find(&mut self, shape: Shape) -> usize {
        if let Some(index) = self.entries.iter().position(|entry| entry.shape == shape) {
            return index;
        }
        if self.entries.len() == SHAPES {
            let least = self.entries.iter().enumerate().min_by_key(|(_, entry)| entry.uses);
            let least = least.map_or(0, |(index, _)| index);
            self.entries.swap_remove(least);
        }
        self.entries.push(Entry { shape, uses: 0, state: State::New(0) });
        self.entries.len() - 1
    }

    /// Runs the micro-batch eagerly, which is what counts, then captures it and tries a replay.
    fn capture<B: Batch, R: Outcome>(
        &mut self,
        pass: &mut Pass<R::Outputs>,
        micro_batch: B,
        part: &Part,
        f: &mut impl FnMut(B) -> R,
        buffers: &[Tensor],
    ) -> Result<State> {
        let before = Randomness::now(self.device)?;
        let earlier = pass.accumulator.exchange(Vec::new());
        let (terms, output) = forward(share(&micro_batch)?, f)?;
        let readout = Readout::of(&terms)?;
        pass.add(&terms, &output, part)?;
        // A graph that is kept would tie the capture to the stream that it was made on.
        drop((terms, output));
        let eager = pass.accumulator.exchange(earlier);
        let after = Randomness::now(self.device)?;

        pass.accumulator.disown()?;
        let captured = self.captured(pass, &micro_batch, &eager, f);
        after.restore()?;
        let state = match captured {
            Err(cause) => self.refuse(cause),
            Ok(mut program) => {
                let buffers = Buffers::save(buffers)?;
                before.restore()?;
                program.try_on(&micro_batch, part)?;
                let same_numbers = Randomness::now(self.device)? == after;
                after.restore()?;
                buffers.restore()?;
                let kind = coarsest(pass.accumulator.parameters());
                let (sums, row) = (program.sums(), program.readout());
                match compare::verdict(kind, &eager, &readout, sums, row)? {
                    // Numbers that are not finite cannot be compared: another time.
                    Verdict::Unknown => State::New(WARM_UP),
                    Verdict::Differs(what) => self.refuse(what),
                    Verdict::Alike if !same_numbers => {
                        self.refuse("a replay draws other random numbers".into())
                    }
                    Verdict::Alike => State::Captured(Box::new(program)),
                }
            }
        };
        pass.accumulator.add_sums(eager)?;
        Ok(state)
    }

    /// Captures a micro-batch like this one, with sums for what eager runs have reached.
    fn captured<B: Batch, R: Outcome>(
        &mut self,
        pass: &mut Pass<R::Outputs>,
        micro_batch: &B,
        eager: &[Sum],
        f: &mut impl FnMut(B) -> R,
    ) -> Result<Program, String> {
        let words = |error: crate::Error| error.to_string();
        let stream = self.prepare().map_err(words)?;
        let sums = self.sums_for(eager).map_err(words)?;
        let mut capture = |this: &mut Self, sums| {
            let setting = Setting { device: this.device, stream };
            Program::capture(&setting, sums, &mut this.pool, pass, micro_batch, f)
        };
        let watch = Watch::begin(self.device).map_err(words)?;
        let known = count(&sums);
        let mut program = capture(self, sums)?;
        // A term that counts once a step has no part in most eager micro-batches, but has one here.
        if count(program.sums()) > known {
            let sums = self.sums_for(program.sums()).map_err(words)?;
            program = capture(self, sums)?;
        }
        self.room.add(&watch).map_err(words)?;
        Ok(program)
    }

    /// Makes what a capture needs: a stream, and room. What eager runs have left in the cache is of
    /// no use to captured work.
    fn prepare(&mut self) -> Result<Stream> {
        let stream = match self.stream {
            Some(stream) => stream,
            None => program::stream(self.device)?,
        };
        self.stream = Some(stream);
        // A pool that nobody uses any more cannot be taken up again.
        if !self.entries.iter().any(|entry| matches!(entry.state, State::Captured(_))) {
            self.pool = Pool::default();
        }
        empty_cache(self.device)?;
        Ok(stream)
    }

    /// What captured work is to add such gradients to.
    fn sums_for(&mut self, gradients: &[Sum]) -> Result<Vec<Sum>> {
        while self.sums.len() < gradients.len() {
            self.sums.push(self.parameters.iter().map(|_| None).collect());
        }
        let place = |(sum, gradient): (&mut Option<Tensor>, &Option<Tensor>)| {
            let Some(gradient) = gradient else { return Ok(None) };
            if sum.is_none() {
                *sum = Some(gradient.f_zeros_like()?);
            }
            Ok(sum.as_ref().map(Tensor::shallow_clone))
        };
        let groups = self.sums.iter_mut().zip(gradients);
        groups
            .map(|(sums, gradients)| sums.iter_mut().zip(gradients).map(place).collect())
            .collect()
    }

    fn refuse(&mut self, cause: String) -> State {
        self.tell(cause);
        State::Eager
    }

    /// Says once why micro-batches run eagerly.
    fn tell(&mut self, cause: String) {
        if self.cause.is_none() {
            tracing::warn!(%cause, "micro-batches are not replayed but run eagerly");
            self.cause = Some(cause);
        }
    }
}

fn share<B: Batch>(micro_batch: &B) -> Result<B> {
    micro_batch.map(&mut |leaf| Ok(leaf.tensor().shallow_clone()))
}

/// The kind of number with the fewest digits among the parameters.
fn coarsest(parameters: &[Tensor]) -> Kind {
    let size = |p: &&Tensor| p.kind().elt_size_in_bytes();
    parameters.iter().min_by_key(size).map_or(Kind::Float, Tensor::kind)
}

/// Variables that are not trained, such as running statistics.
fn without_gradient(variables: &Mutex<Variables>) -> Vec<Tensor> {
    let variables = variables.lock().unwrap_or_else(PoisonError::into_inner);
    let all = variables.named_variables.values();
    all.filter(|tensor| !tensor.requires_grad()).map(Tensor::shallow_clone).collect()
}

fn count(sums: &[Sum]) -> usize {
    sums.iter().flatten().flatten().count()
}
