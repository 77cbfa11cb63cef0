//! The caller's loss as the last stage runs it, and what it gives beside the losses.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use tch::{Device, Tensor};

use super::error::PipelineError;
use super::job::Head;
use crate::batch::{self, Batch, Lender};
use crate::{Error, Loss, Result, feed};

/// What a closure gave beside its losses, by micro-batch.
pub(super) type Collected<O> = Arc<Mutex<Vec<Option<O>>>>;

/// The caller's closure, which may be needed for more than one try.
pub(super) type SharedLoss<F> = Arc<Mutex<F>>;

pub(super) fn shared<F>(loss: F) -> SharedLoss<F> {
    Arc::new(Mutex::new(loss))
}

/// The closure as the last stage calls it: with the number of a micro-batch.
pub(super) fn head<Y, O, F>(
    target: &Y,
    ranges: &[Range<usize>],
    device: Device,
    loss: &SharedLoss<F>,
) -> Result<(Head, Collected<O>)>
where
    Y: Batch + 'static,
    O: Batch + 'static,
    F: FnMut(&[Tensor], &Y) -> Result<(Loss, O)> + Send + 'static,
{
    let slices = ranges.iter().map(|range| batch::slice(target, range.clone()));
    let targets = slices.collect::<Result<Vec<Y>>>()?;
    let collected: Collected<O> = Arc::new(Mutex::new(ranges.iter().map(|_| None).collect()));
    let (given, loss) = (Arc::clone(&collected), Arc::clone(loss));
    let mut lender = Lender::default();
    let head = move |i: usize, values: &[Tensor]| {
        let target = feed::moved(&targets[i], device)?;
        let mut loss = loss.lock().unwrap_or_else(PoisonError::into_inner);
        let (loss, output) = lender.lend(target, |target| loss(values, &target))?;
        let output = output.map(&mut |leaf| Ok(leaf.tensor().f_detach()?))?;
        given.lock().unwrap_or_else(PoisonError::into_inner)[i] = Some(output);
        Ok(loss)
    };
    Ok((Box::new(head), collected))
}

/// What the closure gave beside its losses, in sample order.
pub(super) fn joined<O: Batch>(collected: &Collected<O>) -> Result<O> {
    let mut parts = collected.lock().unwrap_or_else(PoisonError::into_inner);
    batch::join(parts.iter_mut().filter_map(Option::take).collect())
}

/// The samples of both, which must be as many; a target may also have nothing to cut.
pub(super) fn common_len(input: &impl Batch, target: &impl Batch) -> Result<usize> {
    let input = batch::len(input)?;
    match batch::len(target) {
        Ok(target) if target != input => {
            Err(Error::LeafLengthsDiffer { lengths: vec![input, target] })
        }
        Ok(_) | Err(Error::NothingToCut) => Ok(input),
        Err(error) => Err(error),
    }
}

/// The only output.
pub(super) fn one(values: &[Tensor]) -> Result<&Tensor> {
    match values {
        [only] => Ok(only),
        _ => Err(PipelineError::NotOneOutput { given: values.len() }.into()),
    }
}
