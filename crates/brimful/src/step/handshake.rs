//! Handshake of the ranks before a step.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use super::cut::{BatchRole, MicroBatches, PartSeed};
use super::trained::Trained;
use super::vote::Team;
use crate::auto::{Kind, Use};
use crate::batch::{self, Arranged, Batch, BatchError, Leaf, Samples};
use crate::world::WorldError;
use crate::{Error, Result};

/// A mini-batch as this rank brings it to a step.
pub(crate) struct StepRequest<'a> {
    samples: Result<Samples>,
    pub(crate) used: Use,
    /// Describes the samples, where an automatic size or other ranks need it.
    pub(super) kind: Box<dyn Fn() -> Kind + 'a>,
    /// Devices of its tensors.
    pub(crate) devices: Vec<Device>,
    /// Description of the mini-batch, where all ranks of a replica must bring the same one.
    hash: Option<String>,
}

impl<'a> StepRequest<'a> {
    /// Describes the inputs of a step.
    pub(crate) fn new(used: Use, arranged: &'a Arranged<'_, impl Batch>) -> Self {
        let batch = arranged.batch();
        Self {
            samples: arranged.samples(),
            used,
            kind: Box::new(move || Kind::of(used, batch)),
            devices: batch::devices(batch),
            hash: None,
        }
    }

    /// Returns whether gradients are computed.
    pub(super) fn is_training(&self) -> bool {
        matches!(self.used, Use::Train | Use::TrainWhole)
    }

    /// Adds a description, for ranks that must all bring the same mini-batch, such as the ranks of one pipeline.
    pub(crate) fn with_hash(self, described: String) -> Self {
        Self { hash: Some(described), ..self }
    }

    /// Adds the targets' devices, and the error if the targets do not fit the inputs.
    pub(crate) fn with(self, fits: Result<()>, devices: Vec<Device>) -> Self {
        let samples = self.samples.and_then(|samples| fits.map(|()| samples));
        Self { samples, devices: [self.devices, devices].concat(), ..self }
    }

    /// Fails the step if this result is an error. The handshake reports it to all ranks: a rank that returned
    /// earlier would leave the other ranks waiting.
    pub(crate) fn provided(self, holds: Result<()>) -> Self {
        let samples = holds.and(self.samples);
        Self { samples, ..self }
    }
}

/// This rank's side of the handshake, beside its mini-batch.
#[derive(Debug)]
pub(super) struct OwnPart {
    pub(super) size: MicroBatches,
    pub(super) seed: Option<u64>,
    pub(super) trained: Option<Trained>,
    pub(super) changed: bool,
    /// Rank in the world. Where each rank steps alone, only rank 0 has the step's first sample.
    pub(super) rank: usize,
}

impl OwnPart {
    /// Returns the message for the other ranks.
    fn hello(&self, samples: &Samples, request: &StepRequest<'_>) -> Result<StepHello> {
        let any = samples.count() > 0;
        // A size that cannot cut these samples fails here, so that all ranks get the error.
        if any {
            self.size.cut(samples)?;
        }
        Ok(StepHello {
            samples: samples.clone(),
            kind: any.then(|| (request.kind)().to_string()),
            hash: request.hash.clone(),
            size: format!("{:?}", self.size),
            seed: self.seed.unwrap_or_default(),
            trained: self.trained.clone(),
            changed: self.changed,
        })
    }
}

/// Message of one rank in the handshake.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct StepHello {
    samples: Samples,
    /// Kind in words; `None` where there is no sample.
    kind: Option<String>,
    hash: Option<String>,
    size: String,
    seed: u64,
    /// Trained parameters, where gradients go to other replicas before the step's end.
    trained: Option<Trained>,
    /// True if a variable of this rank has changed that has copies.
    changed: bool,
}

impl StepHello {
    /// Checks that the ranks' messages belong to one step. All ranks compare the same list, so all fail with the
    /// same error, and no rank waits for a rank that has returned.
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

