//! Counts a step's loss: numerators and denominators on the device, read once at the end.

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::StepError;
use crate::Result;
use crate::loss::{Loss, LossError, MicroBatchWeight, Over, Term, Weight};

/// Policy for non-finite losses and gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NonFinitePolicy {
    /// Refuses a non-finite loss. This check costs nothing, because the loss is read at the end of the step
    /// anyway.
    #[default]
    RefuseLoss,
    /// Refuses a non-finite loss or gradient: within a micro-batch, whose number is reported, or as the
    /// gradient is committed (summed up, divided, cast to its parameter's dtype, and added to the existing
    /// one). Costs one more pass over the gradients for each micro-batch, and one at the end, for which the
    /// host waits.
    RefuseGradients,
    /// Refuses nothing.
    Allow,
}

/// Running sums of a step's terms.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    terms: Vec<TermTally>,
    /// Largest gradient of each micro-batch, in order, where that was requested.
    largest: Vec<Tensor>,
}

/// One term over all micro-batches.
#[derive(Debug)]
struct TermTally {
    over: TermOver,
    /// Value and weight by micro-batch; `None` for a micro-batch without this term.
    parts: Vec<Option<TermPart>>,
}

/// A term in one micro-batch: its value and weight, each a double of one element, and its factor.
#[derive(Debug)]
struct TermPart {
    value: Tensor,
    weight: Weight,
    factor: f64,
}

/// Denominator of a term's mean, without its value.
type TermOver = Over<()>;

/// A group of terms whose gradients have one common factor at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum TermGroup {
    /// Gradients that need no further division.
    Done,
    /// Gradients to be divided by the number of samples of all mini-batches.
    Samples,
    /// Gradients to be divided by the sum of the weights of this term.
    Term(usize),
}

/// Returns the groups, each once, in the order of their first terms.
pub(crate) fn distinct(groups: &[TermGroup]) -> Vec<TermGroup> {
    let mut seen = Vec::new();
    for group in groups {
        if !seen.contains(group) {
            seen.push(*group);
        }
    }
    seen
}

/// Returns the roots of each group's backward: the values of its terms that require a gradient, with the
/// gradients that `root` returns for a term and its number.
pub(crate) fn roots<'a>(
    terms: &'a [Term],
    groups: &[TermGroup],
    root: impl Fn(usize, &Term) -> Result<Option<Tensor>>,
) -> Result<Vec<Vec<(&'a Tensor, Tensor)>>> {
    let of_group = |group: TermGroup| {
        let mut roots = Vec::new();
        let leads = |n: usize, term: &Term| groups[n] == group && term.value.requires_grad();
        for (number, term) in terms.iter().enumerate().filter(|(n, term)| leads(*n, term)) {
            roots.extend(root(number, term)?.map(|gradient| (&term.value, gradient)));
        }
        Ok(roots)
    };
    distinct(groups).into_iter().map(of_group).collect()
}

impl Tally {
    /// Returns the tally of a loss on the outputs of all samples, which has no denominator, and the loss itself, from
    /// which the backward starts.
    pub(crate) fn of_whole(loss: Tensor) -> Result<(Self, Tensor)> {
        let mut terms = Loss::sum(loss).into_terms(true)?;
        let mut tally = Self::default();
        tally.count(&terms, &MicroBatchWeight { samples: 1.0, unit: 1.0, first: true })?;
        Ok((tally, terms.swap_remove(0).value))
    }

    /// Returns a tally for a later mini-batch of the same step, whose terms must be of the same kinds.
    pub(crate) fn following(&self) -> Self {
        let terms = self.terms.iter().map(|line| TermTally { parts: Vec::new(), ..*line });
        Self { terms: terms.collect(), largest: Vec::new() }
    }

    /// Counts one micro-batch's terms. They must be of the same kinds in every micro-batch.
    pub(crate) fn count(&mut self, terms: &[Term], part: &MicroBatchWeight) -> Result<()> {
        if self.terms.is_empty() {
            let new = |term: &Term| TermTally { over: over_of(term), parts: Vec::new() };
            self.terms = terms.iter().map(new).collect();
        }
        check_alike(self.overs(), terms.iter().map(over_of))?;
        for (line, term) in self.terms.iter_mut().zip(terms) {
            line.parts.push(counted(term, part)?);
        }
        Ok(())
    }

