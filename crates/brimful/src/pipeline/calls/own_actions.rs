//! Replaces the schedule's list of actions by the user's own.

use std::sync::Arc;

use crate::pipeline::Pipeline;
use crate::pipeline::build::check_offloaded_graphs;
use crate::pipeline::error::PipelineError;
use crate::{MicroBatches, Result};
use brimful_plan::schedule::Actions;

impl Pipeline {
    /// Replaces the schedule's list of actions by this list, and cuts mini-batches into as many micro-batches as
    /// the list has. A mini-batch with fewer samples still runs by the schedule. In a world, all ranks pass the
    /// same list.
    ///
    /// ```
    /// # use brimful::{Layers, Pipeline};
    /// # use tch::{Device, nn};
    /// # let layers = Layers::new()
    /// #     .add("hidden", |p| nn::linear(p, 4, 8, Default::default()))
    /// #     .add("output", |p| nn::linear(p, 8, 3, Default::default()));
    /// let mut pipe = Pipeline::builder(layers).devices([Device::Cpu, Device::Cpu]).build()?;
    /// pipe.set_actions("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0".parse()?)?;
    /// # Ok::<(), brimful::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the list is for a different number of devices, puts a stage on a different device, or runs the
    /// backward of an offloaded stage after the stage's weights have left the device. The schedule's own list then
    /// stays.
    pub fn set_actions(&mut self, actions: Actions) -> Result<()> {
        let here = self.layout.stages.iter().map(|stage| stage.worker);
        let given = actions.placement().iter().map(|device| device.index());
        if !here.clone().eq(given.clone()) {
            let (here, given) = (here.collect(), given.collect());
            return Err(PipelineError::OtherPlacement { here, given }.into());
        }
        check_offloaded_graphs(&actions, &self.locations, self.device_buffers)?;
        // Lists are found by their number of micro-batches: with a different size, this list would not run.
        self.set_micro_batches(MicroBatches::Count(actions.micro_batches()));
        self.actions.insert(actions.micro_batches(), Arc::new(actions));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor, nn};

    use super::*;
    use crate::{Layers, Loss, MicroBatches};

    /// Builds two layers on two devices, with this many micro-batches.
    fn pipeline(micro_batches: usize) -> Pipeline {
        let linear = |p: &nn::Path| nn::linear(p, 2, 2, Default::default());
        let layers = Layers::new().add("a", linear).add("b", linear);
        let builder = Pipeline::builder(layers).devices([Device::Cpu; 2]);
        builder.micro_batches(MicroBatches::Count(micro_batches)).build().expect("a pipeline")
    }

    #[test]
    fn a_list_for_another_pipeline_is_refused_and_nothing_changes() {
        let mut pipe = pipeline(1);
        let mut refusal = |text: &str| {
            let actions = text.parse().expect("a valid list");
            pipe.set_actions(actions).expect_err("refused").to_string()
        };
        let placement = refusal("1F0,1B0\n0F0,0B0");
        assert!(placement.contains("on devices [1, 0]") && placement.contains("on [0, 1]"));
        assert_eq!(pipe.state.size, MicroBatches::Count(1));
    }

    #[test]
    fn a_graph_whose_weights_have_left_goes_backward_in_no_step() {
        let lists = [
            // The first list has no recomputation. In the second, a weight gradient (dW) runs after the stage's
            // weights have left.
            "0F0,1F0,2F0,0F1,1F1,2F1,2B0,1B0,0B0,2B1,1B1,0B1",
            "0F0,1F0,2F0,0F1,1F1,2F1,2R0,2I0,1R0,1B0,0R0,0B0,2W0,2R1,2B1,1R1,1B1,0R1,0B1",
        ];
        for (list, action) in lists.into_iter().zip(["2B0", "2W0"]) {
            let linear = |p: &nn::Path| nn::linear(p, 2, 2, Default::default());
            let layers = Layers::new().add("a", linear).add("b", linear).add("c", linear);
            let schedule = brimful_plan::schedule::Schedule::BreadthFirst { stages_per_device: 3 };
            let builder = Pipeline::builder(layers).schedule(schedule);
            let builder = builder
                .offload(crate::pipeline::Offload::Host)
                .micro_batches(MicroBatches::Count(2));
            let mut pipe = builder.build().expect("a pipeline");
            // Bypasses the check of `set_actions`.
            pipe.actions.insert(2, Arc::new(list.parse().expect("a valid list")));
            let x = Tensor::ones([4, 2], (Kind::Float, Device::Cpu));
            let loss = |out: Tensor, _: &Tensor| Loss::mean(out.square().mean(Kind::Float));
            let refused = pipe.backward(&x, &x, loss).map(drop).expect_err("refused");
            let crate::Error::Stage { action: refused, cause, .. } = refused else {
                panic!("not a stage's: {refused}")
            };
            assert_eq!(refused.to_string(), action);
            assert_eq!(*cause, PipelineError::WeightsLeft.into());
            assert!(pipe.gradients().expect("gradients").is_empty());
        }
    }

    #[test]
    fn a_list_may_have_whole_and_split_backwards() {
        let x = Tensor::arange(8, (Kind::Float, Device::Cpu)).view([4, 2]);
        let gradients = |mut pipe: Pipeline| {
            let loss = |out: Tensor, _: &Tensor| Loss::mean(out.square().mean(Kind::Float));
            pipe.backward(&x, &x, loss).expect("a step");
            pipe.gradients().expect("gradients")
        };
        let mut listed = pipeline(2);
        let actions = "0F0,0F1,0B0,0I1,0W1\n1F0,1I0,1F1,1B1,1W0".parse().expect("a valid list");
        listed.set_actions(actions).expect("taken");
        let mut plain = pipeline(2);
        plain.set_variables(listed.variables().expect("variables")).expect("the same values");
        let mixed = gradients(listed);
        let expected = gradients(plain);
        assert_eq!(mixed.len(), expected.len());
        for ((name, got), (_, expected)) in mixed.iter().zip(&expected) {
            assert!(got.allclose(expected, 1e-6, 1e-6, false), "{name}");
        }
    }
}