    /// Returns the samples of each replica. The ranks of a replica bring the same samples, so only the message of
    /// its first rank counts.
    fn samples_of_replicas(all: &[Self], team: &Team) -> Result<Vec<Samples>> {
        let firsts = all.iter().step_by(team.ranks_of_replica());
        let samples: Vec<Samples> = firsts.map(|hello| hello.samples.clone()).collect();
        if samples.iter().all(|samples| samples.count() == 0) {
            return Err(BatchError::Empty.into());
        }
        Ok(samples)
    }
}

/// Result of the handshake, over all ranks.
#[derive(Debug)]
pub(crate) struct Handshake {
    /// Samples of each replica.
    samples: Vec<Samples>,
    replica: usize,
    /// True if this rank's replica has the step's first sample.
    pub(crate) first: bool,
    seed: Option<u64>,
    /// True if a variable of any rank has changed that has copies.
    pub(crate) changed: bool,
}

impl Handshake {
    /// Exchanges the messages of all ranks; all draw from the first rank's seed. Either all ranks send their
    /// trained parameters or none does.
    pub(super) fn open(
        team: &Team,
        request: &StepRequest<'_>,
        own: Result<OwnPart>,
    ) -> Result<Self> {
        let samples = request.samples.clone();
        if team.is_alone() {
            let OwnPart { seed, changed, rank, .. } = own?;
            let samples = vec![samples?];
            return Ok(Self { samples, replica: 0, first: rank == 0, seed, changed });
        }
        let samples = match samples {
            // An epoch's last mini-batch may not suffice for all replicas: a replica without a sample still takes
            // part, because the other replicas wait for its share of the sums.
            Err(Error::Batch(BatchError::Empty)) if team.replicas > 1 => Ok(Samples::default()),
            other => other,
        };
        // Reports every failure so far: this is the step's first collective.
        let own = own.and_then(|own| Ok((own, samples?)));
        let hello = own.as_ref().map_err(Error::clone);
        let hello = hello.and_then(|(own, samples)| own.hello(samples, request));
        let all = team.world.vote(&format!("{:?}", request.used), hello, Duration::ZERO)?;
        let (OwnPart { seed, .. }, own) = own?;
        StepHello::check(&all, team)?;
        let mut samples = StepHello::samples_of_replicas(&all, team)?;
        let replica = team.replica();
        // Includes the order of this rank's own samples, which other ranks do not need.
        samples[replica] = own;
        Ok(Self {
            first: samples.iter().position(|samples| samples.count() > 0) == Some(replica),
            samples,
            replica,
            seed: seed.map(|_| all[0].seed),
            changed: all.iter().any(|hello| hello.changed),
        })
    }

    /// Returns the number of samples of all replicas.
    pub(crate) fn total(&self) -> usize {
        self.samples.iter().map(Samples::count).sum()
    }

    /// Returns the smallest size of micro-batches that every sample fits in: one sample, or the tokens of the
    /// longest sample.
    pub(crate) fn least(&self) -> usize {
        self.samples.iter().map(Samples::least).max().unwrap_or(1)
    }

    /// Returns the samples of this rank's replica.
    pub(crate) fn own(&self) -> &Samples {
        &self.samples[self.replica]
    }

    /// Returns the samples of each replica before this rank's replica.
    pub(crate) fn before(&self) -> &[Samples] {
        &self.samples[..self.replica]
    }

    /// Returns the seed of the step's random numbers; `None` where the step draws as a plain loop does.
    pub(crate) fn seed(&self) -> Option<u64> {
        self.seed
    }

    /// Returns the role in the step of this rank's part, or of one of its replicas.
    pub(crate) fn role(&self, replica: usize) -> BatchRole {
        // Numbered so that a rank's first replica draws as the rank alone would, whatever the number of devices
        // in other ranks.
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

/// Fails if the values that are present differ.
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

/// Describes a mini-batch: dtypes, shapes, and a hash of some of its values.
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

/// Returns the bits of some values, evenly spaced over a tensor; `None` for a tensor on an accelerator.
fn sampled(tensor: &Tensor) -> Option<Vec<u64>> {
    /// Enough to distinguish mini-batches, few enough to read at every step.
    const VALUES: i64 = 64;
    let length = tensor.numel() as i64;
    // Reading from an accelerator would wait for all work queued there, at every step.
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
