//! What ranks tell each other before a step.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use super::role::{BatchRole, PartSeed};
use super::settle::Team;
use super::size::Size;
use super::trained::Trained;
use crate::auto::{Kind, Use};
use crate::batch::{self, Arranged, Batch, BatchError, Leaf, Samples};
use crate::world::WorldError;
use crate::{Error, Result};

/// A mini-batch as this rank brings it to a step.
#[derive(Debug)]
pub(crate) struct Brought {
    samples: Result<Samples>,
    pub(crate) kind: Kind,
    /// Of its tensors.
    pub(crate) devices: Vec<Device>,
    /// What tells it from others, where all ranks of a replica must bring the same.
    hash: Option<String>,
}

impl Brought {
    /// The inputs of a step, with what belongs to them.
    pub(crate) fn new(used: Use, arranged: &Arranged<'_, impl Batch>) -> Self {
        let batch = arranged.batch();
        Self {
            samples: arranged.samples(),
            kind: Kind::of(used, batch),
            devices: batch::devices(batch),
            hash: None,
        }
    }

    /// The same for ranks that must all bring the same, as those of one pipeline.
    pub(crate) fn with_hash(self, described: String) -> Self {
        Self { hash: Some(described), ..self }
    }

    /// The same with what comes beside it, which may be of other samples.
    pub(crate) fn with(self, fits: Result<()>, devices: Vec<Device>) -> Self {
        let samples = self.samples.and_then(|samples| fits.map(|()| samples));
        Self { samples, devices: [self.devices, devices].concat(), ..self }
    }

    /// The same, refused where this is: by the opening, which tells all ranks. Who returned before it would
    /// leave the others waiting.
    pub(crate) fn provided(self, holds: Result<()>) -> Self {
        let samples = holds.and(self.samples);
        Self { samples, ..self }
    }
}

/// What this rank knows of a step beside its mini-batch.
#[derive(Debug)]
pub(super) struct OwnPart {
    pub(super) size: Size,
    pub(super) seed: Option<u64>,
    pub(super) trained: Option<Trained>,
    pub(super) changed: bool,
    /// In the world; where it takes its step alone, the first rank has the first sample all the same.
    pub(super) rank: usize,
}

impl OwnPart {
    /// What the others are told of it.
    fn hello(&self, samples: &Samples, kind: &Kind, hash: Option<String>) -> Result<StepHello> {
        let any = samples.count() > 0;
        // A size that cannot cut these samples is refused here, where all ranks still hear of it.
        if any {
            self.size.cut(samples)?;
        }
        Ok(StepHello {
            samples: samples.clone(),
            kind: any.then(|| kind.to_string()),
            hash,
            size: format!("{:?}", self.size),
            seed: self.seed.unwrap_or_default(),
            trained: self.trained.clone(),
            changed: self.changed,
        })
    }
}

/// What one rank has.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct StepHello {
    samples: Samples,
    /// In words; none where there is no sample.
    kind: Option<String>,
    hash: Option<String>,
    size: String,
    seed: u64,
    /// Where gradients set out before the step's end.
    trained: Option<Trained>,
    /// Whether something was changed that other ranks have copies of.
    changed: bool,
}

impl StepHello {
    /// Makes sure that what all ranks bring can be one step. All of them compare the same list, so that
    /// all fail with the same error, and none waits for one that has returned.
    fn check(all: &[Self], team: &Team) -> Result<()> {
        check_alike("the micro-batch size", all.iter().map(|hello| Some(hello.size.clone())))?;
        let trained: Vec<_> = all.iter().filter_map(|hello| hello.trained.as_ref()).collect();
        Trained::check_replicas(&trained, team.ranks_of_replica())?;
        check_alike("a sample", all.iter().map(|hello| hello.kind.clone()))?;
        for replica in all.chunks(team.ranks_of_replica()) {
            check_alike("the mini-batch", replica.iter().map(|hello| hello.hash.clone()))?;
        }
        Ok(())
    }

    /// Samples of each replica, whose ranks all bring the same: the first of them counts.
    fn samples_of_replicas(all: &[Self], team: &Team) -> Result<Vec<Samples>> {
        let firsts = all.iter().step_by(team.ranks_of_replica());
        let samples: Vec<Samples> = firsts.map(|hello| hello.samples.clone()).collect();
        if samples.iter().all(|samples| samples.count() == 0) {
            return Err(BatchError::Empty.into());
        }
        Ok(samples)
    }
}

/// What all ranks have.
#[derive(Debug)]
pub(crate) struct Opening {
    /// Samples of each replica.
    samples: Vec<Samples>,
    replica: usize,
    /// Whether this rank's replica has the step's first sample.
    pub(crate) first: bool,
    seed: Option<u64>,
    /// Whether something was changed that has copies elsewhere.
    pub(crate) changed: bool,
    /// Of this rank's samples, be they none.
    pub(crate) kind: Kind,
}

