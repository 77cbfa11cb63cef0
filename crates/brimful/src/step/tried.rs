//! What was run of a step over the parameters of one store, and can still be committed or undone.

use std::sync::{Mutex, PoisonError};

use brimful_torch::autograd::is_same;
use tch::Tensor;
use tch::nn::Variables;

use super::StepError;
use super::caught::into_error_or_panic;
use super::settle::{PartReport, SeenPart, Whole};
use super::tally::{NonFinite, Tally, TermGroup, distinct};
use super::trained::{Names, Trained, names};
use super::undo::Undo;
use crate::accumulate::{Finished, Named, Sums, check_dense, name_of};
use crate::batch::tensor_bytes;
use crate::bytes::Bytes;
use crate::ranks::RanksTurn;
use crate::statistics::{Moved, Pending, ReportedLayer};
use crate::{Error, Result, oom};

/// The number under which statistics are summed in a turn: buckets of gradients count from 0, and never
/// reach 4,294,967,294.
const STATISTICS_BUCKET: usize = u32::MAX as usize;

/// The same of statistics that move at every micro-batch.
const AT_ONCE_BUCKET: usize = STATISTICS_BUCKET - 1;

/// What a run has summed up: gradients, losses, and which terms' gradients have a common factor.
type Summed = (Sums, Tally, Vec<TermGroup>);

/// Mini-batches that were run, of which nothing is committed yet.
#[derive(Debug)]
pub(crate) struct Tried {
    /// Those that the sums are of: others may be trained by the time of the commit.
    parameters: Vec<Tensor>,
    variables: Named,
    /// For each variable that can be trained, whether it was.
    trained: Vec<bool>,
    pub(crate) sums: Sums,
    pub(crate) tally: Tally,
    groups: Vec<TermGroup>,
    pub(crate) undo: Undo,
    /// See [`crate::loss::MicroBatchWeight::unit`].
    pub(crate) unit: f64,
    pub(crate) sizes: Vec<usize>,
    /// The most memory used while pieces of it were run.
    pub(crate) peak: Bytes,
    /// Where running statistics go, as far as that was computed before the commit.
    moved: Option<Moved>,
    prepared: Option<(Finished, Moved)>,
}

impl Tried {
    /// What was run over these parameters, in micro-batches of these sizes.
    pub(crate) fn new(
        parameters: Vec<Tensor>,
        variables: &Named,
        (sums, tally, groups): Summed,
        undo: Undo,
        unit: f64,
        sizes: Vec<usize>,
    ) -> Self {
        Self {
            parameters,
            trained: trained(variables),
            variables: Named::clone(variables),
            sums,
            tally,
            groups,
            undo,
            unit,
            sizes,
            peak: Bytes(0),
            moved: None,
            prepared: None,
        }
    }

    /// How many samples were run.
    pub(crate) fn samples(&self) -> usize {
        self.sizes.iter().sum()
    }

    /// Whether layers of this library normalised micro-batches, each by itself.
    pub(crate) fn normalises(&self) -> bool {
        self.undo.statistics.show_the_cut()
    }

    /// Refuses where other parameters are trained now than those that the sums are of.
    pub(crate) fn check_trained(&self) -> Result<()> {
        let now = trained(&self.variables);
        if now == self.trained {
            return Ok(());
        }
        let count = |trained: &[bool]| trained.iter().filter(|trained| **trained).count();
        Err(StepError::TrainedChanged {
            samples: self.samples(),
            then: count(&self.trained),
            now: count(&now),
        }
        .into())
    }

    /// Makes its sums its own and its statistics ready to be added to those of the window, so that they
    /// outlast the step. Refuses a loss of other terms than the window's.
    pub(crate) fn make_lasting(&mut self, window: Option<&Self>) -> Result<()> {
        window.map_or(Ok(()), |window| window.tally.check_follows(&self.tally))?;
        // Sums may lie in the memory of captured work, which the next replay writes over.
        self.sums.own()?;
        self.undo.statistics.pool()
    }

    /// Brings the loss to the host, and lets `f` do the same with what else is to leave the device;
    /// undone where that fails.
    pub(crate) fn off_device<T>(
        mut self,
        f: impl FnOnce(&mut Pending) -> Result<T>,
    ) -> Result<(Self, T)> {
        let brought = oom::catch(|| {
            let value = f(&mut self.undo.statistics)?;
            self.tally.fetch()?;
            Ok(value)
        });
        // Before a panic goes on, because nobody above can undo what is dropped on its way.
        self.unless_failed(brought).map_err(into_error_or_panic)
    }

