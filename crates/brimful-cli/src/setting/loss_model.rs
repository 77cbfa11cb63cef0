//! A model together with its loss. The head of a GPT runs inside the loss, on chunks of tokens, so that the logits
//! of all tokens never exist at once.

use std::ops::Range;

use brimful::layers::Model;
use brimful::nn::linear_cross_entropy;
use brimful::{Layers, Loss, Result, StepRng};
use brimful_models::{LANGUAGE_HEAD, language_head_weight};
use tch::nn::{ModuleT, Path};
use tch::{Kind, Reduction, Tensor};

use super::{counted, loss, right, summable};
use crate::data::IGNORED;

/// Number of logits computed at once in a test.
const LOGITS_AT_ONCE: i64 = 1 << 25;

/// A model on one device, not cut into stages, with its loss.
#[derive(Debug)]
pub enum LossModel {
    /// A model whose loss takes its outputs.
    Whole(Model),
    /// A GPT in two parts, and the weight of its head, which may be tied to the embedding.
    Text { body: Model, head: Model, weight: Tensor },
}

impl LossModel {
    /// Builds the layers under the path `root`, in order.
    ///
    /// # Errors
    /// Fails as [`Layers::build`] does.
    pub fn build(layers: &Layers, root: &Path) -> Result<Self> {
        Self::of_parts(layers, root, |part| layers.build_range(root, part))
    }

    /// Builds the layers. They get the initial values that they would have in a pipeline.
    ///
    /// # Errors
    /// Fails as [`Layers::build`] does.
    pub fn build_with_rng(layers: &Layers, root: &Path, rng: StepRng) -> Result<Self> {
        Self::of_parts(layers, root, |part| layers.build_range_with_rng(root, part, rng))
    }

    fn of_parts(
        layers: &Layers,
        root: &Path,
        build: impl Fn(Range<usize>) -> Result<Model>,
    ) -> Result<Self> {
        let all = layers.len();
        if layers.names().last() != Some(LANGUAGE_HEAD) {
            return build(0..all).map(Self::Whole);
        }
        let (body, head) = (build(0..all - 1)?, build(all - 1..all)?);
        match language_head_weight(root) {
            Some(weight) => Ok(Self::Text { body, head, weight }),
            None => build(0..all).map(Self::Whole),
        }
    }

    /// Returns the mean loss of a micro-batch. If `train` is true, dropout and norms are in training mode.
    ///
    /// # Errors
    /// Fails as [`linear_cross_entropy`] does.
    pub fn loss(&self, x: &Tensor, y: &Tensor, train: bool) -> Result<Loss> {
        match self {
            Self::Whole(model) => Ok(Loss::mean(loss(&model.forward_t(x, train), y))),
            Self::Text { body, weight, .. } => {
                linear_cross_entropy(&body.forward_t(x, train), weight, None, y, Default::default())
            }
        }
    }

    /// Returns the mean loss, computed from all logits at once, as a tensor for autograd.
    pub fn plain_loss(&self, x: &Tensor, y: &Tensor) -> Tensor {
        let outputs = match self {
            Self::Whole(model) => model.forward_t(x, true),
            Self::Text { body, head, .. } => head.forward_t(&body.forward_t(x, true), true),
        };
        loss(&outputs, y)
    }

    /// Returns the test loss of a micro-batch, and for each prediction whether it is right.
    pub(crate) fn judge(&self, x: &Tensor, y: &Tensor) -> (Loss, Tensor) {
        match self {
            Self::Whole(model) => {
                let outputs = model.forward_t(x, false);
                (Loss::mean(loss(&outputs, y)), right(&outputs, y))
            }
            Self::Text { body, head, weight } => {
                judge_tokens(&body.forward_t(x, false), head, weight.size()[0], y)
            }
        }
    }
}

