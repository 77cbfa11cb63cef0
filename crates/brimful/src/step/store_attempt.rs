//! An attempt over the parameters of one store, which can be committed or rolled back.

use std::sync::{Mutex, PoisonError};

use brimful_torch::autograd::is_same;
use tch::Tensor;
use tch::nn::Variables;

use super::StepError;
use super::tally::{NonFinitePolicy, Tally, TermGroup, distinct};
use super::trained::{Names, Trained, names};
use super::undo::Undo;
use super::vote::{PartReport, SeenPart, Whole};
use crate::accumulate::{Finished, Named, Sums, Total, check_dense, name_of, parameters};
use crate::batch::tensor_bytes;
use crate::oom::into_error_or_panic;
use crate::ranks::RankSum;
use crate::statistics::{Moved, Pending, ReportedLayer};
use crate::{Error, Result, oom};
use brimful_plan::bytes::Bytes;

/// Bucket number of summed statistics: buckets of gradients count from 0, and never reach 4,294,967,294.
const STATISTICS_BUCKET: usize = u32::MAX as usize;

/// Bucket number of statistics that move at every micro-batch.
const AT_ONCE_BUCKET: usize = STATISTICS_BUCKET - 1;

/// Sums of a run: gradients, losses, and the group of each term.
type Summed = (Sums, Tally, Vec<TermGroup>);

/// Mini-batches that have run and are not committed.
#[derive(Debug)]
pub(crate) struct StoreAttempt {
    /// Parameters of the sums. Different parameters may be trained by the time of the commit.
    parameters: Vec<Tensor>,
    variables: Named,
    /// Flag of each trainable variable: true if it was trained.
    trained: Vec<bool>,
    pub(crate) sums: Sums,
    pub(crate) tally: Tally,
    groups: Vec<TermGroup>,
    pub(crate) undo: Undo,
    /// See [`crate::loss::MicroBatchWeight::unit`].
    pub(crate) unit: f64,
    pub(crate) sizes: Vec<usize>,
    /// Peak memory while the mini-batch's pieces were running.
    pub(crate) peak: Bytes,
    /// Updates of running statistics, if they were computed before the commit.
    moved: Option<Moved>,
    /// Gradients that are summed and not cast yet.
    pub(crate) total: Total,
    prepared: Option<(Finished, Moved)>,
}