impl Opening {
    /// Tells and hears what each has; all ranks draw from the first one's seed. All of them say what
    /// they train, or none does.
    pub(super) fn open(team: &Team, brought: Brought, own: Result<OwnPart>) -> Result<Self> {
        let Brought { samples, kind, hash, .. } = brought;
        if team.is_alone() {
            let OwnPart { seed, changed, rank, .. } = own?;
            let samples = vec![samples?];
            return Ok(Self { samples, replica: 0, first: rank == 0, seed, changed, kind });
        }
        let samples = match samples {
            // An epoch's last mini-batch may not suffice for all replicas: one without a sample takes
            // part with nothing, because the others wait for its share of the sums.
            Err(Error::Batch(BatchError::Empty)) if team.replicas > 1 => Ok(Samples::default()),
            other => other,
        };
        // Whatever has gone wrong here until now is told: this is the first that ranks hear of each other.
        let own = own.and_then(|own| Ok((own, samples?)));
        let hello = own.as_ref().map_err(Error::clone);
        let hello = hello.and_then(|(own, samples)| own.hello(samples, &kind, hash));
        let all = team.world.settle(&format!("{:?}", kind.used), hello, Duration::ZERO)?;
        let (OwnPart { seed, .. }, own) = own?;
        StepHello::check(&all, team)?;
        let mut samples = StepHello::samples_of_replicas(&all, team)?;
        let replica = team.replica();
        // With the order of its own mini-batch, which others need not know.
        samples[replica] = own;
        Ok(Self {
            first: samples.iter().position(|samples| samples.count() > 0) == Some(replica),
            samples,
            replica,
            seed: seed.map(|_| all[0].seed),
            changed: all.iter().any(|hello| hello.changed),
            kind,
        })
    }

    /// Samples of all replicas.
    pub(crate) fn total(&self) -> usize {
        self.samples.iter().map(Samples::count).sum()
    }

    /// The least that a micro-batch has that any sample fits in: one, or the longest one's tokens.
    pub(crate) fn least(&self) -> usize {
        self.samples.iter().map(Samples::least).max().unwrap_or(1)
    }

    /// Samples of this rank's replica.
    pub(crate) fn own(&self) -> &Samples {
        &self.samples[self.replica]
    }

    /// Samples of the replicas before this rank's.
    pub(crate) fn before(&self) -> &[Samples] {
        &self.samples[..self.replica]
    }

    /// The seed of the step's random numbers, where it does not draw as a plain loop does.
    pub(crate) fn seed(&self) -> Option<u64> {
        self.seed
    }

    /// What this rank's part, or that of one of its replicas, is to the step.
    pub(crate) fn role(&self, replica: usize) -> BatchRole {
        // Numbered so that a rank's first replica draws as the rank alone would, whatever the number of
        // devices that others have.
        let part = self.replica + replica * self.samples.len();
        BatchRole {
            unit: self.total() as f64,
            first: self.first && replica == 0,
            begins: true,
            last: true,
            seed: self.seed.map(|seed| PartSeed { seed, part }),
        }
    }
}

/// Ranks that have something must have the same.
fn check_alike(what: &str, found: impl Iterator<Item = Option<String>>) -> Result<()> {
    let found: Vec<Option<String>> = found.collect();
    let mut some = found.iter().flatten();
    let first = some.next().cloned();
    if some.all(|other| Some(other) == first.as_ref()) {
        return Ok(());
    }
    let found = found.into_iter().map(|found| found.unwrap_or_else(|| "none".into())).collect();
    Err(WorldError::Differs { what: what.to_owned(), found }.into())
}

/// What tells a mini-batch from others: kinds, shapes, and a hash of some of its values.
pub(crate) fn described(batch: &impl Batch) -> String {
    let tensors = batch::leaves(batch).into_iter().map(Leaf::tensor);
    tensors.map(described_tensor).collect::<Vec<_>>().join(", ")
}

fn described_tensor(tensor: &Tensor) -> String {
    if !tensor.defined() {
        return "undefined".to_owned();
    }
    let kind = tensor.kind();
    let shape = tensor.size();
    match sampled(tensor) {
        Some(values) => {
            let mut hasher = DefaultHasher::new();
            values.hash(&mut hasher);
            format!("{kind:?} {shape:?} #{:04x}", hasher.finish() & 0xffff)
        }
        None => format!("{kind:?} {shape:?}"),
    }
}

/// The bits of some values from all over a tensor, where reading them costs nothing.
fn sampled(tensor: &Tensor) -> Option<Vec<u64>> {
    /// Enough to tell mini-batches apart, few enough to be read at every step.
    const VALUES: i64 = 64;
    let length = tensor.numel() as i64;
    // Reading from an accelerator would wait for all that is queued there, at every step.
    if tensor.device() != Device::Cpu || length == 0 {
        return None;
    }
    let double = (tch::Kind::Double, Device::Cpu);
    let places = Tensor::f_linspace(0, length - 1, VALUES.min(length), double).ok()?;
    let places = places.f_to_kind(tch::Kind::Int64).ok()?;
    let values = tensor.f_detach().ok()?.f_take(&places).ok()?.f_to_kind(tch::Kind::Double).ok()?;
    let values = Vec::<f64>::try_from(&values).ok()?;
    Some(values.into_iter().map(f64::to_bits).collect())
}