/// Returns the mean loss of the tokens that are not ignored, and for each prediction whether it is right. Computes
/// the logits in chunks.
fn judge_tokens(hidden: &Tensor, head: &Model, classes: i64, y: &Tensor) -> (Loss, Tensor) {
    let rows = (LOGITS_AT_ONCE / classes).max(1);
    let parts = hidden.flatten(0, -2).split(rows, 0);
    let targets = y.flatten(0, -1).split(rows, 0);
    let judged = parts.iter().zip(&targets).map(|(part, targets)| {
        let logits = summable(&head.forward_t(part, false));
        let none = None::<&Tensor>;
        let sum = logits.cross_entropy_loss(targets, none, Reduction::Sum, IGNORED, 0.0);
        (sum, right(&logits, targets))
    });
    let (sums, rights): (Vec<_>, Vec<_>) = judged.unzip();
    let sum = Tensor::stack(&sums, 0).sum(Kind::Double);
    (Loss::ratio(sum, counted(y)), Tensor::cat(&rights, 0).view_as(y))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use brimful::{MicroBatcher, MicroBatches};
    use brimful_models::{Gpt, gpt};
    use tch::Device;
    use tch::nn::VarStore;

    use super::*;
    use crate::setting::{MeanOver, mean_loss};

    const TOKENS: i64 = 300;

    fn tiny(tied: bool) -> Layers {
        let sizes = Gpt { layers: 2, width: 32, heads: 2, context: 16, ..Gpt::gpt2_small() };
        gpt(&Gpt { vocabulary: TOKENS, dropout: 0.0, tied, ..sizes })
    }

    fn samples() -> (Tensor, Tensor) {
        let tokens = Tensor::randint(TOKENS, [5, 17], (Kind::Int64, Device::Cpu));
        (tokens.narrow(1, 0, 16), tokens.narrow(1, 1, 16))
    }

    fn built(layers: &Layers) -> (VarStore, LossModel) {
        let mut store = VarStore::new(Device::Cpu);
        let model = LossModel::build(layers, &store.root()).expect("a model");
        store.set_kind(Kind::Double);
        (store, model)
    }

    fn shapes(store: &VarStore) -> BTreeMap<String, Vec<i64>> {
        store.variables().iter().map(|(name, variable)| (name.clone(), variable.size())).collect()
    }

    #[test]
    fn a_gpt_has_the_variables_of_its_layers_whichever_way_it_is_built() {
        for tied in [false, true] {
            let whole = VarStore::new(Device::Cpu);
            tiny(tied).build(&whole.root()).expect("a model");
            assert_eq!(shapes(&built(&tiny(tied)).0), shapes(&whole));
        }
    }

    #[test]
    fn a_loss_without_whole_logits_is_that_of_logits_with_its_gradients() {
        for tied in [false, true] {
            let batch = samples();
            let (store, model) = built(&tiny(tied));
            let (mut plain_store, plain) = built(&tiny(tied));
            plain_store.copy(&store).expect("the same variables");
            let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(2));
            let step = micro.backward(&batch, |(x, y)| model.loss(&x, &y, true)).expect("a step");
            let expected = plain.plain_loss(&batch.0, &batch.1);
            expected.backward();
            assert!((step.loss - expected.double_value(&[])).abs() < 1e-10, "{}", step.loss);
            let plain = plain_store.variables();
            for (name, variable) in store.variables() {
                let error = (variable.grad() - plain[&name].grad()).abs().max();
                assert!(error.double_value(&[]) < 1e-10, "{name}: {error:?}");
            }
        }
    }

    /// Returns all logits of a GPT, outside of its loss.
    fn logits(model: &LossModel, x: &Tensor) -> Tensor {
        let LossModel::Text { body, head, .. } = model else { panic!("a GPT has a head") };
        head.forward_t(&body.forward_t(x, false), false)
    }

    /// Checks the losses of training, of a test, and of all logits, in micro-batches of several sizes.
    fn assert_losses(
        (store, model): (&VarStore, &LossModel),
        batch: &(Tensor, Tensor),
        expected: f64,
        bound: f64,
    ) {
        for size in [1, 2, 5] {
            let mut micro = MicroBatcher::new(store, MicroBatches::Samples(size));
            let trained = micro.backward(batch, |(x, y)| model.loss(&x, &y, true));
            let tested = micro.evaluate(batch, |(x, y)| model.judge(&x, &y));
            let of_logits = micro.evaluate(batch, |(x, y)| {
                let logits = logits(model, &x);
                (mean_loss(&logits, &y, MeanOver::Targets), right(&logits, &y))
            });
            let losses = [
                trained.expect("a step").loss,
                tested.expect("a test").loss,
                of_logits.expect("a test").loss,
            ];
            for found in losses {
                assert!((found - expected).abs() < bound, "{size}: {found} and {expected}");
            }
        }
    }

    #[test]
    fn a_loss_with_ignored_targets_is_the_mean_of_the_others_however_it_is_cut() {
        let (x, y) = samples();
        let (store, model) = built(&tiny(true));
        // The samples have 1 to 5 answers each, at the end.
        let places = Tensor::arange(16, (Kind::Int64, Device::Cpu)).unsqueeze(0);
        let first = Tensor::from_slice(&[15_i64, 14, 13, 12, 11]).unsqueeze(1);
        let counts = places.ge_tensor(&first);
        let batch = (x, y.masked_fill(&counts.logical_not(), IGNORED));
        let answers = logits(&model, &batch.0);
        let answers =
            answers.flatten(0, 1).index_select(0, &counts.flatten(0, 1).nonzero().view(-1));
        let expected = loss(&answers, &y.masked_select(&counts)).double_value(&[]);
        assert_losses((&store, &model), &batch, expected, 1e-10);
    }

    #[test]
    fn losses_in_bf16_are_sums_in_f32_however_the_batch_is_cut() {
        let batch = samples();
        let (mut store, model) = built(&tiny(true));
        store.set_kind(Kind::BFloat16);
        let expected =
            loss(&logits(&model, &batch.0).to_kind(Kind::Double), &batch.1).double_value(&[]);
        assert_losses((&store, &model), &batch, expected, 1e-3);
    }

    #[test]
    fn a_test_in_parts_is_a_test_of_all_logits() {
        let (x, y) = samples();
        let (store, model) = built(&tiny(true));
        let LossModel::Text { body, head, .. } = &model else { panic!("a GPT has a head") };
        let hidden = body.forward_t(&x, false);
        let logits = head.forward_t(&hidden, false);
        let (_, found) = judge_tokens(&hidden, head, LOGITS_AT_ONCE / 7, &y);
        assert_eq!(found, right(&logits, &y));
        let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(2));
        let batch = (x, y);
        let step = micro.evaluate(&batch, |(x, y)| model.judge(&x, &y)).expect("a test");
        let expected = loss(&logits, &batch.1).double_value(&[]);
        assert!((step.loss - expected).abs() < 1e-10, "{} and {expected}", step.loss);
        assert_eq!(step.outputs, right(&logits, &batch.1));
    }
}
