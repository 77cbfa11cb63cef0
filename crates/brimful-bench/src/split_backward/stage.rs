//! Stage from the middle of a pipeline, with a whole and a split backward.

use anyhow::Result;
use brimful::layers::Model;
use brimful_cli::setting::clear_gradients;
use brimful_torch::autograd::backward;
use brimful_torch::split_backward::SplitBackward;
use tch::nn::VarStore;
use tch::{Device, Tensor};

use crate::timed::timed;
use crate::work::Workload;

/// All layers of a model but the first, their input, and the gradients of their output.
pub(super) struct MiddleStage {
    device: Device,
    store: VarStore,
    model: Model,
    input: Vec<Tensor>,
    output_gradients: Vec<Tensor>,
}

/// Forward that awaits its backward.
struct StageForward {
    seconds: f64,
    /// Inputs, detached and with gradients of their own.
    leaves: Vec<Tensor>,
    /// Outputs with their gradients.
    roots: Vec<(Tensor, Tensor)>,
}

/// Seconds of a forward and of its whole backward.
pub(super) struct WholeSeconds {
    pub(super) forward: f64,
    pub(super) backward: f64,
}

/// Seconds of a forward and of its split backward.
pub(super) struct SplitSeconds {
    pub(super) forward: f64,
    pub(super) input: f64,
    pub(super) weight: f64,
}

/// Gradients of the input and of all weights, after a backward.
pub(super) type BackwardGradients = Vec<Tensor>;

impl MiddleStage {
    pub(super) fn new(work: &Workload, device: Device) -> Result<Self> {
        let layers = work.layers()?.kind(work.dtype.kind());
        let built = |range| -> Result<(VarStore, Model)> {
            let store = VarStore::new(device);
            let model = layers.build_range(&store.root(), range)?;
            Ok((store, model))
        };
        let (_outside, first) = built(0..1)?;
        let (store, model) = built(1..layers.len())?;
        let sample = work.samples(work.micro_batch).0.to_device(device);
        let input = tch::no_grad(|| first.forward_many(&[sample], true));
        let output = tch::no_grad(|| model.forward_many(&input, true));
        let output_gradients = output.iter().map(Tensor::randn_like).collect();
        Ok(Self { device, store, model, input, output_gradients })
    }

    /// Runs forward and a whole backward, until the graph is freed.
    pub(super) fn whole(&mut self) -> Result<(WholeSeconds, BackwardGradients)> {
        let StageForward { seconds, leaves, roots } = self.forward()?;
        let whole = || {
            let (outputs, gradients): (Vec<_>, Vec<_>) =
                roots.iter().map(|(output, gradient)| (output, Some(gradient))).unzip();
            backward(&outputs, &gradients, false)?;
            drop(roots);
            Ok(())
        };
        let ((), backward) = timed(self.device, whole)?;
        let found = self.gradients(leaves.iter().map(Tensor::grad).collect());
        Ok((WholeSeconds { forward: seconds, backward }, found))
    }

    /// Runs forward and a split backward. The input part includes finding where to split the autograd graph; the
    /// weight part includes freeing the graph.
    pub(super) fn split(&mut self) -> Result<(SplitSeconds, BackwardGradients)> {
        let StageForward { seconds, leaves, roots } = self.forward()?;
        let groups = [roots];
        let input_gradients = || {
            let given = SplitBackward::input_gradients(&groups, &leaves)?;
            drop(groups);
            Ok(given)
        };
        let ((inputs, mut weights), input) = timed(self.device, input_gradients)?;
        let add_weight_gradients = || {
            weights.add_weight_gradients(0)?;
            drop(weights);
            Ok(())
        };
        let ((), weight) = timed(self.device, add_weight_gradients)?;
        let found = self.gradients(inputs.into_iter().flatten().flatten().collect());
        Ok((SplitSeconds { forward: seconds, input, weight }, found))
    }

    /// Runs a forward on new leaves, with gradients cleared.
    fn forward(&self) -> Result<StageForward> {
        clear_gradients(&self.store)?;
        let leaf = |value: &Tensor| value.detach().set_requires_grad(true);
        let leaves: Vec<Tensor> = self.input.iter().map(leaf).collect();
        let (output, seconds) = timed(self.device, || Ok(self.model.forward_many(&leaves, true)))?;
        let gradients = self.output_gradients.iter().map(Tensor::shallow_clone);
        Ok(StageForward { seconds, leaves, roots: output.into_iter().zip(gradients).collect() })
    }

    /// Returns the input's and the weights' gradients, in the same order for all backwards.
    fn gradients(&self, of_input: Vec<Tensor>) -> BackwardGradients {
        let variables = self.store.variables();
        let mut trained: Vec<_> =
            variables.iter().filter(|(_, value)| value.requires_grad()).collect();
        trained.sort_by_key(|(name, _)| *name);
        of_input.into_iter().chain(trained.into_iter().map(|(_, value)| value.grad())).collect()
    }
}
