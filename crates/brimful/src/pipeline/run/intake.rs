//! Brings the model's inputs to the first stage: copies one input while the previous one is in use.
//!
//! For an accelerator a separate thread copies them: copying them to pinned memory takes the host longer
//! than launching a layer.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use tch::{Device, Tensor};

use crate::batch::{Borrower, copy_of};
use crate::streams::{Arriving, CopyStreams, StreamFence};
use crate::{Error, Result};

/// Inputs of a step, in the order in which the first stage takes them.
#[derive(Debug)]
pub(crate) enum Intake {
    /// Inputs by micro-batch, copied when they are taken. The work that computes them may still be queued on their
    /// device.
    Here(Vec<Vec<Tensor>>, StreamFence),
    /// Parts of the mini-batch's own memory, by micro-batch, and whether one of them was lent already.
    Lent(Vec<Vec<Tensor>>, bool),
    Fed(Receiver<Result<Vec<Arriving>>>),
}

impl Intake {
    /// Starts to bring the inputs, in this order of micro-batches, after all work that is queued on this thread's
    /// streams, because that work may compute the inputs.
    pub(crate) fn new(
        mut inputs: Vec<Vec<Tensor>>,
        order: impl Iterator<Item = usize>,
        streams: &CopyStreams,
    ) -> Result<Self> {
        let elsewhere = |input: &&Tensor| input.device() != streams.device;
        let fence = StreamFence::behind(inputs.iter().flatten().filter(elsewhere))?;
        let here = !inputs.iter().flatten().any(|input| elsewhere(&input));
        if here {
            return Ok(Self::Lent(inputs, streams.borrowers.knows(Borrower::of_type::<Self>())));
        }
        if streams.device == Device::Cpu {
            return Ok(Self::Here(inputs, fence));
        }
        let ordered: Vec<_> = order.map(|i| std::mem::take(&mut inputs[i])).collect();
        // Capacity 0: one input travels while another is in use.
        let (outlet, inlet) = sync_channel(0);
        let streams = streams.clone();
        // The thread ends when all inputs are sent, or when a failed step drops the receiver.
        thread::Builder::new()
            .spawn(move || feed(ordered, &streams, &fence, &outlet))
            .map_err(|cause| Error::no_thread("the copies of inputs", &cause))?;
        Ok(Self::Fed(inlet))
    }

    /// Returns whether micro-batches are the mini-batch's own memory, which must stay unchanged.
    pub(crate) fn lends(&self) -> bool {
        matches!(self, Self::Lent(..))
    }

    /// Returns the input of this micro-batch, which is the next one, ready for this thread's work on the
    /// device. The first input that is lent is a copy: see [`Lender`](crate::batch::Lender).
    pub(crate) fn next(&mut self, streams: &CopyStreams, i: usize) -> Result<Vec<Tensor>> {
        let arriving = match self {
            Self::Lent(inputs, has_lent) => {
                let input = std::mem::take(&mut inputs[i]);
                let is_first = !std::mem::replace(has_lent, true);
                return if is_first { input.iter().map(copy_of).collect() } else { Ok(input) };
            }
            Self::Here(inputs, fence) => start(std::mem::take(&mut inputs[i]), streams, fence)?,
            Self::Fed(inlet) => inlet.recv().map_err(|_| gone())??,
        };
        arriving.into_iter().map(|arriving| streams.finish(arriving)).collect()
    }
}

/// Starts one copy after another; ends early if the receiver is gone.
fn feed(
    inputs: Vec<Vec<Tensor>>,
    streams: &CopyStreams,
    fence: &StreamFence,
    outlet: &SyncSender<Result<Vec<Arriving>>>,
) {
    for values in inputs {
        if outlet.send(start(values, streams, fence)).is_err() {
            return;
        }
    }
}

fn start(values: Vec<Tensor>, streams: &CopyStreams, fence: &StreamFence) -> Result<Vec<Arriving>> {
    values.iter().map(|value| streams.start(value, fence.on(value.device()))).collect()
}

fn gone() -> Error {
    Error::Torch("the thread that brings inputs to the device has ended".into())
}
