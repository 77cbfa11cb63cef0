//! LoRA: a trained low-rank adapter beside each projection, whose own weights stay frozen.
//!
//! "LoRA: Low-Rank Adaptation of Large Language Models", Hu et al., 2021. The names are those of PEFT.

use std::cell::RefCell;
use std::sync::Arc;

use tch::Tensor;
use tch::nn::{Init, Path};

use crate::Result;

/// Down-projection: rank × inputs.
const DOWN: &str = "lora_A";
/// Up-projection: outputs × rank, 0 at the start, so that the model's outputs are unchanged at first.
const UP: &str = "lora_B";
const WEIGHT: &str = "weight";

/// Settings of LoRA: the adapted projections, with their rank and alpha.
#[derive(Debug, Clone, PartialEq)]
pub struct Lora {
    /// Rank of the adapters.
    pub rank: i64,
    /// Scale of the adapters, whose output is multiplied by `alpha / rank`.
    pub alpha: f64,
    /// Names of the adapted projections or their ends after a dot, such as `q_proj` or `self_attn.q_proj`;
    /// empty for all projections.
    pub targets: Vec<String>,
    /// Different rank and alpha for some of the adapted projections. The first entry whose `targets` name a
    /// projection applies to that projection.
    pub overrides: Vec<Self>,
}

thread_local! {
    /// Settings for the projections that this thread builds.
    static WANTED: RefCell<Option<Arc<Lora>>> = const { RefCell::new(None) };
}

/// Guard that restores the thread's earlier settings when dropped.
#[derive(Debug)]
pub(crate) struct Adapting(Option<Arc<Lora>>);

impl Drop for Adapting {
    fn drop(&mut self) {
        WANTED.replace(self.0.take());
    }
}

impl Lora {
    /// Creates settings for all projections with this rank, and an alpha of twice the rank.
    pub fn new(rank: i64) -> Self {
        Self { rank, alpha: 2.0 * rank as f64, targets: Vec::new(), overrides: Vec::new() }
    }

    /// Adapts the projections that this thread builds, until the guard is dropped.
    pub(crate) fn enter(this: &Arc<Self>) -> Adapting {
        Adapting(WANTED.replace(Some(Arc::clone(this))))
    }

    /// Returns whether a variable of this name belongs to an adapter.
    pub fn is_adapter(name: &str) -> bool {
        name.rsplit('.').nth(1).is_some_and(|layer| [DOWN, UP].contains(&layer))
    }

    /// Returns rank and scale of the adapter for a projection of this name; `None` if it has none.
    fn beside(&self, name: &str) -> Option<(i64, f64)> {
        let fits = |target: &str| {
            let before = name.strip_suffix(target);
            before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
        };
        if !self.targets.is_empty() && !self.targets.iter().any(|target| fits(target)) {
            return None;
        }
        let is_own = |own: &&Self| own.targets.iter().any(|target| fits(target));
        let Self { rank, alpha, .. } = self.overrides.iter().find(is_own).unwrap_or(self);
        Some((*rank, alpha / *rank as f64))
    }

    /// Returns a copy of the weight `name` with its adapter merged in, so that a model without LoRA computes the
    /// same. The adapter is among `variables`. Returns a weight without an adapter unchanged. `inputs_first` is the
    /// projection's [setting](super::ProjectionConfig::inputs_first).
    ///
    /// # Errors
    /// When memory runs out.
    pub fn merged_weight(
        &self,
        name: &str,
        weight: &Tensor,
        variables: &[(String, Tensor)],
        inputs_first: bool,
    ) -> Result<Tensor> {
        let layer = name.strip_suffix(WEIGHT).and_then(|layer| layer.strip_suffix('.'));
        let part = |part| {
            let name = format!("{}.{part}.{WEIGHT}", layer?);
            variables.iter().find(|(other, _)| *other == name)
        };
        let scale = layer.and_then(|layer| self.beside(layer)).map(|(_, scale)| scale);
        let (Some((_, down)), Some((_, up)), Some(scale)) = (part(DOWN), part(UP), scale) else {
            return Ok(weight.shallow_clone());
        };
        let added = up.f_detach()?.f_mm(&down.f_detach()?)?.f_mul_scalar(scale)?;
        let added = if inputs_first { added.f_tr()? } else { added };
        Ok(weight.f_detach()?.f_add(&added)?)
    }
}

/// Adapter of one projection.
#[derive(Debug)]
pub(super) struct LowRank {
    down: Tensor,
    up: Tensor,
    scale: f64,
}

impl LowRank {
    /// Creates the adapter of a projection at this path, if this thread's settings include it.
    pub(super) fn wanted(path: &Path, inputs: i64, outputs: i64) -> Option<Self> {
        let lora = WANTED.with_borrow(Clone::clone)?;
        let name = path.components().collect::<Vec<_>>().join(".");
        let (rank, scale) = lora.beside(&name)?;
        // Initialised as in PEFT.
        let bound = 1.0 / (inputs as f64).sqrt();
        let spread = Init::Uniform { lo: -bound, up: bound };
        Some(Self {
            down: (path / DOWN).var(WEIGHT, &[rank, inputs], spread),
            up: (path / UP).zeros(WEIGHT, &[outputs, rank]),
            scale,
        })
    }

    /// Adds the adapter's output for these rows to the projection's.
    pub(super) fn add_to(&self, mut out: Tensor, rows: &Tensor) -> Tensor {
        let narrow = rows.mm(&self.down.tr()) * self.scale;
        out.addmm_(&narrow, &self.up.tr())
    }
}
