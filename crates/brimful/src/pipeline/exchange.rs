//! What a worker exchanges with the others, and with the pipeline's two ends.

use tch::{Device, Tensor};

use super::backward;
use super::run::{End, Flow, Output, Run};
use super::stage::{Boundary, leaves};
use super::transfer::{Parcel, Tensors};
use super::wiring::{Inlet, Outlet};
use super::worker::Site;
use crate::Result;
use crate::schedule::Action;

impl Run {
    /// What enters the stage, or nothing where the stages before are gone.
    pub(super) fn receive(
        &mut self,
        site: &mut Site,
        at: usize,
        i: usize,
    ) -> Result<Option<Boundary>> {
        let values = match &self.job.ports[at].values_in {
            Some(inlet) => match take(inlet) {
                Some(parcel) => site.dock.unpack_values(parcel)?,
                None => return Ok(None),
            },
            None => self.next_input(site, i)?,
        };
        let ports = &self.job.ports[at];
        let mut skips = Vec::with_capacity(ports.skips_in.len());
        for (inlet, _) in &ports.skips_in {
            let Some(parcel) = take(inlet) else { return Ok(None) };
            skips.push(site.dock.unpack_values(parcel)?);
        }
        Ok(Some(Boundary { values, skips }))
    }

    /// The model's input, most of whose way to the device lies behind it.
    fn next_input(&mut self, site: &mut Site, i: usize) -> Result<Vec<Tensor>> {
        let arriving = match self.ahead.take() {
            Some(arriving) => arriving,
            None => site.dock.start(std::mem::take(&mut self.job.inputs[i]))?,
        };
        site.dock.finish(arriving)
    }

    /// Lets the model's next input set out, now that the device has work.
    pub(super) fn look_ahead(&mut self, site: &mut Site, at: usize, i: usize) -> Result<()> {
        let is_first = self.job.ports[at].values_in.is_none();
        if is_first && site.device != Device::Cpu && i + 1 < self.job.inputs.len() {
            let next = std::mem::take(&mut self.job.inputs[i + 1]);
            self.ahead = Some(site.dock.start(next)?);
        }
        Ok(())
    }

    /// Sends the output on, or ends the model with it.
    pub(super) fn hand_on(
        &mut self,
        site: &Site,
        at: usize,
        action: Action,
        output: Boundary,
        traced: impl Fn(&Tensor) -> bool,
    ) -> Result<(Flow, Output)> {
        let i = action.micro_batch.index();
        if self.is_last(at) {
            let output = match self.job.end {
                End::Loss(_) => Output::Terms(self.loss(site, i, &output.values)?),
                _ => {
                    self.outputs[i] = leaves(&output.values, |_| false)?;
                    Output::Boundary(output)
                }
            };
            self.timeline.end(action)?;
            return Ok((Flow::Done, output));
        }
        let pack = |values: &[Tensor]| Parcel::values(leaves(values, &traced)?, site.device);
        let values = pack(&output.values)?;
        let mut skips = Vec::new();
        for (values, ends) in output.skips.iter().zip(&self.job.ports[at].skips_out) {
            // Each target gets a leaf of its own: gradients gather in it, on the target's thread.
            skips.extend(ends.iter().map(|(outlet, _)| Ok((outlet, pack(values)?))));
        }
        let skips: Vec<(&Outlet, Parcel)> = skips.into_iter().collect::<Result<_>>()?;
        self.timeline.end(action)?;
        let all_sent = skips.into_iter().all(|(outlet, parcel)| outlet.send(parcel).is_ok())
            && send(self.job.ports[at].values_out.as_ref(), values);
        Ok((if all_sent { Flow::Done } else { Flow::Stopped }, Output::Boundary(output)))
    }

    /// The gradients of the stage's output, its skips' last, or nothing where others are gone.
    pub(super) fn receive_gradients(
        &mut self,
        site: &mut Site,
        at: usize,
        i: usize,
        output: &Boundary,
    ) -> Result<Option<Vec<Tensors>>> {
        let ports = &self.job.ports[at];
        let mut gradients = Vec::with_capacity(1 + output.skips.len());
        gradients.push(match &ports.gradients_in {
            Some(inlet) => match take(inlet) {
                Some(parcel) => site.dock.unpack(parcel)?,
                None => return Ok(None),
            },
            None => std::mem::take(&mut self.output_gradients[i]),
        });
        for ends in &ports.skips_out {
            let mut sum: Option<Tensors> = None;
            for (_, inlet) in ends {
                let Some(parcel) = take(inlet) else { return Ok(None) };
                let arrived = site.dock.unpack(parcel)?;
                sum = Some(match sum {
                    Some(sum) => backward::add(sum, arrived)?,
                    None => arrived,
                });
            }
            gradients.extend(sum);
        }
        Ok(Some(gradients))
    }

    /// Sends the input's gradients to where the input came from.
    pub(super) fn hand_back(
        &self,
        site: &Site,
        at: usize,
        gradients: Vec<Tensors>,
    ) -> Result<Flow> {
        let ports = &self.job.ports[at];
        let mut gradients = gradients.into_iter();
        let values = gradients.next().unwrap_or_default();
        for ((_, outlet), gradients) in ports.skips_in.iter().zip(gradients) {
            if outlet.send(Parcel::pack(gradients, site.device)?).is_err() {
                return Ok(Flow::Stopped);
            }
        }
        let Some(outlet) = &ports.gradients_out else { return Ok(Flow::Done) };
        let sent = outlet.send(Parcel::pack(values, site.device)?).is_ok();
        Ok(if sent { Flow::Done } else { Flow::Stopped })
    }
}

fn take(inlet: &Inlet) -> Option<Parcel> {
    inlet.recv().ok()
}

fn send(outlet: Option<&Outlet>, parcel: Parcel) -> bool {
    outlet.is_none_or(|outlet| outlet.send(parcel).is_ok())
}
