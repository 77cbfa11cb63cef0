//! A run in one file: what it was told, what each step came to, and what the devices did and held.
//!
//! A [`Recorder`] watches a training loop, whatever it looks like, and makes a [`Run`] of it; the
//! program's `brimful report` makes a page of that.
//!
//! ```
//! use brimful::report::{Ended, Recorder, Run};
//! # use brimful::{Loss, MicroBatcher, Size};
//! # use tch::nn::{self, Module};
//! # use tch::{Device, Kind, Tensor};
//! # let store = nn::VarStore::new(Device::Cpu);
//! # let model = nn::linear(store.root(), 4, 1, Default::default());
//! # let mut micro = MicroBatcher::new(&store, Size::Fixed(4));
//! # let batch = Tensor::randn([16, 4], (Kind::Float, Device::Cpu));
//! # let path = std::env::temp_dir().join(format!("brimful-doc-{}.json", std::process::id()));
//!
//! let mut recorder = Recorder::new("a linear model");
//! recorder.setting("micro-batch", 4);
//! recorder.device("cpu", None);
//! for _ in 0..3 {
//!     let step = micro.backward(&batch, |x| Loss::mean(model.forward(&x).square().mean(Kind::Float)))?;
//!     recorder.step(step);
//! }
//! recorder.run(Ended::Finished).write(&path)?;
//! assert_eq!(Run::read(&path)?.steps.number, [1, 2, 3]);
//! # std::fs::remove_file(&path).expect("removed");
//! # Ok::<(), brimful::Error>(())
//! ```
//!
//! # The file
//!
//! One JSON object: `"format": "brimful run"`, `"version": 1`, and the fields of [`Run`] under their
//! names. Steps and actions are columns, not objects, so that a hundred thousand actions take a few
//! megabytes: see [`Steps`] and [`Lane`]. A reader refuses other versions; fields that it does not
//! know it leaves alone.

mod error;
mod file;
mod history;
mod kept;
mod record;
mod recorder;
mod timeline;

use serde::{Deserialize, Serialize};

pub use error::RunError;
pub use history::Steps;
pub use record::Record;
pub use recorder::Recorder;
pub use timeline::{BusLane, Lane, TimelineRecord, Unit, WaitLane};

use crate::auto::{Decision, Why};
use crate::bytes::Bytes;

/// A run, as far as it went.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Run {
    /// What was run, in a few words.
    pub title: String,
    /// What it was told and where it ran, in the order in which it is shown.
    pub settings: Vec<(String, String)>,
    /// The devices whose memory is counted, in the order of the pipeline.
    pub devices: Vec<Device>,
    /// What the steps came to.
    pub steps: Steps,
    /// The tests in between.
    pub tests: Vec<Test>,
    /// What was decided about an automatic size, where that was new.
    pub decisions: Vec<Decided>,
    /// How many more decisions there were than are kept.
    pub decisions_left_out: usize,
    /// Some steps, action by action.
    pub timelines: Vec<Compared>,
    /// How it ended.
    pub ended: Ended,
}

/// A device and where its memory ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// As people call it.
    pub name: String,
    /// Where its memory ends; `None` where nothing limits it.
    pub limit: Option<Bytes>,
}

/// A test between steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Test {
    /// After which step.
    pub step: usize,
    /// The loss, if it is a number.
    pub loss: Option<f64>,
    /// The share of right answers.
    pub accuracy: Option<f64>,
}

/// A decision on the size of micro-batches: see [`Decision`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decided {
    /// In which step.
    pub step: usize,
    /// At most so many samples in a micro-batch.
    pub size: usize,
    /// What came of it.
    pub outcome: RunOutcome,
    /// Why, in words.
    pub why: String,
    /// What it was expected to need.
    pub predicted: Option<Bytes>,
    /// What it needed.
    pub measured: Option<Bytes>,
    /// What was free for it.
    pub available: Bytes,
}

/// What came of a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RunOutcome {
    /// Run to learn what it needs or how fast it is.
    Tried,
    /// Memory ran out.
    Failed,
    /// Taken.
    Chosen,
}

/// A step as it ran and as it was simulated, one beside the other; one of them may be missing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Compared {
    /// Which step, in words.
    pub title: String,
    /// As it ran.
    pub measured: Option<TimelineRecord>,
    /// As it was simulated. Of a step that ran: the same schedule with the mean time of each kind of
    /// action on each stage, and transfers that take no time.
    pub simulated: Option<TimelineRecord>,
}

/// How a run ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Ended {
    /// Nothing was run: it is a plan.
    #[default]
    Planned,
    /// As it should.
    Finished,
    /// It was told to stop.
    Stopped,
    /// By this error.
    Failed(String),
}

impl Run {
    /// A run of which nothing is known yet.
    #[must_use]
    pub fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), ..Self::default() }
    }
}

impl Decided {
    fn new(step: usize, decision: &Decision) -> Self {
        let outcome = match decision.why {
            _ if decision.failed => RunOutcome::Failed,
            Why::Probe | Why::Measure => RunOutcome::Tried,
            _ => RunOutcome::Chosen,
        };
        Self {
            step,
            size: decision.size,
            outcome,
            why: decision.why.to_string(),
            predicted: decision.predicted,
            measured: decision.measured,
            available: decision.available,
        }
    }

    /// Whether it tells nothing that the one before has not told.
    fn repeats(&self, before: &Self) -> bool {
        (self.size, self.outcome, &self.why) == (before.size, before.outcome, &before.why)
    }
}
