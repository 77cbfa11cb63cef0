//! LoRA: a way beside each projection that is a few numbers wide, and alone is trained.
//!
//! "LoRA: Low-Rank Adaptation of Large Language Models", Hu et al., 2021. The names are those of PEFT.

use std::cell::RefCell;
use std::sync::Arc;

use tch::Tensor;
use tch::nn::{Init, Path};

use super::projection::WeightOrder;
use crate::Result;

/// Where the way begins: rank × inputs.
const DOWN: &str = "lora_A";
/// Where it ends: outputs × rank, 0 at the start, so that the model is at first what it was.
const UP: &str = "lora_B";
const WEIGHT: &str = "weight";

/// Which projections LoRA is added to, and how.
#[derive(Debug, Clone, PartialEq)]
pub struct Lora {
    /// How many numbers wide it is.
    pub rank: i64,
    /// What it adds is multiplied by `alpha / rank`.
    pub alpha: f64,
    /// The projections by their names or the ends of these after a dot, such as `q_proj` or `self_attn.q_proj`; none
    /// for all that there are.
    pub targets: Vec<String>,
    /// Projections with a rank and an alpha of their own; of several entries that fit, the first counts.
    pub overrides: Vec<LoraOverride>,
}

/// Projections whose rank and alpha are their own.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraOverride {
    /// Names or ends of names, as in [`Lora::targets`].
    pub target: String,
    /// Their rank.
    pub rank: i64,
    /// Their alpha.
    pub alpha: f64,
}

thread_local! {
    /// What projections that this thread builds are to have.
    static WANTED: RefCell<Option<Arc<Lora>>> = const { RefCell::new(None) };
}

/// What projections of this thread had before comes back when it is dropped.
#[derive(Debug)]
pub(crate) struct Adapting(Option<Arc<Lora>>);

impl Drop for Adapting {
    fn drop(&mut self) {
        WANTED.replace(self.0.take());
    }
}

impl Lora {
    /// Of this rank for all projections, with an alpha of twice as much.
    pub fn new(rank: i64) -> Self {
        Self { rank, alpha: 2.0 * rank as f64, targets: Vec::new(), overrides: Vec::new() }
    }

    /// Projections that this thread builds have it, until the guard is dropped.
    pub(crate) fn enter(this: &Arc<Self>) -> Adapting {
        Adapting(WANTED.replace(Some(Arc::clone(this))))
    }

    /// Whether a variable of this name is one that LoRA has added.
    pub fn is_adapter(name: &str) -> bool {
        name.rsplit('.').nth(1).is_some_and(|layer| [DOWN, UP].contains(&layer))
    }

    /// Rank and scale beside the projection of this name; nothing where none is added.
    fn beside(&self, name: &str) -> Option<(i64, f64)> {
        let fits = |target: &str| {
            let before = name.strip_suffix(target);
            before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
        };
        if !self.targets.is_empty() && !self.targets.iter().any(|target| fits(target)) {
            return None;
        }
        let own = self.overrides.iter().find(|own| fits(&own.target));
        let (rank, alpha) = own.map_or((self.rank, self.alpha), |own| (own.rank, own.alpha));
        Some((rank, alpha / rank as f64))
    }

    /// Returns the weight `name` of a model with these variables, as a model without LoRA would have it: what LoRA adds is
    /// in it. Nothing of the model is changed.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn merged_weight(
        &self,
        name: &str,
        weight: &Tensor,
        variables: &[(String, Tensor)],
        order: WeightOrder,
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
        let added = up.f_detach()?.f_mm(&down.f_detach()?)? * scale;
        let added = match order {
            WeightOrder::OutputsFirst => added,
            WeightOrder::InputsFirst => added.f_tr()?,
        };
        Ok(weight.f_detach()?.f_add(&added)?)
    }
}

/// What LoRA adds to one projection.
#[derive(Debug)]
pub(super) struct LowRank {
    down: Tensor,
    up: Tensor,
    scale: f64,
}

impl LowRank {
    /// That of a projection at this path, where this thread builds with one.
    pub(super) fn wanted(path: &Path, inputs: i64, outputs: i64) -> Option<Self> {
        let lora = WANTED.with_borrow(Clone::clone)?;
        let name = path.components().collect::<Vec<_>>().join(".");
        let (rank, scale) = lora.beside(&name)?;
        // As PEFT begins.
        let bound = 1.0 / (inputs as f64).sqrt();
        let spread = Init::Uniform { lo: -bound, up: bound };
        Some(Self {
            down: (path / DOWN).var(WEIGHT, &[rank, inputs], spread),
            up: (path / UP).zeros(WEIGHT, &[outputs, rank]),
            scale,
        })
    }

    /// Adds it to what the projection makes of these rows.
    pub(super) fn add_to(&self, mut out: Tensor, rows: &Tensor) -> Tensor {
        let narrow = rows.mm(&self.down.tr()) * self.scale;
        out.addmm_(&narrow, &self.up.tr())
    }
}
