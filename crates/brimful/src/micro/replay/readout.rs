//! The numbers of a micro-batch's loss side by side in one tensor, read out after each replay.

use tch::Tensor;

use crate::Result;
use crate::loss::{Over, Term, Weight};
use crate::step::double;

/// Terms whose values and weights are views of one row of doubles.
#[derive(Debug)]
pub(super) struct Readout {
    pub(super) row: Tensor,
    pub(super) terms: Vec<Term>,
}

impl Readout {
    /// Writes the terms' numbers into a new row.
    pub(super) fn of(terms: &[Term]) -> Result<Self> {
        let mut numbers = Vec::new();
        for term in terms {
            numbers.push(double(&term.value)?);
            if let Some(Weight::Tensor(weight)) = term.over.weight() {
                numbers.push(double(&weight.f_to_device(term.value.device())?)?);
            }
        }
        let row = Tensor::f_cat(&numbers, 0)?;
        Ok(Self { terms: viewed(terms, &row)?, row })
    }

    /// The same as they are now, in a row of their own.
    pub(super) fn copied(&self) -> Result<Self> {
        let row = self.row.f_detach_copy()?;
        Ok(Self { terms: viewed(&self.terms, &row)?, row })
    }
}

/// The same terms with their numbers in the row.
fn viewed(terms: &[Term], row: &Tensor) -> Result<Vec<Term>> {
    let mut next = 0;
    let mut number = || {
        next += 1;
        row.f_narrow(0, next - 1, 1)
    };
    let view = |term: &Term| {
        let value = number()?;
        let over = match &term.over {
            Over::Samples => Over::Samples,
            Over::Given(Weight::Number(weight)) => Over::Given(Weight::Number(*weight)),
            Over::Given(Weight::Tensor(_)) => Over::Given(Weight::Tensor(number()?)),
            Over::Undivided(Weight::Number(weight)) => Over::Undivided(Weight::Number(*weight)),
            Over::Undivided(Weight::Tensor(_)) => Over::Undivided(Weight::Tensor(number()?)),
            Over::Nothing => Over::Nothing,
            Over::Once => Over::Once,
        };
        Ok(Term { value, over, factor: term.factor })
    };
    terms.iter().map(view).collect()
}
