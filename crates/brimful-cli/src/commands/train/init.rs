//! `--init`: starts a run with the weights of a file.

use std::path::Path;

use anyhow::{Context, Result};

use super::Trainer;
use crate::exit::wrong_use;
use crate::named::{self, Comparison};
use crate::progress;
use crate::saved_weights::SavedWeights;

/// Loads the file's weights into the model. With `partial`, loads only those that fit by name and shape.
pub(super) fn load(path: &Path, partial: bool, trainer: &mut Trainer) -> Result<()> {
    let weights = SavedWeights::read(path)
        .map(SavedWeights::into_tensors)
        .with_context(|| format!("cannot load the weights of {}", path.display()))?;
    let variables = trainer.engine.variables()?;
    let compared = Comparison::new(&variables, weights);
    let count = compared.fitting.len();
    let differences = compared.differences();
    let shown = path.display();
    let refused = differences.as_ref().and_then(|differences| match (partial, count) {
        (false, _) => Some(format!("{differences}; --init-partial loads the others")),
        (true, 0) => Some(format!("none of its weights fit the model: {differences}")),
        (true, _) => None,
    });
    // In a pipeline over ranks, only the first rank knows all variables.
    let told = trainer.world.share("init", &refused.filter(|_| trainer.is_first()))?;
    if let Some(reason) = told.into_iter().flatten().next() {
        return Err(wrong_use(format!("--init {shown}: {reason}")));
    }
    if let Some(differences) = differences.filter(|_| trainer.is_first()) {
        progress::say(&format!("brimful: {count} weights of {shown} are loaded; {differences}"));
    }
    named::put(variables, compared.fitting)
}
