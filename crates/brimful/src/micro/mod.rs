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
pub(crate) mod cut;
mod evaluate;
pub(crate) mod foreign;
mod layout;
mod outcome;
mod part;
mod pass;
mod replay;
mod report;
mod retry;
mod size;
pub(crate) mod tally;
mod watch;
pub(crate) mod whole;
mod window;
pub(crate) mod world;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tch::nn::{VarStore, Variables};
use tch::{Device, Tensor};

pub use layout::Layout;
pub use outcome::Outcome;
pub use report::Step;
pub use size::Size;

use crate::accumulate::check_dense;
use crate::auto::{Goal, Sizes, Use};
use crate::batch::{self, Batch};
use crate::bytes::Bytes;
use crate::copies::Copies;
use crate::memory::Memory;
use crate::optim::Method;
use crate::ranks::RanksTurn;
use crate::world::World;
use crate::{Error, Result};
use attempt::Scale;
use cut::Cut;
use layout::Arrangement;
pub(crate) use replay::Closure;
use replay::Replay;
pub(crate) use window::Window;

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
    /// Of micro-batches to the device.
    copies: Copies,
    size: Size,
    memory: Option<Memory>,
    pub(crate) non_finite: NonFinite,
    window: Option<Window>,
    foreign: foreign::Search,
    sizes: Sizes,
    /// Bytes that an optimizer is about to take.
    reserved: u64,
    told_of_hidden: bool,
    replay: Replay,
    arrangement: Arrangement,
    /// The other ranks; none where there is no other.
    world: Option<World>,
    /// In which gradients are to be added up over the ranks while the next try runs.
    turn: Option<RanksTurn>,
}