impl StoreAttempt {
    /// Creates an attempt over these parameters, in micro-batches of these sizes.
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
            total: Total::default(),
            prepared: None,
        }
    }

    /// Returns the number of samples that have run.
    pub(crate) fn samples(&self) -> usize {
        self.sizes.iter().sum()
    }

    /// Returns whether layers of this library normalised micro-batches, each by its own statistics.
    pub(crate) fn normalises(&self) -> bool {
        self.undo.statistics.depends_on_cut()
    }

    /// Fails if the trained parameters have changed since the sums were computed.
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

    /// Detaches the attempt's sums from memory that later steps reuse, and pools its statistics, so that both can
    /// wait for the window's commit. Fails if its loss has other terms than the window's.
    pub(crate) fn detach(&mut self, window: Option<&Self>) -> Result<()> {
        window.map_or(Ok(()), |window| window.tally.check_follows(&self.tally))?;
        // Sums may lie in the memory of a CUDA graph, which the next replay overwrites.
        self.sums.own()?;
        self.undo.statistics.pool()
    }

    /// Copies the loss to the host, and lets `f` copy statistics; rolls back if that fails.
    pub(crate) fn off_device<T>(
        mut self,
        f: impl FnOnce(&mut Pending) -> Result<T>,
    ) -> Result<(Self, T)> {
        let fetched = oom::catch(|| {
            let value = f(&mut self.undo.statistics)?;
            self.tally.fetch()?;
            Ok(value)
        });
        // Rolled back before a panic resumes: no caller could do it for an attempt that unwinding drops.
        self.unless_failed(fetched).map_err(into_error_or_panic)
    }

    /// Adds the result of other work for the step; rolls back if that has failed.
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

    /// Merges a later mini-batch that was detached, or another replica's part. If the loss of the later part has
    /// different terms, the later part is rolled back as if it had not run.
    pub(crate) fn extend(&mut self, mut later: Self) -> Result<()> {
        let pooled = later.undo.statistics.pool();
        if let Err(error) = pooled.and_then(|()| self.tally.extend(later.tally)) {
            later.undo.run()?;
            return Err(error);
        }
        // Merged only after the terms have been compared, because a merged part cannot be rolled back alone.
        self.undo.extend(later.undo);
        if !later.sums.is_empty() {
            let places = self.places_of(later.parameters);
            self.sums.extend(later.sums, &places)?;
        }
        self.sizes.extend(later.sizes);
        self.peak = self.peak.max(later.peak);
        Ok(())
    }

    /// Returns the index of each of these parameters in `self.parameters`, and appends new parameters: every
    /// mini-batch may have reached different leaves outside the store.
    fn places_of(&mut self, parameters: Vec<Tensor>) -> Vec<usize> {
        let mine = &mut self.parameters;
        let place = |(at, parameter): (usize, Tensor)| {
            // Nearly all parameters have the same index in both lists.
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

    /// Returns the report that a commit needs. With `others`, the report also describes this part's sums to other
    /// ranks.
    pub(crate) fn report(&mut self, policy: NonFinitePolicy, others: bool) -> Result<PartReport> {
        check_dense(&self.parameters, &self.variables)?;
        if !others {
            // Queued before the loss is read, which waits for the device: so the device has work meanwhile.
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

    /// Returns the names of statistics that were moved at every micro-batch, by choice or by layers that cannot
    /// defer them.
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

    /// Computes all that a commit needs, except the cast of the gradients. `part` is this attempt's index among
    /// the parts of the `whole`; `collective` is the channel on which its sums are added to the sums of other
    /// ranks, if there are any.
    pub(crate) fn sum_up(
        &mut self,
        whole: &Whole,
        part: usize,
        collective: Option<&RankSum>,
    ) -> Result<()> {
        let sums = std::mem::take(&mut self.sums);
        let factors = whole.factors(self.unit);
        let mut first_ones = Moved::default();
        self.total = match collective {
            None => sums.total(self.parameters.len(), &factors)?,
            Some(collective) => {
                // All ranks must make these collective calls in the same order.
                self.sum_statistics(&whole.part(part).layers, collective)?;
                first_ones = self.first_ones(whole.part(part), collective)?;
                self.sum_gradients(sums, &factors, whole, part, collective)?
            }
        };
        let mut moved = self.moved.take().map_or_else(|| self.undo.statistics.prepare(), Ok)?;
        moved.extend(first_ones);
        self.moved = Some(moved);
        Ok(())
    }

    /// Casts the gradients to their parameters' dtypes, once nothing is added to them any more.
    pub(crate) fn cast(&mut self) -> Result<()> {
        let gradients = std::mem::take(&mut self.total).finish(&self.parameters)?;
        self.prepared = Some((gradients, self.moved.take().unwrap_or_default()));
        Ok(())
    }

    /// Sums the statistics of these layers over all ranks.
    fn sum_statistics(&mut self, layers: &[ReportedLayer], collective: &RankSum) -> Result<()> {
        if layers.is_empty() {
            return Ok(());
        }
        let names = names(&self.variables);
        let statistics = &mut self.undo.statistics;
        statistics.sum_over_ranks(collective, STATISTICS_BUCKET, layers.iter().cloned(), |name| {
            names.tensor(name)
        })
    }

    /// Takes statistics that move at every micro-batch from the first replica that has samples: otherwise the
    /// ranks' models would drift apart.
    fn first_ones(&self, seen: &SeenPart, collective: &RankSum) -> Result<Moved> {
        let names = names(&self.variables);
        // A replica that has never run a deferred layer lists its statistics here too.
        let is_deferred = |name: &str| seen.layers.iter().any(|layer| layer.has(name));
        let mut all = Moved::default();
        for (bucket, (replica, listed)) in seen.at_once.iter().enumerate() {
            let listed = listed.iter().filter(|name| !is_deferred(name));
            let running = listed.filter_map(|name| names.tensor(name)).collect();
            all.extend(Moved::as_at(*replica, running, collective, AT_ONCE_BUCKET - bucket)?);
        }
        Ok(all)
    }

    fn sum_gradients(
        &self,
        sums: Sums,
        factors: &[f64],
        whole: &Whole,
        part: usize,
        collective: &RankSum,
    ) -> Result<Total> {
        let present = &whole.part(part).present;
        // An evaluation has no gradient on any rank, and sends nothing.
        if !present.contains(&true) {
            return Ok(Total::default());
        }
        // In a step of one mini-batch all ranks divide by the same unit. So a single group's factor is the same on
        // all ranks, and gradients may be in flight before the factor is known.
        let alike = factors.len() <= 1 && self.unit == whole.samples;
        sums.total_over_ranks(&self.parameters, factors, alike, collective, present)
    }

    /// Adds gradients of copies of its parameters, by index, on the devices where the parameters are stored.
    pub(crate) fn add(&mut self, gradients: Vec<(usize, Tensor)>) -> Result<()> {
        let mut placed: Vec<_> = self.parameters.iter().map(|_| None).collect();
        for (at, gradient) in gradients {
            // The parameter's device need not be the device that computes.
            placed[at] = Some(gradient.f_to_device(self.parameters[at].device())?);
        }
        self.total.add(placed)
    }

    /// Fails if the policy refuses non-finite gradients and a prepared gradient would not be finite once
    /// committed.
    pub(crate) fn check_finite(&self, policy: NonFinitePolicy) -> Result<()> {
        let wanted = policy == NonFinitePolicy::RefuseGradients;
        let Some((gradients, _)) = self.prepared.as_ref().filter(|_| wanted) else {
            return Ok(());
        };
        let Some((at, kind)) = gradients.first_non_finite(&self.parameters)? else { return Ok(()) };
        let parameter = name_of(&self.parameters[at], &self.variables);
        Err(StepError::NonFiniteSum { parameter, kind }.into())
    }

    /// Commits. Allocates nothing.
    pub(crate) fn commit(&mut self) -> Result<()> {
        // Added and copied in place. An allocation could fail when half of the parameters already have their
        // gradients, and then there is no way back.
        let Some((gradients, moved)) = self.prepared.take() else { return Ok(()) };
        gradients.apply(&mut self.parameters)?;
        moved.apply()
    }
}

/// Returns for each pair whether its tensors differ; the host waits once.
fn differ(pairs: &[&(Tensor, Tensor)]) -> Result<Vec<bool>> {
    if pairs.is_empty() {
        return Ok(Vec::new());
    }
    let differ = |(one, other): &&(Tensor, Tensor)| Ok(one.f_ne_tensor(other)?.f_any()?);
    let all = Tensor::f_stack(&pairs.iter().map(differ).collect::<Result<Vec<_>>>()?, 0)?;
    Ok(Vec::try_from(all)?)
}

/// Returns whether each trainable variable is trained.
fn trained(variables: &Mutex<Variables>) -> Vec<bool> {
    let variables = variables.lock().unwrap_or_else(PoisonError::into_inner);
    variables.trainable_variables.iter().map(|variable| variable.tensor.requires_grad()).collect()
}

/// Returns the bytes of a step's gradients.
pub(crate) fn gradient_bytes(variables: &Mutex<Variables>) -> u64 {
    parameters(variables).iter().map(tensor_bytes).sum()
}
