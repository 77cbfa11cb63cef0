//! Exchanges tensors with the other stages, takes the model's inputs and hands over its outputs.

use tch::Tensor;

use super::failure::Stop;
use super::wiring::StageOutlet;
use super::worker_run::{Entered, HeldMicroBatch, Output, WorkerRun};
use super::{End, backward};
use crate::Result;
use crate::pipeline::site::{Boundary, HeldInput, Site, leaves};
use crate::pipeline::transfers::{StageTransfer, Tensors, TransferClock};
use brimful_plan::schedule::{Action, MicroBatchId, StageId, Transfer, TransferKind};

impl WorkerRun {
    /// Receives the stage's input, with the copy on the host if the input waited there.
    pub(crate) fn receive(
        &mut self,
        site: &mut Site,
        at: usize,
        i: usize,
    ) -> Result<Entered, Stop> {
        if let Some(arrived) = self.arrived[at][i].take() {
            return Ok(arrived);
        }
        let entering = self.boundary_transfer(TransferKind::BoundaryIn, site.stages[at].id, i);
        let (ports, clock) = (&self.job.ports[at], &mut self.transfer_clock);
        let mut staged = Vec::new();
        let mut taken = |transfer: StageTransfer| {
            if transfer.is_staged {
                staged.push(transfer.share());
            }
            site.copy_streams.unpack_values(transfer, entering, clock)
        };
        let values = match &ports.values_in {
            Some(inlet) => taken(inlet.take()?)?,
            None => site.formatted(self.intake.next(&site.inputs, i)?)?,
        };
        let mut skips = Vec::new();
        for (inlet, _) in &ports.skips_in {
            skips.push(taken(inlet.take()?)?);
        }
        let all = staged.len() == 1 + skips.len();
        site.keep_pace()?;
        Ok((Boundary { values, skips, norm: None }, all.then_some(staged)))
    }

    /// Brings a stage's input for its next run of a micro-batch to the device: from the previous stage before
    /// the first run, otherwise back from the host.
    pub(crate) fn bring_in(&mut self, site: &mut Site, at: usize, i: usize) -> Result<(), Stop> {
        match self.kept[at][i].take() {
            None => self.arrived[at][i] = Some(self.receive(site, at, i)?),
            Some(HeldMicroBatch { input: HeldInput::Host(transfers), output, generation }) => {
                let input = HeldInput::Here(self.bring_back(site, at, i, &transfers)?);
                self.kept[at][i] = Some(HeldMicroBatch { input, output, generation });
            }
            // The input has not left the device.
            here => self.kept[at][i] = here,
        }
        Ok(())
    }

    /// Copies the stage's input from the host to the device again.
    pub(crate) fn bring_back(
        &mut self,
        site: &mut Site,
        at: usize,
        i: usize,
        transfers: &[StageTransfer],
    ) -> Result<Boundary> {
        let entering = self.boundary_transfer(TransferKind::BoundaryIn, site.stages[at].id, i);
        let mut parts = Vec::new();
        for transfer in transfers {
            parts.push(site.copy_streams.unpack_values(
                transfer.share(),
                entering,
                &mut self.transfer_clock,
            )?);
        }
        site.keep_pace()?;
        let values = parts.remove(0);
        Ok(Boundary { values, skips: parts, norm: None })
    }

    /// Returns the transfer that belongs to the next or current action, as the list of transfers has it.
    pub(crate) fn boundary_transfer(
        &self,
        kind: TransferKind,
        stage: StageId,
        i: usize,
    ) -> Transfer {
        Transfer { kind, stage, micro_batch: Some(MicroBatchId::at(i)), before: self.next }
    }

    /// Sends the output to the next stage; on the last stage, computes the loss or gathers the output. Returns
    /// the start of the backward.
    pub(crate) fn hand_on(
        &mut self,
        site: &Site,
        at: usize,
        action: Action,
        output: Boundary,
        traced: impl Fn(&Tensor) -> bool,
    ) -> Result<Output, Stop> {
        if self.is_last(at) {
            let output = self.end_with(site, action.micro_batch.index(), output)?;
            self.timeline.end(action)?;
            return Ok(output);
        }
        if let Some(barriers) = &mut self.barriers {
            barriers.count_in(at, &output)?;
        }
        // The action ends here: transfers to the host and waits for a channel are not its work.
        self.timeline.end(action)?;
        let outgoing = self.boundary_transfer(
            TransferKind::BoundaryOut,
            action.stage,
            action.micro_batch.index(),
        );
        let (ports, clock) = (&self.job.ports[at], &mut self.transfer_clock);
        let mut pack = |values: &[Tensor], outlet: &StageOutlet, to: StageId| {
            let transfer = StageTransfer::values(leaves(values, &traced)?);
            finish_transfer(site, transfer, outlet, Transfer { stage: to, ..outgoing }, clock)
        };
        let mut transfers = Vec::new();
        let targets = site.stages[at].targets();
        for ((values, ends), targets) in output.skips.iter().zip(&ports.skips_out).zip(targets) {
            // Each target gets its own leaf, in which gradients accumulate on the target's thread.
            for ((outlet, _), to) in ends.iter().zip(targets) {
                transfers.push((outlet, pack(values, outlet, StageId::at(*to))?));
            }
        }
        // The values come last. Skips never wait for a channel, so they travel while the values wait.
        if let Some(outlet) = &ports.values_out {
            let next = StageId(action.stage.0 + 1);
            transfers.push((outlet, pack(&output.values, outlet, next)?));
        }
        send(transfers)?;
        Ok(Output::Boundary(output))
    }

