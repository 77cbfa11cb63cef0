//! The channels of one step: made anew for each, so that a worker that drops its ends wakes everyone
//! who waits for it.
//!
//! ```text
//!   stage j ── values ──▶ stage j + 1      as many places as the schedule needs
//!           ◀─ gradients ─
//!   stage a ══ a skip ══▶ stage b          straight, with a place for each micro-batch
//!           ◀═ its gradients ═
//! ```
//!
//! A skip never makes its sender wait: that could stop stages that the schedule's rules know to be
//! free. Stages on one worker are joined like others, with a place for each micro-batch.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use super::layout::Layout;
use super::transfer::Parcel;
use crate::schedule::Actions;

pub(super) type Outlet = SyncSender<Parcel>;
pub(super) type Inlet = Receiver<Parcel>;

/// A stage's ends of the channels.
#[derive(Debug, Default)]
pub(super) struct Ports {
    /// From the stage before; none for the first.
    pub(super) values_in: Option<Inlet>,
    /// To the stage after; none for the last.
    pub(super) values_out: Option<Outlet>,
    pub(super) gradients_in: Option<Inlet>,
    pub(super) gradients_out: Option<Outlet>,
    /// For each import, its values and the way back for their gradients.
    pub(super) skips_in: Vec<(Inlet, Outlet)>,
    /// For each export, the same for every stage that it goes to.
    pub(super) skips_out: Vec<Vec<(Outlet, Inlet)>>,
}

/// The ends of every stage.
pub(super) fn wire(layout: &Layout, actions: &Actions) -> Vec<Ports> {
    let all = actions.micro_batches();
    let mut ports: Vec<Ports> = layout.stages.iter().map(|_| Ports::default()).collect();
    for j in 1..ports.len() {
        let near = layout.stages[j - 1].worker == layout.stages[j].worker;
        let places = if near { all } else { actions.channel_capacity() };
        let (values_out, values_in) = sync_channel(places);
        let (gradients_out, gradients_in) = sync_channel(places);
        ports[j - 1].values_out = Some(values_out);
        ports[j - 1].gradients_in = Some(gradients_in);
        ports[j].values_in = Some(values_in);
        ports[j].gradients_out = Some(gradients_out);
    }
    for (source, stage) in layout.stages.iter().enumerate() {
        for export in &stage.exports {
            let mut ends = Vec::new();
            for &target in &export.targets {
                let (values_out, values_in) = sync_channel(all);
                let (gradients_out, gradients_in) = sync_channel(all);
                ends.push((values_out, gradients_in));
                // Imports are in the order of their stashes, which is the order of this loop.
                ports[target].skips_in.push((values_in, gradients_out));
            }
            ports[source].skips_out.push(ends);
        }
    }
    ports
}
