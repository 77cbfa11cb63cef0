//! Lookup of table rows by index, such as token embeddings.

use brimful_torch::projection as torch;
use tch::Tensor;

use crate::Result;

/// Returns the table's rows at these indices. On a GPU the gradient is added to the step's sum row by row,
/// always in the same order, without a pass over the whole table.
///
/// # Errors
///
/// When the indices are not integers, or memory runs out.
pub fn embedding(table: &Tensor, places: &Tensor) -> Result<Tensor> {
    Ok(torch::embedding(table, places)?)
}
