//! Rows of a table by their numbers, such as those that stand for tokens.

use brimful_torch::projection as torch;
use tch::Tensor;

use crate::Result;

/// The table's rows at these places. On a card its gradient is added to the step's sum row by row, always in the same
/// order, and the table is not gone through for it.
///
/// # Errors
/// When the places are no integers, or memory runs out.
pub fn embedding(table: &Tensor, places: &Tensor) -> Result<Tensor> {
    Ok(torch::embedding(table, places)?)
}
