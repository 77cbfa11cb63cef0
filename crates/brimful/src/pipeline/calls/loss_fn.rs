//! Adapts the caller's closure to the last stage, and collects its outputs.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use tch::{Device, Tensor};

use crate::batch::{self, Batch, BatchError, Lender, Samples};
use crate::pipeline::error::PipelineError;
use crate::pipeline::portion::Portion;
use crate::pipeline::run::LossFn;
use crate::{Error, Loss, Result, feed};

/// Output of a model, as a closure takes it: one tensor, a list of them, an array or a tuple.
pub trait ModelOutput: Sized {
    /// Converts the model's output tensors.
    ///
    /// # Errors
    /// When their number does not fit.
    fn from_tensors(tensors: Vec<Tensor>) -> Result<Self>;
}

impl ModelOutput for Vec<Tensor> {
    fn from_tensors(tensors: Vec<Tensor>) -> Result<Self> {
        Ok(tensors)
    }
}

impl<const N: usize> ModelOutput for [Tensor; N] {
    fn from_tensors(tensors: Vec<Tensor>) -> Result<Self> {
        let given = tensors.len();
        tensors.try_into().map_err(|_| PipelineError::OutputCount { given, taken: N }.into())
    }
}

impl ModelOutput for Tensor {
    fn from_tensors(tensors: Vec<Tensor>) -> Result<Self> {
        <[Tensor; 1]>::from_tensors(tensors).map(|[only]| only)
    }
}

impl ModelOutput for (Tensor, Tensor) {
    fn from_tensors(tensors: Vec<Tensor>) -> Result<Self> {
        <[Tensor; 2]>::from_tensors(tensors).map(Self::from)
    }
}

impl ModelOutput for (Tensor, Tensor, Tensor) {
    fn from_tensors(tensors: Vec<Tensor>) -> Result<Self> {
        <[Tensor; 3]>::from_tensors(tensors).map(Self::from)
    }
}

/// Outputs of a closure, by micro-batch of each pipeline in this process.
pub(crate) type Collected<O> = Arc<Mutex<Vec<Option<O>>>>;

/// The caller's closure, of any arguments and results, shared because several attempts may need it. It
/// returns outputs, and a loss if there is one.
pub(crate) struct SharedLoss<Y, O>(Arc<Mutex<UserLoss<Y, O>>>);

type UserLoss<Y, O> = dyn FnMut(Vec<Tensor>, &Y) -> Result<(Option<Loss>, O)> + Send;

impl<Y: Batch + 'static, O: Batch + 'static> SharedLoss<Y, O> {
    pub(crate) fn new(
        loss: impl FnMut(Vec<Tensor>, &Y) -> Result<(Option<Loss>, O)> + Send + 'static,
    ) -> Self {
        Self(Arc::new(Mutex::new(loss)))
    }

    /// Returns the closure as the last stage of each pipeline calls it, with the number of a micro-batch;
    /// and the collection of its outputs.
    pub(crate) fn for_each(
        &self,
        target: &Y,
        portions: &[Portion],
        device: impl Fn(usize) -> Device,
    ) -> Result<(Vec<LossFn>, Collected<O>)> {
        let count = portions.iter().map(|portion| portion.ranges.len()).sum();
        let collected: Collected<O> = Arc::new(Mutex::new((0..count).map(|_| None).collect()));
        let mut start = 0;
        let mut all = Vec::with_capacity(portions.len());
        for (replica, portion) in portions.iter().enumerate() {
            let given = (Arc::clone(&collected), start);
            all.push(self.on(target, &portion.ranges, device(replica), given)?);
            start += portion.ranges.len();
        }
        Ok((all, collected))
    }

    /// Returns the closure for one pipeline, which collects its outputs from index `start` on.
    fn on(
        &self,
        target: &Y,
        ranges: &[Range<usize>],
        device: Device,
        (collected, start): (Collected<O>, usize),
    ) -> Result<LossFn> {
        let slices = ranges.iter().map(|range| batch::slice(target, range.clone()));
        let targets = slices.collect::<Result<Vec<Y>>>()?;
        let loss = Arc::clone(&self.0);
        let mut lender = Lender::default();
        Ok(Box::new(move |i: usize, values: &[Tensor]| {
            // Moved only when needed: all targets together would fill the last stage's device.
            let target = feed::moved(&targets[i], device)?;
            let values = values.iter().map(Tensor::shallow_clone).collect();
            let mut loss = loss.lock().unwrap_or_else(PoisonError::into_inner);
            let target = lender.lend(target)?;
            let result = loss(values, &target);
            let (loss, output) = lender.take_back(result)?;
            // Detached, because it is kept until the step's end: its graph would keep the micro-batch's
            // activations.
            let output = batch::detached(&output)?;
            let mut all = collected.lock().unwrap_or_else(PoisonError::into_inner);
            all[start + i] = Some(output);
            Ok(loss)
        }))
    }
}

/// Joins the closure's outputs in sample order; none if the pipeline has no sample.
pub(crate) fn joined<O: Batch>(collected: &Collected<O>, samples: &Samples) -> Result<Option<O>> {
    let mut parts = collected.lock().unwrap_or_else(PoisonError::into_inner);
    match samples.join(parts.iter_mut().filter_map(Option::take).collect()) {
        Err(Error::Batch(BatchError::NothingToJoin)) => Ok(None),
        outputs => samples.restored(outputs?).map(Some),
    }
}

/// Fails if input and target differ in length; a target without a tensor to cut is allowed.
pub(crate) fn check_common_len(input: &impl Batch, target: &impl Batch) -> Result<()> {
    let input = batch::len(input)?;
    match batch::len(target) {
        Ok(target) if target != input => {
            Err(BatchError::LeafLengthsDiffer { lengths: vec![input, target] }.into())
        }
        Ok(_) | Err(Error::Batch(BatchError::NothingToCut)) => Ok(()),
        Err(error) => Err(error),
    }
}
