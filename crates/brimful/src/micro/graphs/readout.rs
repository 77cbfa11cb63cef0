//! Loss of a micro-batch in one row, read out after each replay.

use tch::Tensor;

use crate::Result;
use crate::loss::{Term, Weight};
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

    /// Copies the current numbers into a new row.
    pub(super) fn copied(&self) -> Result<Self> {
        let row = self.row.f_detach_copy()?;
        Ok(Self { terms: viewed(&self.terms, &row)?, row })
    }
}

/// Returns these terms with their numbers as views of the row.
fn viewed(terms: &[Term], row: &Tensor) -> Result<Vec<Term>> {
    let mut numbers = row.f_split(1, 0)?.into_iter();
    let mut number = || numbers.next().expect("a row has all numbers of its terms");
    let view = |term: &Term| Term {
        value: number(),
        over: term.over.map(|weight| match weight {
            Weight::Number(weight) => Weight::Number(*weight),
            Weight::Tensor(_) => Weight::Tensor(number()),
        }),
        factor: term.factor,
    };
    Ok(terms.iter().map(view).collect())
}
