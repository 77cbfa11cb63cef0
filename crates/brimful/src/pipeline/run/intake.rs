//! The model's inputs on their way to the first stage, one ahead of its use.
//!
//! Where that is an accelerator, a thread of their own brings them there: putting them into page-locked
//! memory takes the host longer than launching a layer does.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use tch::{Device, Tensor};

use crate::batch::copy_of;
use crate::copies::{Arriving, Copies};
use crate::queued::Queued;
use crate::{Error, Result};

/// The inputs of a step, in the order in which the first stage takes them.
#[derive(Debug)]
pub(crate) enum Intake {
    /// By micro-batch; each is taken once. They may still be computed where they are.
    Here(Vec<Vec<Tensor>>, Queued),
    /// The mini-batch's own memory, by micro-batch; and whether one was lent already.
    Lent(Vec<Vec<Tensor>>, bool),
    Fed(Receiver<Result<Vec<Arriving>>>),
}

impl Intake {
    /// Sends the inputs on their way, in this order of micro-batches, after all that this thread's
    /// streams have to do first: the caller's work is behind that.
    pub(crate) fn new(
        mut inputs: Vec<Vec<Tensor>>,
        order: impl Iterator<Item = usize>,
        copies: &Copies,
    ) -> Result<Self> {
        let elsewhere = |input: &&Tensor| input.device() != copies.device();
        let queued = Queued::behind(inputs.iter().flatten().filter(elsewhere))?;
        let here = !inputs.iter().flatten().any(|input| elsewhere(&input));
        if here {
            return Ok(Self::Lent(inputs, copies.borrowers.knows::<Self>()));
        }
        if copies.device() == Device::Cpu {
            return Ok(Self::Here(inputs, queued));
        }
        let ordered: Vec<_> = order.map(|i| std::mem::take(&mut inputs[i])).collect();
        // Without a place: one is on its way while another is in use.
        let (outlet, inlet) = sync_channel(0);
        let copies = copies.clone();
        // It ends by itself: when all is fed, or when the receiver is dropped with a failed step.
        thread::Builder::new()
            .spawn(move || feed(ordered, &copies, &queued, &outlet))
            .map_err(|cause| Error::no_thread("the copies of inputs", &cause))?;
        Ok(Self::Fed(inlet))
    }

    /// Whether micro-batches are the mini-batch itself, which must stay as it is.
    pub(crate) fn lends(&self) -> bool {
        matches!(self, Self::Lent(..))
    }

    /// The input of this micro-batch, which is the next, for this thread's work on the device. The
    /// first that is lent is a copy: see [`Lender`](crate::batch::Lender).
    pub(crate) fn next(&mut self, copies: &Copies, i: usize) -> Result<Vec<Tensor>> {
        let arriving = match self {
            Self::Lent(inputs, has_lent) => {
                let input = std::mem::take(&mut inputs[i]);
                let is_first = !std::mem::replace(has_lent, true);
                return if is_first { input.iter().map(copy_of).collect() } else { Ok(input) };
            }
            Self::Here(inputs, queued) => start(std::mem::take(&mut inputs[i]), copies, queued)?,
            Self::Fed(inlet) => inlet.recv().map_err(|_| gone())??,
        };
        arriving.into_iter().map(|arriving| copies.finish(arriving)).collect()
    }
}

/// Starts copy after copy; ends early where nobody listens.
fn feed(
    inputs: Vec<Vec<Tensor>>,
    copies: &Copies,
    queued: &Queued,
    outlet: &SyncSender<Result<Vec<Arriving>>>,
) {
    for values in inputs {
        if outlet.send(start(values, copies, queued)).is_err() {
            return;
        }
    }
}

fn start(values: Vec<Tensor>, copies: &Copies, queued: &Queued) -> Result<Vec<Arriving>> {
    values.iter().map(|value| copies.start(value, queued.on(value.device()))).collect()
}

fn gone() -> Error {
    Error::Torch("the thread that brings inputs to the device has ended".into())
}