impl MicroBatcher {
    /// For the variables of this store, which may still grow, on its device.
    pub fn new(store: &VarStore, size: Size) -> Self {
        let device = store.device();
        let memory = (device != Device::Cpu).then_some(Memory::Accelerator(device));
        let goal = if size == Size::Largest { Goal::Largest } else { Goal::Fastest };
        Self {
            variables: store.variables_.clone(),
            device,
            copies: Copies::new(device),
            size,
            memory,
            non_finite: NonFinite::default(),
            window: None,
            foreign: foreign::Search::default(),
            sizes: Sizes::new(goal),
            reserved: 0,
            told_of_hidden: false,
            replay: Replay::new(device),
            arrangement: Arrangement::default(),
            world: None,
            turn: None,
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
        self.replay.cause()
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
        mut f: impl FnMut(B) -> R,
    ) -> Result<Step<R::Outputs>> {
        self.check_no_window()?;
        let closure = Closure::of(&f);
        let step = self.step(Use::Train, batch, |this, cut, scale| {
            this.attempt(batch, cut, scale, closure, &mut f)
        })?;
        self.reserved = 0;
        self.learn_order(step.samples, step.time);
        Ok(step)
    }

    /// Tries a step until memory suffices, and commits it: with the other ranks, if there are any.
    fn step<B: Batch, O: Batch>(
        &mut self,
        used: Use,
        batch: &B,
        mut attempt: impl FnMut(&mut Self, &mut Cut, Scale) -> Result<(Window, O)>,
    ) -> Result<Step<O>> {
        let start = Instant::now();
        if let Some(world) = self.world.clone() {
            return self.step_together(&world, used, batch, attempt, start);
        }
        let (step, story) = self.sized(used, batch, |this, cut| {
            let scale = Scale::whole(cut);
            let (window, outputs) = attempt(this, cut, scale)?;
            Ok(this.settle(window, start)?.with_outputs(outputs))
        })?;
        Ok(step.with_story(story))
    }

    /// Runs forward and backward, and keeps the result for [`MicroBatcher::commit`]: a step over
    /// several mini-batches, each of which may have its own length.
    ///
    /// # Errors
    /// As [`MicroBatcher::backward`]; the mini-batches before are kept.
    pub fn accumulate<B: Batch, R: Outcome>(
        &mut self,
        batch: &B,
        mut f: impl FnMut(B) -> R,
    ) -> Result<R::Outputs> {
        let (start, is_first) = (Instant::now(), self.window.is_none());
        self.check_trained()?;
        let closure = Closure::of(&f);
        let (outputs, story) = self.sized(Use::Train, batch, |this, cut| {
            let unit = this.window.as_ref().map_or(cut.samples() as f64, |window| window.unit);
            let scale = Scale { unit, first: is_first, last: false, draws: None };
            let (later, outputs) = this.attempt(batch, cut, scale, closure, &mut f)?;
            let later = later.lasting()?;
            match &mut this.window {
                None => this.window = Some(later.opened(&this.variables)),
                Some(window) => window.extend(later)?,
            }
            Ok(outputs)
        })?;
        if let Some(window) = &mut self.window {
            window.story.extend(story);
        }
        // The order changes from window to window, so that one part of each tells its rate.
        if is_first {
            self.learn_order(batch::len(batch)?, start.elapsed());
        }
        Ok(outputs)
    }

    /// Adds the gradients of all mini-batches since the last commit, as if they had been one.
    ///
    /// # Errors
    /// When there is none; when parameters were frozen or thawed since the first, and all of them are
    /// kept, but where there are other ranks; when a denominator is 0 or the loss is not finite: then all of them are forgotten, and
    /// gradients, statistics and random state are as before the first.
    pub fn commit(&mut self) -> Result<Step> {
        let start = Instant::now();
        let checked = self.check_trained();
        let window = checked.and_then(|()| self.window.take().ok_or(Error::NothingAccumulated));
        if let Some(world) = self.world.clone() {
            // The others will undo theirs.
            if let (Err(_), Some(kept)) = (&window, self.window.take()) {
                kept.undo.run()?;
            }
            return self.commit_together(&world, window, start);
        }
        let mut window = window?;
        let story = std::mem::take(&mut window.story);
        let step = self.settle(window, start)?;
        self.reserved = 0;
        Ok(step.with_story(story))
    }

    /// Reads the loss, and commits gradients and statistics if all is well; else undoes all.
    pub(crate) fn settle(&mut self, window: Window, start: Instant) -> Result<Step> {
        let _inside = self.memory.as_ref().and_then(Memory::enter);
        let Window { sums, tally, groups, undo, unit, sizes, peak, .. } = window;
        let total = sizes.iter().sum::<usize>() as f64;
        let totals = undo.settle(|statistics| {
            // Before the reading, which waits for the device, so that it has something to do then.
            let moved = statistics.prepare()?;
            let totals = tally.read(self.non_finite)?.totals()?;
            let groups = tally::distinct(&groups).into_iter();
            let factors: Vec<f64> = groups.map(|g| totals.factor(g, unit, total)).collect();
            let mut parameters = self.parameters();
            check_dense(&parameters, &self.variables)?;
            sums.commit(&mut parameters, &factors)?;
            moved.apply()?;
            Ok(totals)
        })?;
        self.report(totals.loss, totals.terms, sizes, peak, start)
    }

    fn report(
        &mut self,
        loss: f64,
        terms: Vec<f64>,
        sizes: Vec<usize>,
        peak: Bytes,
        start: Instant,
    ) -> Result<Step> {
        let highest = self.take_peak()?;
        Ok(Step {
            loss,
            terms,
            samples: sizes.iter().sum(),
            sizes,
            outputs: (),
            seed: None,
            replayed: self.take_replayed(),
            time: start.elapsed(),
            peak: highest.map(|highest| highest.max(peak)),
            decisions: Vec::new(),
            retries: 0,
        })
    }

    fn parameters(&self) -> Vec<Tensor> {
        parameters(&self.variables)
    }
}

/// The variables that are being trained.
fn parameters(variables: &Mutex<Variables>) -> Vec<Tensor> {
    let variables = variables.lock().unwrap_or_else(PoisonError::into_inner);
    let all = variables.trainable_variables.iter().map(|variable| &variable.tensor);
    all.filter(|tensor| tensor.requires_grad()).map(Tensor::shallow_clone).collect()
}

/// What a step's gradients take.
pub(crate) fn gradient_bytes(variables: &Mutex<Variables>) -> u64 {
    let bytes = |p: &Tensor| (p.numel() * p.kind().elt_size_in_bytes()) as u64;
    parameters(variables).iter().map(bytes).sum()
}

/// What an optimizer's state takes.
pub(crate) fn state_bytes(variables: &Mutex<Variables>, method: Method) -> u64 {
    parameters(variables).iter().map(|parameter| method.state_bytes(parameter)).sum()
}