    pub(crate) fn add_largest(&mut self, largest: Option<Tensor>) -> Result<()> {
        let double = |largest: Tensor| largest.f_to_kind(Kind::Double)?.f_view([1_i64]);
        self.largest.extend(largest.map(double).transpose()?);
        Ok(())
    }

    /// Fails if a later mini-batch, or another replica's part, has terms of other kinds.
    pub(crate) fn check_follows(&self, later: &Self) -> Result<()> {
        check_alike(self.overs(), later.overs())
    }

    fn overs(&self) -> impl ExactSizeIterator<Item = TermOver> {
        self.terms.iter().map(|line| line.over)
    }

    /// Adds a later mini-batch, or another replica's part, of the same step.
    pub(crate) fn extend(&mut self, later: Self) -> Result<()> {
        self.check_follows(&later)?;
        for (mine, theirs) in self.terms.iter_mut().zip(later.terms) {
            mine.parts.extend(theirs.parts);
        }
        self.largest.extend(later.largest);
        Ok(())
    }

    /// Copies all numbers to the host, in one transfer, so that numbers of other devices can be added.
    pub(crate) fn fetch(&mut self) -> Result<()> {
        // Reading each number by itself would wait for the device each time. This waits once for all numbers.
        let Some(all) = self.on_host()? else { return Ok(()) };
        let mut numbers = all.f_split(1, 0)?.into_iter();
        let mut put = |place: &mut Tensor| {
            if let Some(number) = numbers.next() {
                *place = number;
            }
        };
        let parts = self.terms.iter_mut().flat_map(|line| line.parts.iter_mut().flatten());
        for TermPart { value, weight, .. } in parts {
            put(value);
            if let Weight::Tensor(weight) = weight {
                put(weight);
            }
        }
        self.largest.iter_mut().for_each(put);
        Ok(())
    }

    /// Returns each term's group. The samples of a single mini-batch are known beforehand, so nothing is left
    /// to divide by.
    pub(crate) fn groups(&self, single: bool) -> Vec<TermGroup> {
        let group = |(index, line): (usize, &TermTally)| match line.over {
            TermOver::Samples if !single => TermGroup::Samples,
            TermOver::Given(()) | TermOver::Undivided(()) => TermGroup::Term(index),
            _ => TermGroup::Done,
        };
        self.terms.iter().enumerate().map(group).collect()
    }

    /// Reads everything from the device, in one transfer.
    pub(crate) fn read(&self, policy: NonFinitePolicy) -> Result<Counted> {
        let all = self.on_host()?;
        let mut numbers = all.map_or(Ok(Vec::new()), |all| Vec::try_from(&all))?.into_iter();
        // A missing number would be a bug: NaN reveals it, while 0 would pass for a loss.
        let mut next = || numbers.next().unwrap_or(f64::NAN);
        let mut counted = Counted::default();
        for (index, line) in self.terms.iter().enumerate() {
            // Sums are in f64, because over thousands of micro-batches f32 would lose the digits by which losses
            // differ.
            let mut numerator = 0.0;
            let mut denominator = 0.0;
            for (micro_batch, part) in line.parts.iter().enumerate() {
                let Some(TermPart { weight, factor, .. }) = part else { continue };
                let value = next();
                let weight = match weight {
                    Weight::Number(number) => *number,
                    Weight::Tensor(_) => next(),
                };
                if policy != NonFinitePolicy::Allow && !(value.is_finite() && weight.is_finite()) {
                    return Err(
                        LossError::NonFinite { term: index, micro_batch, value, weight }.into()
                    );
                }
                let summand =
                    if line.over == TermOver::Undivided(()) { value } else { value * weight };
                numerator += summand * factor;
                denominator += weight;
            }
            counted.0.push(CountedTerm { over: line.over, numerator, denominator });
        }
        match (0..self.largest.len()).find(|_| !next().is_finite()) {
            Some(micro_batch) => Err(StepError::NonFiniteGradient { micro_batch }.into()),
            None => Ok(counted),
        }
    }

