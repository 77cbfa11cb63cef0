//! Initial values of weights, drawn in one dtype and stored in another, piece by piece.

use std::cell::Cell;

use brimful_torch::meta;
use tch::nn::Path;
use tch::{Kind, Tensor};

/// Numbers drawn at a time: 16 MiB of f32.
const PIECE: i64 = 1 << 22;

thread_local! {
    /// Dtype of the weights that this thread makes, if it is not their store's.
    static KIND: Cell<Option<Kind>> = const { Cell::new(None) };
}

/// Guard of [`in_kind`], which restores the previous dtype when it is dropped.
#[derive(Debug)]
#[must_use = "weights have their store's dtype again when the guard is dropped"]
pub(crate) struct InKind(Option<Kind>);

impl Drop for InKind {
    fn drop(&mut self) {
        KIND.set(self.0);
    }
}

/// Makes the weights of [`spread_weight`] on this thread in this dtype, until the guard is dropped.
pub(crate) fn in_kind(kind: Kind) -> InKind {
    InKind(KIND.replace(Some(kind)))
}

/// Makes a variable `weight` of normally distributed numbers with mean 0 and this standard deviation.
///
/// The numbers are drawn in the store's dtype, 4,194,304 at a time. Under [`Layers::kind`](crate::Layers::kind)
/// they are rounded a piece at a time, so that the whole weight never exists in another dtype than its own.
pub fn spread_weight(path: &Path, shape: &[i64], spread: f64) -> Tensor {
    let drawn = path.kind();
    let weight = Tensor::zeros(shape, (KIND.get().unwrap_or(drawn), path.device()));
    // A meta tensor has no values to draw, and may be of any size.
    if !meta::is_entered() {
        draw(&weight, drawn, spread);
    }
    path.add("weight", weight, true)
}

/// Fills a tensor, piece after piece, with numbers drawn in the dtype `drawn`.
fn draw(weight: &Tensor, drawn: Kind, spread: f64) {
    let pieces = weight.flatten(0, -1).split(PIECE, 0);
    if weight.kind() == drawn {
        for mut piece in pieces {
            let _itself = piece.normal_(0.0, spread);
        }
        return;
    }
    let longest = PIECE.min(weight.numel() as i64);
    let buffer = Tensor::empty([longest], (drawn, weight.device()));
    for mut piece in pieces {
        piece.copy_(&buffer.narrow(0, 0, piece.size()[0]).normal_(0.0, spread));
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;
    use tch::nn::{self, VarStore};

    use super::*;
    use crate::memory::Arena;
    use crate::nn::{Projection, ProjectionConfig};
    use crate::{Layers, StepRng};

    /// Three pieces, and 2,048 numbers more.
    const SHAPE: [i64; 2] = [6_145, 2_048];
    const SPREAD: f64 = 0.02;

    /// Returns the weight of a model with one layer.
    fn built(layers: &Layers) -> Tensor {
        let store = VarStore::new(Device::Cpu);
        layers.build_range_with_rng(&store.root(), 0..1, StepRng::new(3, 0)).expect("a model");
        store.variables()["fc.weight"].shallow_clone()
    }

    fn projection() -> Layers {
        let [outputs, inputs] = SHAPE;
        let config = ProjectionConfig { spread: SPREAD, bias: false, inputs_first: false };
        Layers::new().add("fc", move |p| Projection::new(p, inputs, outputs, config))
    }

    #[test]
    fn a_weight_of_a_dtype_takes_one_piece_more_than_itself() {
        let arena = Arena::new("pieces");
        let _inside = arena.enter();
        let weight = built(&projection().kind(Kind::BFloat16));
        let own = weight.numel() as u64 * 2;
        assert_eq!(arena.current(), own);
        let piece = PIECE as u64 * 4;
        assert!(arena.peak() <= own + piece, "{} for {own} and {piece}", arena.peak());
    }

    #[test]
    fn values_are_those_of_one_draw() {
        let whole = Layers::new().add("fc", |p| {
            let weight = p.zeros("weight", &SHAPE);
            let _itself = tch::no_grad(|| weight.shallow_clone().normal_(0.0, SPREAD));
            nn::func(Tensor::shallow_clone)
        });
        let expected = built(&whole);
        assert_eq!(built(&projection()), expected);
        for kind in [Kind::BFloat16, Kind::Double] {
            assert_eq!(built(&projection().kind(kind)), expected.to_kind(kind));
        }
        assert!(built(&projection()).requires_grad());
    }

    #[test]
    fn without_memory_a_weight_may_be_of_any_size() {
        let huge = Layers::new().add("fc", |p| {
            let _weight = spread_weight(p, &[1 << 30, 1 << 30], SPREAD);
            nn::func(Tensor::shallow_clone)
        });
        assert_eq!(huge.parameter_count().expect("a number"), 1 << 60);
    }
}
