//! Host of the devices: its memory and the host link, given or measured.

use anyhow::Result;
use brimful::internal::{free_host_bytes, measure_host_link};
use brimful::plan::Request;
use brimful::{Bytes, device};
use brimful_plan::schedule::HostLinkCost;

use super::options::MeasuredModel;
use crate::exit::ensure_use;

impl MeasuredModel {
    /// Allows offloading of stages that fit on no device, if the host's memory is known.
    pub(super) fn host(&self, request: &mut Request<'_>) -> Result<()> {
        let is_measured = self.model.is_some();
        request.host_memory = match self.host_memory {
            Some(memory) => Some(memory.0),
            None if is_measured => Some(free_host_bytes()?),
            None => None,
        };
        if is_measured {
            request.host_link = measure_host_link(device::find(&self.device)?)?;
        }
        match self.given_host_link()? {
            Some(host_link) => request.host_link = host_link,
            None => ensure_use!(
                is_measured || request.host_memory.is_none(),
                "--host-memory with --profile needs --host-link too"
            ),
        }
        Ok(())
    }

    fn given_host_link(&self) -> Result<Option<HostLinkCost>> {
        ensure_use!(
            self.host_link.len() <= 2 && !self.host_link.contains(&Bytes(0)),
            "--host-link has a rate above 0 to the device, and one back where that differs"
        );
        let rates: Vec<_> = self.host_link.iter().map(|rate| rate.0 as f64).collect();
        let Some((&inward, back)) = rates.split_first() else { return Ok(None) };
        let outward = back.first().copied().unwrap_or(inward);
        Ok(Some(HostLinkCost { inward, outward, both: inward.min(outward) }))
    }
}
