//! Staged model with its optimizer, for consecutive steps.

use anyhow::Result;
use brimful::optim::{AdamW, Optimizer};
use brimful::pipeline::Builder;
use brimful::{Loss, Pipeline, StepReport};
use tch::Tensor;

use crate::steady::SteadyTraining;
use crate::work::Samples;

/// Loss of a model's output and its target.
type OutputLoss = fn(&Tensor, &Tensor) -> Tensor;

/// Pipeline trained by AdamW.
pub(crate) struct StagedTraining {
    pub(crate) pipeline: Pipeline,
    optimizer: Optimizer,
    loss: OutputLoss,
}

impl StagedTraining {
    /// Builds the pipeline and its optimizer.
    pub(crate) fn new(builder: Builder, method: AdamW, loss: OutputLoss) -> Result<Self> {
        let mut pipeline = builder.build()?;
        let optimizer = pipeline.optimizer(method)?;
        Ok(Self { pipeline, optimizer, loss })
    }
}

impl SteadyTraining for StagedTraining {
    fn backward(&mut self, (x, y): &Samples) -> Result<StepReport> {
        let loss = self.loss;
        Ok(self.pipeline.backward(x, y, move |out: Tensor, y| Loss::mean(loss(&out, y)))?)
    }

    fn update(&mut self) -> Result<()> {
        self.optimizer.step()?;
        Ok(self.optimizer.zero_grad()?)
    }

    fn wait(&mut self) -> Result<()> {
        Ok(self.optimizer.wait()?)
    }
}
