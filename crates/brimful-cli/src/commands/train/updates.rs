//! Updates of a model: the optimizer with clipping, and averages of the weights.

use anyhow::Result;
use brimful::optim::{Ema, Optimizer};
use brimful::save::Metadata;

use super::recipe::Recipe;
use crate::named::Named;

/// Saved state beside a model: the optimizer's, and that of the weight averages if there are any.
#[derive(Debug, Default)]
pub(super) struct Kept {
    pub(super) optimizer: (Named, Metadata),
    pub(super) averages: Option<(Named, Metadata)>,
}

/// Optimizer of a model, and averages of its weights if they are wanted.
#[derive(Debug)]
pub(super) struct Updates {
    pub(super) optimizer: Optimizer,
    clip_norm: Option<f64>,
    averages: Option<Ema>,
}

impl Updates {
    /// Prepares updates by the recipe; `average` makes averages with a decay.
    pub(super) fn new(
        mut optimizer: Optimizer,
        recipe: &Recipe,
        average: impl FnOnce(f64) -> brimful::Result<Ema>,
    ) -> Result<Self> {
        optimizer.decay_only_matrices()?;
        let averages = recipe.ema.map(average).transpose()?;
        let averages = averages.map(|averages| averages.warmup(true));
        Ok(Self { optimizer, clip_norm: recipe.clip_norm, averages })
    }

    /// Scales the gradients down if they are longer than the recipe allows.
    pub(super) fn clip(&mut self) -> brimful::Result<()> {
        match self.clip_norm {
            Some(length) => self.optimizer.clip_gradient_norm(length).map(drop),
            None => Ok(()),
        }
    }

    /// Updates the averages, after a step of the optimizer.
    pub(super) fn average(&mut self) -> brimful::Result<()> {
        self.averages.as_mut().map_or(Ok(()), Ema::update)
    }

    /// Swaps the averages into the model, if there are any.
    pub(super) fn swap_in(&mut self) -> brimful::Result<()> {
        self.averages.as_mut().map_or(Ok(()), Ema::swap_in)
    }

    /// Restores the model's own weights.
    pub(super) fn swap_out(&mut self) -> brimful::Result<()> {
        self.averages.as_mut().map_or(Ok(()), Ema::swap_out)
    }

    pub(super) fn kept(&self) -> Result<Kept> {
        let averages = self.averages.as_ref().map(Ema::state).transpose()?;
        Ok(Kept { optimizer: self.optimizer.state()?, averages })
    }

    /// Loads a saved state; averages are left out if there are none on one side.
    pub(super) fn load(&mut self, kept: &Kept) -> brimful::Result<()> {
        let (state, texts) = &kept.optimizer;
        self.optimizer.load_state(state, texts)?;
        match (&mut self.averages, &kept.averages) {
            (Some(averages), Some((state, texts))) => averages.load_state(state, texts),
            _ => Ok(()),
        }
    }
}
