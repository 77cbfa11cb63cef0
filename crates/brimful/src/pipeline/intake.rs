//! The model's inputs on their way to the first stage, one ahead of its use.
//!
//! Where that is an accelerator, a thread of their own brings them there: putting them into page-locked
//! memory takes the host longer than launching a layer does.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use tch::{Device, Tensor};

use super::transfer::{Arriving, Dock};
use crate::{Error, Result};

/// The inputs of a step, in the order in which the first stage takes them.
#[derive(Debug)]
pub(super) enum Intake {
    /// By micro-batch; each is taken once.
    Here(Vec<Vec<Tensor>>),
    Fed(Receiver<Result<Vec<Arriving>>>),
}

impl Intake {
    /// Sends the inputs on their way, in this order of micro-batches.
    pub(super) fn new(
        mut inputs: Vec<Vec<Tensor>>,
        order: impl Iterator<Item = usize>,
        device: Device,
    ) -> Self {
        let here = inputs.iter().flatten().all(|input| input.device() == device);
        if here || device == Device::Cpu {
            return Self::Here(inputs);
        }
        let ordered: Vec<_> = order.map(|i| std::mem::take(&mut inputs[i])).collect();
        // Without a place: one is on its way while another is in use.
        let (outlet, inlet) = sync_channel(0);
        thread::spawn(move || feed(ordered, device, &outlet));
        Self::Fed(inlet)
    }

    /// The input of this micro-batch, which is the next, for this thread's work on the device.
    pub(super) fn next(&mut self, dock: &mut Dock, i: usize) -> Result<Vec<Tensor>> {
        let arriving = match self {
            Self::Here(inputs) => dock.start(std::mem::take(&mut inputs[i]))?,
            Self::Fed(inlet) => inlet.recv().map_err(|_| gone())??,
        };
        dock.finish(arriving)
    }
}

/// Starts copy after copy; ends early where nobody listens.
fn feed(inputs: Vec<Vec<Tensor>>, device: Device, outlet: &SyncSender<Result<Vec<Arriving>>>) {
    let mut dock = Dock::new(device);
    for values in inputs {
        if outlet.send(dock.start(values)).is_err() {
            return;
        }
    }
}

fn gone() -> Error {
    Error::Torch("the thread that brings inputs to the device has ended".into())
}
