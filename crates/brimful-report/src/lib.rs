#![forbid(unsafe_code)]
//! Records a run in one file: its settings, the result of each step, and timelines and memory of the
//! devices.
//!
//! A [`Recorder`] watches any training loop and returns a [`Run`], which the program's `brimful report`
//! turns into a page.
//!
//! ```
//! use brimful_report::{Ended, Recorder, Run};
//! # use brimful::{Loss, MicroBatcher, MicroBatches};
//! # use tch::nn::{self, Module};
//! # use tch::{Device, Kind, Tensor};
//! # let store = nn::VarStore::new(Device::Cpu);
//! # let model = nn::linear(store.root(), 4, 1, Default::default());
//! # let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(4));
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
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The file
//!
//! One JSON object: `"format": "brimful run"`, `"version": 1`, and the fields of [`Run`] under their names.
//! Steps and actions are columns, not objects, so that a hundred thousand actions take a few megabytes: see
//! [`Steps`] and [`Lane`]. A reader refuses other versions and ignores unknown fields.

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
pub use timeline::{HostLinkLane, Lane, TimelineRecord, Unit, WaitLane};

use brimful::auto::{Decision, Why};
use brimful_plan::bytes::Bytes;

/// Recorded run, as far as it went.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Run {
    /// Short description of the run.
    pub title: String,
    /// Names and values of settings, in the order in which they are shown.
    pub settings: Vec<(String, String)>,
    /// Devices whose memory is counted, in the order of the pipeline.
    pub devices: Vec<Device>,
    /// Results of the steps.
    pub steps: Steps,
    /// Tests between the steps.
    pub tests: Vec<Test>,
    /// Decisions of the automatic size, without repetitions.
    pub decisions: Vec<Decided>,
    /// Number of further decisions that were not kept.
    pub decisions_left_out: usize,
    /// Timelines of some steps.
    pub timelines: Vec<Compared>,
    /// End of the run.
    pub ended: Ended,
}

/// Device and its memory limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Name of the device.
    pub name: String,
    /// Memory limit; `None` where there is none.
    pub limit: Option<Bytes>,
}

/// Test between steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Test {
    /// Number of the step before the test.
    pub step: usize,
    /// Loss; `None` if it is non-finite.
    pub loss: Option<f64>,
    /// Share of right answers.
    pub accuracy: Option<f64>,
}

/// Decision on the size of micro-batches: see [`Decision`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decided {
    /// Number of the step.
    pub step: usize,
    /// Largest number of samples in a micro-batch.
    pub size: usize,
    /// Result of the decision.
    pub outcome: RunOutcome,
    /// Reason, in words.
    pub why: String,
    /// Predicted need.
    pub predicted: Option<Bytes>,
    /// Measured need.
    pub measured: Option<Bytes>,
    /// Bytes that were free for this size.
    pub available: Bytes,
}

/// Result of a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RunOutcome {
    /// The size was run to measure its need or its rate.
    Tried,
    /// Memory ran out.
    Failed,
    /// The size was chosen.
    Chosen,
}

/// Timelines of a step, measured and simulated; one of them may be missing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Compared {
    /// Name of the step, with the reasons for keeping it.
    pub title: String,
    /// Measured timeline.
    pub measured: Option<TimelineRecord>,
    /// Simulated timeline. For a measured step: the same schedule with the mean time of each kind of action
    /// on each stage, and transfers that take no time.
    pub simulated: Option<TimelineRecord>,
}

/// End of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Ended {
    /// Nothing was run: the file records a plan.
    #[default]
    Planned,
    /// The run finished.
    Finished,
    /// The run was stopped on request.
    Stopped,
    /// The run failed with this error.
    Failed(String),
}

impl Run {
    /// Returns an empty run.
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

    /// Returns whether this decision has the same size, outcome and reason as the previous one.
    fn repeats(&self, before: &Self) -> bool {
        (self.size, self.outcome, &self.why) == (before.size, before.outcome, &before.why)
    }
}
