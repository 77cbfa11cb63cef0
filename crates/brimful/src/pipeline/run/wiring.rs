//! Makes the channels of one step. Each step has new channels, so a worker that drops its channel ends wakes every
//! worker that waits at the opposite ends.
//!
//! ```text
//!   stage j ── values ──▶ stage j + 1      as many places as the schedule needs
//!           ◀─ gradients ─
//!   stage a ══ a skip ══▶ stage b          direct, with a place for each micro-batch
//!           ◀═ its gradients ═
//! ```
//!
//! A skip never blocks its sender: a blocked sender could stop stages that the schedule lets run. Channels
//! between stages of one worker have a place for each micro-batch too. The world's channels connect stages
//! in other ranks.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use super::failure::Stop;
use crate::Result;
use crate::memory::Memory;
use crate::pipeline::ranks::Ranks;
use crate::pipeline::stage_layout::StageLayout;
use crate::pipeline::transfers::StageTransfer;
use crate::world::{self, Collective, Stopped};
use brimful_plan::schedule::Actions;

/// Sending end of a channel.
#[derive(Debug)]
pub(crate) enum StageOutlet {
    /// To a stage of the same worker, whose device runs work in order.
    Own(SyncSender<StageTransfer>),
    Near(SyncSender<StageTransfer>),
    Far(world::Outlet),
}

/// Receiving end of a channel.
#[derive(Debug)]
pub(crate) enum StageInlet {
    Near(Receiver<StageTransfer>),
    Far(world::Inlet),
}

impl StageOutlet {
    pub(crate) fn send(&self, transfer: StageTransfer) -> Result<(), Stop> {
        match self {
            Self::Own(sender) | Self::Near(sender) => {
                sender.send(transfer).map_err(|_| Stop::NeighbourGone)
            }
            Self::Far(outlet) => {
                let (tensors, ready) = transfer.on_host()?;
                outlet.send_when(tensors, ready).map_err(stop)
            }
        }
    }
}

impl StageInlet {
    pub(crate) fn take(&self) -> Result<StageTransfer, Stop> {
        match self {
            Self::Near(receiver) => receiver.recv().map_err(|_| Stop::NeighbourGone),
            Self::Far(inlet) => inlet.take().map(StageTransfer::pack).map_err(stop),
        }
    }
}

fn stop(stopped: Stopped) -> Stop {
    match stopped {
        Stopped::Collective => Stop::NeighbourGone,
        Stopped::Error(error) => Stop::Error(error),
    }
}

/// A stage's channel ends.
#[derive(Debug, Default)]
pub(crate) struct Ports {
    /// Values from the previous stage; none for the first stage.
    pub(crate) values_in: Option<StageInlet>,
    /// Values to the next stage; none for the last stage.
    pub(crate) values_out: Option<StageOutlet>,
    pub(crate) gradients_in: Option<StageInlet>,
    pub(crate) gradients_out: Option<StageOutlet>,
    /// Values of each imported skip, and the way back for their gradients.
    pub(crate) skips_in: Vec<(StageInlet, StageOutlet)>,
    /// Values and gradients of each exported skip, for every stage to which the skip goes.
    pub(crate) skips_out: Vec<Vec<(StageOutlet, StageInlet)>>,
}

/// Makes the channel ends of every stage in this rank; other ranks make their own.
pub(crate) fn wire(
    layout: &StageLayout,
    actions: &Actions,
    ranks: &Ranks,
    collective: &Collective,
    memory: impl Fn(usize) -> Option<Memory>,
) -> Result<Vec<Ports>> {
    let all = actions.micro_batches();
    let mut wiring = Wiring { ranks, collective, memory, next: 0 };
    let mut ports: Vec<Ports> = layout.stages.iter().map(|_| Ports::default()).collect();
    for j in 1..ports.len() {
        let before = layout.stages[j - 1].worker;
        let after = layout.stages[j].worker;
        // A worker would wait forever for a place in a channel to itself.
        let places = if before == after { all } else { actions.channel_capacity() };
        (ports[j - 1].values_out, ports[j].values_in) = wiring.way(before, after, places)?;
        (ports[j].gradients_out, ports[j - 1].gradients_in) = wiring.way(after, before, places)?;
    }
    for (source, stage) in layout.stages.iter().enumerate() {
        for export in &stage.exports {
            let mut ends = Vec::new();
            for &target in &export.targets {
                let (from, to) = (stage.worker, layout.stages[target].worker);
                let (values_out, values_in) = wiring.way(from, to, all)?;
                let (gradients_out, gradients_in) = wiring.way(to, from, all)?;
                ends.extend(values_out.zip(gradients_in));
                // Imports are in the order of their stashes, which is the order of this loop.
                ports[target].skips_in.extend(values_in.zip(gradients_out));
            }
            ports[source].skips_out.push(ends);
        }
    }
    Ok(ports)
}

/// Makes channels between workers. All ranks give a channel the same number.
struct Wiring<'a, M> {
    ranks: &'a Ranks,
    collective: &'a Collective,
    /// Memory of a worker of this rank, which arriving tensors are charged to.
    memory: M,
    next: u32,
}

impl<M: Fn(usize) -> Option<Memory>> Wiring<'_, M> {
    /// Makes a channel; returns its ends that belong to this rank.
    fn way(
        &mut self,
        from: usize,
        to: usize,
        places: usize,
    ) -> Result<(Option<StageOutlet>, Option<StageInlet>)> {
        // Counted even if neither end is here, so that all ranks give a channel the same number.
        self.next += 1;
        Ok(match (self.ranks.has(from), self.ranks.has(to)) {
            (true, true) => {
                let (outlet, inlet) = sync_channel(places);
                let outlet = match from == to {
                    true => StageOutlet::Own(outlet),
                    false => StageOutlet::Near(outlet),
                };
                (Some(outlet), Some(StageInlet::Near(inlet)))
            }
            (true, false) => {
                let outlet = self.collective.outlet(self.ranks.of(to), self.next, places);
                (Some(StageOutlet::Far(outlet)), None)
            }
            (false, true) => {
                let memory = (self.memory)(to);
                let inlet =
                    self.collective.inlet(self.ranks.of(from), self.next, places, memory)?;
                (None, Some(StageInlet::Far(inlet)))
            }
            (false, false) => (None, None),
        })
    }
}