    /// The same with what else was done for the step; undone where that has failed.
    pub(crate) fn unless_failed<T, E: From<Error>>(
        self,
        done: Result<T, E>,
    ) -> Result<(Self, T), E> {
        match done {
            Ok(value) => Ok((self, value)),
            Err(error) => {
                self.undo.run()?;
                Err(error)
            }
        }
    }

    /// Adds a later mini-batch that was made lasting, or another replica's part; where their losses
    /// have other terms, it is as if it had not been run.
    pub(crate) fn extend(&mut self, mut later: Self) -> Result<()> {
        let pooled = later.undo.statistics.pool();
        if let Err(error) = pooled.and_then(|()| self.tally.extend(later.tally)) {
            later.undo.run()?;
            return Err(error);
        }
        // Not before the terms have been compared: once joined, the later part cannot be undone alone.
        self.undo.extend(later.undo);
        if !later.sums.is_empty() {
            let places = self.places_of(later.parameters);
            self.sums.extend(later.sums, &places)?;
        }
        self.sizes.extend(later.sizes);
        self.peak = self.peak.max(later.peak);
        Ok(())
    }

    /// Where each of these parameters is among its own, behind which new ones get their places: every
    /// mini-batch may have reached other leaves outside the store.
    fn places_of(&mut self, parameters: Vec<Tensor>) -> Vec<usize> {
        let mine = &mut self.parameters;
        let place = |(at, parameter): (usize, Tensor)| {
            // Nearly all are where they were.
            let here = mine.get(at).is_some_and(|mine| is_same(mine, &parameter));
            let found = || mine.iter().position(|mine| is_same(mine, &parameter));
            let known = if here { Some(at) } else { found() };
            known.unwrap_or_else(|| {
                mine.push(parameter);
                mine.len() - 1
            })
        };
        parameters.into_iter().enumerate().map(place).collect()
    }

    /// What has to be known of it to commit it together with others; where there are `others`, also
    /// what their sums need.
    pub(crate) fn tell(&mut self, policy: NonFinite, others: bool) -> Result<PartReport> {
        check_dense(&self.parameters, &self.variables)?;
        if !others {
            // Queued before the loss is read, which waits for the device: it has something to do then.
            self.moved = Some(self.undo.statistics.prepare()?);
        }
        let mut report = PartReport {
            counted: self.tally.read(policy)?,
            groups: distinct(&self.groups),
            samples: self.samples(),
            ..PartReport::default()
        };
        if others {
            let names = names(&self.variables);
            report.trained = Trained::of(&self.parameters, &names);
            report.present = self.sums.present(self.parameters.len());
            report.layers = self.undo.statistics.layers(|t| names.of(t).map(str::to_owned));
            report.at_once = self.moved_at_once(&names)?;
        }
        Ok(report)
    }

    /// The names of statistics that were moved at every micro-batch, by choice or by layers that know no other way.
    fn moved_at_once(&self, names: &Names) -> Result<Vec<String>> {
        let Undo { statistics, unmanaged, .. } = &self.undo;
        let foreign: Vec<_> =
            unmanaged.iter().filter(|(running, _)| !statistics.knows(running)).collect();
        let moved = differ(&foreign)?;
        let foreign = foreign.iter().zip(moved).filter_map(|((t, _), moved)| moved.then_some(t));
        let all = statistics.moved_at_once().chain(foreign);
        let mut all: Vec<_> = all.filter_map(|t| names.of(t).map(str::to_owned)).collect();
        all.sort();
        Ok(all)
    }

    /// Computes all that a commit needs. `part` says which of the whole's parts this is, and `turn`
    /// where its sums are added to those of other ranks, if there are such.
    pub(crate) fn prepare(
        &mut self,
        whole: &Whole,
        part: usize,
        turn: Option<&RanksTurn>,
    ) -> Result<()> {
        let sums = std::mem::take(&mut self.sums);
        let factors = whole.factors(self.unit);
        let mut first_ones = Moved::default();
        let gradients = match turn {
            None => sums.finish(&self.parameters, &factors)?,
            Some(turn) => {
                // All ranks call these in one order: a sum is the same call on each of them.
                self.sum_statistics(&whole.part(part).layers, turn)?;
                first_ones = self.first_ones(whole.part(part), turn)?;
                self.sum_gradients(sums, &factors, whole, part, turn)?
            }
        };
        let mut moved = self.moved.take().map_or_else(|| self.undo.statistics.prepare(), Ok)?;
        moved.extend(first_ones);
        self.prepared = Some((gradients, moved));
        Ok(())
    }