    /// Returns all numbers that are on the device, in the order of `read`, in one transfer.
    fn on_host(&self) -> Result<Option<Tensor>> {
        let parts = self.terms.iter().flat_map(|line| line.parts.iter().flatten());
        let mut tensors = Vec::new();
        for TermPart { value, weight, .. } in parts {
            tensors.push(value);
            if let Weight::Tensor(weight) = weight {
                tensors.push(weight);
            }
        }
        tensors.extend(&self.largest);
        if tensors.is_empty() {
            return Ok(None);
        }
        Ok(Some(Tensor::f_cat(&tensors, 0)?.f_to_device(Device::Cpu)?))
    }
}

fn over_of(term: &Term) -> TermOver {
    term.over.map(|_| ())
}

/// Fails if the terms differ in kind: they must agree wherever a step counts them.
fn check_alike(
    before: impl ExactSizeIterator<Item = TermOver>,
    now: impl ExactSizeIterator<Item = TermOver>,
) -> Result<()> {
    let differ = LossError::TermsDiffer { before: before.len(), now: now.len() };
    if before.eq(now) { Ok(()) } else { Err(differ.into()) }
}

/// Returns what a micro-batch contributes to a term; `None` if it contributes nothing.
fn counted(term: &Term, part: &MicroBatchWeight) -> Result<Option<TermPart>> {
    let weight = match &term.over {
        Over::Samples => Weight::Number(part.samples),
        // The mean over nothing is 0/0: a micro-batch of padding alone would make the whole loss NaN.
        Over::Given(Weight::Number(0.0)) => return Ok(None),
        Over::Given(Weight::Number(number)) | Over::Undivided(Weight::Number(number)) => {
            Weight::Number(*number)
        }
        Over::Given(Weight::Tensor(weight)) | Over::Undivided(Weight::Tensor(weight)) => {
            Weight::Tensor(double(&weight.f_to_device(term.value.device())?)?)
        }
        Over::Nothing => Weight::Number(1.0),
        Over::Once if part.first => Weight::Number(1.0),
        Over::Once => return Ok(None),
    };
    Ok(Some(TermPart { value: double(&term.value)?, weight, factor: term.factor }))
}

/// Converts a tensor of one element to a double.
pub(crate) fn double(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.f_detach()?.f_view([1_i64])?.f_to_kind(Kind::Double)?)
}

/// Terms of a loss over some micro-batches, on the host, where other parts can be added.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Counted(Vec<CountedTerm>);

#[derive(Debug, Clone, Serialize, Deserialize)]
struct CountedTerm {
    over: TermOver,
    /// Includes the term's factors.
    numerator: f64,
    denominator: f64,
}

impl Counted {
    /// Adds the counts of other parts of the same step.
    pub(crate) fn add(&mut self, others: Self) -> Result<()> {
        if self.0.is_empty() {
            *self = others;
            return Ok(());
        }
        // Ranks without a sample, and all but a pipeline's last stage, count nothing.
        if !others.0.is_empty() {
            let over = |line: &CountedTerm| line.over;
            check_alike(self.0.iter().map(over), others.0.iter().map(over))?;
        }
        for (mine, theirs) in self.0.iter_mut().zip(others.0) {
            mine.numerator += theirs.numerator;
            mine.denominator += theirs.denominator;
        }
        Ok(())
    }

    /// Divides each term's numerator by its denominator, and sums them up to the loss.
    pub(crate) fn totals(&self) -> Result<Totals> {
        let mut totals = Totals::default();
        for (term, &CountedTerm { over, numerator, denominator }) in self.0.iter().enumerate() {
            let divided = match over {
                TermOver::Nothing | TermOver::Once => numerator,
                _ if denominator == 0.0 => return Err(LossError::ZeroDenominator { term }.into()),
                _ => numerator / denominator,
            };
            totals.terms.push(divided);
            totals.loss += divided;
            totals.denominators.push(denominator);
        }
        Ok(totals)
    }
}

/// A step's loss.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    pub(crate) loss: f64,
    /// Terms of the loss.
    pub(crate) terms: Vec<f64>,
    denominators: Vec<f64>,
}

impl Totals {
    /// Returns the factor of a group's gradients, which have been divided by `unit` so far.
    pub(crate) fn factor(&self, group: TermGroup, unit: f64, samples: f64) -> f64 {
        match group {
            TermGroup::Done => 1.0,
            TermGroup::Samples => unit / samples,
            TermGroup::Term(index) => unit / self.denominators[index],
        }
    }
}