    fn end_with(&mut self, site: &Site, i: usize, output: Boundary) -> Result<Output> {
        if let End::Closure(_) = self.job.end {
            return Ok(Output::Terms(self.loss(site, i, &output.values)?));
        }
        self.outputs[i] = leaves(&output.values, |_| false)?;
        Ok(Output::Boundary(output))
    }

    /// Returns the gradients of the stage's output: of its values, then of each skip.
    pub(crate) fn receive_gradients(
        &mut self,
        site: &mut Site,
        at: usize,
        i: usize,
    ) -> Result<Vec<Tensors>, Stop> {
        if let Some(arrived) = self.gradients[at][i].take() {
            return Ok(arrived);
        }
        let next = StageId(site.stages[at].id.0 + 1);
        let back = self.boundary_transfer(TransferKind::GradientIn, next, i);
        let (ports, clock) = (&self.job.ports[at], &mut self.transfer_clock);
        let mut gradients = vec![match &ports.gradients_in {
            Some(inlet) => site.copy_streams.unpack(inlet.take()?, back, clock)?,
            None => std::mem::take(&mut self.output_gradients[i]),
        }];
        for (ends, targets) in ports.skips_out.iter().zip(site.stages[at].targets()) {
            let mut sum = Vec::new();
            for ((_, inlet), from) in ends.iter().zip(targets) {
                let back = Transfer { stage: StageId::at(*from), ..back };
                sum = backward::add(sum, site.copy_streams.unpack(inlet.take()?, back, clock)?)?;
            }
            gradients.push(sum);
        }
        Ok(gradients)
    }

    /// Sends the input's gradients to the stages that the input came from.
    pub(crate) fn hand_back(
        &mut self,
        site: &Site,
        at: usize,
        action: Action,
        gradients: Vec<Tensors>,
    ) -> Result<(), Stop> {
        let outgoing = self.boundary_transfer(
            TransferKind::GradientOut,
            action.stage,
            action.micro_batch.index(),
        );
        let (ports, clock) = (&self.job.ports[at], &mut self.transfer_clock);
        let skips = ports.skips_in.iter().map(|(_, outlet)| Some(outlet));
        let outlets = std::iter::once(ports.gradients_out.as_ref()).chain(skips);
        let mut transfers = Vec::new();
        for (outlet, gradients) in outlets.zip(gradients) {
            if let Some(outlet) = outlet {
                let transfer = StageTransfer::pack(gradients);
                transfers.push((outlet, finish_transfer(site, transfer, outlet, outgoing, clock)?));
            }
        }
        // Values last: only their channel may be full.
        transfers.reverse();
        send(transfers)
    }
}

/// Prepares a transfer for its channel. Copies the tensors to host staging if they wait there, as the transfer
/// `one`; otherwise records an event if a different worker of this process receives them. Tensors wait on the host
/// because all micro-batches may pass a stage before the next stage takes the first output.
fn finish_transfer(
    site: &Site,
    transfer: StageTransfer,
    outlet: &StageOutlet,
    one: Transfer,
    clock: &mut TransferClock,
) -> Result<StageTransfer> {
    match (outlet, site.host_staging_of(one.stage)) {
        (StageOutlet::Far(_), _) => Ok(transfer),
        (_, Some(host)) => site.leave(transfer, host, one, clock),
        // Needs no event, because one stream keeps the order. An event would cost as much as a kernel launch.
        (StageOutlet::Own(_), None) => Ok(transfer),
        (StageOutlet::Near(_), None) => transfer.with_event(site.device),
    }
}

fn send(transfers: Vec<(&StageOutlet, StageTransfer)>) -> Result<(), Stop> {
    let mut transfers = transfers.into_iter();
    transfers.try_for_each(|(outlet, transfer)| outlet.send(transfer))
}