    /// Makes what layers have seen here what they have seen on all ranks.
    fn sum_statistics(&mut self, layers: &[ReportedLayer], turn: &RanksTurn) -> Result<()> {
        if layers.is_empty() {
            return Ok(());
        }
        let names = names(&self.variables);
        let statistics = &mut self.undo.statistics;
        statistics.sum_over_ranks(turn, STATISTICS_BUCKET, layers.iter().cloned(), |name| {
            names.tensor(name)
        })
    }

    /// Statistics that move at every micro-batch, as the first replica that has samples has moved them: each by
    /// its own, ranks would come to have different models.
    fn first_ones(&self, seen: &SeenPart, turn: &RanksTurn) -> Result<Moved> {
        let names = names(&self.variables);
        // Of a layer that moves once a step a replica that has never run it knows no better than to list it.
        let is_deferred = |name: &str| seen.layers.iter().any(|layer| layer.has(name));
        let mut all = Moved::default();
        for (bucket, (replica, listed)) in seen.at_once.iter().enumerate() {
            let listed = listed.iter().filter(|name| !is_deferred(name));
            let running = listed.filter_map(|name| names.tensor(name)).collect();
            all.extend(Moved::as_at(*replica, running, turn, AT_ONCE_BUCKET - bucket)?);
        }
        Ok(all)
    }

    fn sum_gradients(
        &self,
        sums: Sums,
        factors: &[f64],
        whole: &Whole,
        part: usize,
        turn: &RanksTurn,
    ) -> Result<Finished> {
        let present = &whole.part(part).present;
        // An evaluation has none on any rank, and nothing is to be sent for it.
        if !present.contains(&true) {
            return Ok(Finished(Vec::new()));
        }
        // In a step of one mini-batch all have divided by the same unit until now, so that a single
        // group's factor is the same on all, and gradients may have set out before it was known.
        let alike = factors.len() <= 1 && self.unit == whole.samples;
        sums.finish_over_ranks(&self.parameters, factors, alike, turn, present)
    }

    /// The gradients that are ready, one a parameter, and the parameters.
    pub(crate) fn prepared(&mut self) -> Option<(&[Tensor], &mut Finished)> {
        let Self { parameters, prepared, .. } = self;
        prepared.as_mut().map(|(gradients, _)| (&**parameters, gradients))
    }

    /// Refuses gradients that are ready and would not be finite once they are committed, if they are to be.
    pub(crate) fn check_finite(&self, policy: NonFinite) -> Result<()> {
        let wanted = policy == NonFinite::RefuseGradients;
        let Some((gradients, _)) = self.prepared.as_ref().filter(|_| wanted) else {
            return Ok(());
        };
        let Some((at, kind)) = gradients.first_non_finite(&self.parameters)? else { return Ok(()) };
        let parameter = name_of(&self.parameters[at], &self.variables);
        Err(StepError::NonFiniteSum { parameter, kind }.into())
    }

    /// Lets it stand. Nothing is allocated.
    pub(crate) fn commit(&mut self) -> Result<()> {
        // Added and copied in place. An allocation here could fail when half of the parameters have their
        // gradients already, and nothing would be left to go back to.
        let Some((gradients, moved)) = self.prepared.take() else { return Ok(()) };
        gradients.apply(&mut self.parameters)?;
        moved.apply()
    }
}

/// Whether each tensor differs from the other one; the host waits once.
fn differ(pairs: &[&(Tensor, Tensor)]) -> Result<Vec<bool>> {
    if pairs.is_empty() {
        return Ok(Vec::new());
    }
    let differ = |(one, other): &&(Tensor, Tensor)| Ok(one.f_ne_tensor(other)?.f_any()?);
    let all = Tensor::f_stack(&pairs.iter().map(differ).collect::<Result<Vec<_>>>()?, 0)?;
    Ok(Vec::try_from(all)?)
}

/// Whether each variable that can be trained is.
fn trained(variables: &Mutex<Variables>) -> Vec<bool> {
    let variables = variables.lock().unwrap_or_else(PoisonError::into_inner);
    variables.trainable_variables.iter().map(|variable| variable.tensor.requires_grad()).collect()
}

/// The variables that are being trained.
pub(crate) fn parameters(variables: &Mutex<Variables>) -> Vec<Tensor> {
    let variables = variables.lock().unwrap_or_else(PoisonError::into_inner);
    let all = variables.trainable_variables.iter().map(|variable| &variable.tensor);
    all.filter(|tensor| tensor.requires_grad()).map(Tensor::shallow_clone).collect()
}

/// What a step's gradients take.
pub(crate) fn gradient_bytes(variables: &Mutex<Variables>) -> u64 {
    parameters(variables).iter().map(tensor_bytes).sum()
}
