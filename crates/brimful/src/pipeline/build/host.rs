//! Cuts a model for offload, and checks that the host has memory for its stages.

use std::time::Duration;

use super::{Builder, Offload};
use crate::Result;
use crate::balance;
use crate::batch::summed_in;
use crate::memory;
use crate::pipeline::error::PipelineError;
use crate::pipeline::ranks::Ranks;
use brimful_plan::bytes::Bytes;
use brimful_plan::schedule::{DeviceId, Location, Schedule, StageLocation};

impl Builder {
    /// Chooses the schedule and balance of an offloaded pipeline on this many devices, unless they are set. The
    /// schedule is breadth-first: weights cross the host link twice a step, however many micro-batches there
    /// are. Stages are as small as possible, because a device buffer is as large as the largest stage.
    pub(super) fn cut_for_offload(mut self, devices: usize) -> Result<Self> {
        let given = match &self.offload {
            Offload::Device | Offload::Auto { .. } => return Ok(self),
            Offload::Host => self.balance.stages(),
            Offload::Each(locations) if locations.contains(&Location::Host) => {
                Some(locations.len())
            }
            Offload::Each(_) => return Ok(self),
        };
        let counts = self.layers.parameters_used()?;
        let finest = balance::finest(&counts, counts.len())?.sizes().len();
        let stages_per_device = match self.schedule {
            Some(schedule) => schedule.stages_per_device(),
            None => (given.unwrap_or(finest) / devices).max(1),
        };
        let schedule = self.schedule.unwrap_or(Schedule::BreadthFirst { stages_per_device });
        let stages = devices * stages_per_device;
        let is_cut = self.offload == Offload::Host && self.balance.is_even() && stages <= finest;
        if is_cut {
            self.balance = balance::finest(&counts, stages)?.into();
        }
        self.schedule = Some(schedule);
        Ok(self)
    }

    /// Fails if the offloaded stages need more than the host's free memory, before any of it is allocated.
    pub(super) fn check_host(
        &self,
        sizes: &[usize],
        locations: &[StageLocation],
        placement: &[DeviceId],
        ranks: &Ranks,
    ) -> Result<()> {
        if locations.iter().all(|location| location.weights == Location::Device) {
            return Ok(());
        }
        let here = ranks.here();
        let is_here = |(location, device): (&StageLocation, &DeviceId)| {
            location.weights == Location::Host && here.contains(&device.index())
        };
        let own: Vec<bool> = locations.iter().zip(placement).map(is_here).collect();
        let limited = self.host.as_ref().is_some_and(|arena| arena.limit().is_some());
        let needed = self.host_bytes_of(sizes, &own, ranks.replicas_here);
        let stages = own.iter().filter(|own| **own).count() * ranks.replicas_here;
        let needs = needed.map(|needed| (needed, stages, limited));
        let needs = ranks.world().vote("the host's memory", needs, Duration::ZERO)?;
        // Ranks of one machine share its memory, except those with a limited arena.
        let (me, hosts) = (ranks.world().rank(), ranks.world().hosts());
        let shares = |rank: usize| !limited && !needs[rank].2 && hosts[rank] == hosts[me];
        let sharing = (0..needs.len()).filter(|rank| *rank == me || shares(*rank));
        let sum =
            |(bytes, all): (u64, usize), rank: usize| (bytes + needs[rank].0, all + needs[rank].1);
        let ((needed, stages), free) = (sharing.fold((0, 0), sum), self.free_host_bytes()?);
        if needed <= free {
            return Ok(());
        }
        let (needed, free) = (Bytes(needed), Bytes(free));
        Err(PipelineError::HostTooSmall { stages, needed, free }.into())
    }

    /// Returns the bytes of these stages on the host, in this many replicas: weights, gradients if they are
    /// kept, and the first replica's optimizer state, if the optimizer is known.
    fn host_bytes_of(&self, sizes: &[usize], own: &[bool], replicas: usize) -> Result<u64> {
        let counts = self.layers.parameter_counts()?;
        let mut counts = counts.iter();
        let mut numbers = 0;
        for (size, own) in sizes.iter().zip(own) {
            let stage: u64 = counts.by_ref().take(*size).sum();
            numbers += if *own { stage } else { 0 };
        }
        let weight = self.kind.elt_size_in_bytes();
        // Sums over ranks come back in f32.
        let gradient = match (
            self.offloading.updates_in_backward,
            self.offloading.gradient_kind,
            self.world.size(),
        ) {
            (true, ..) => 0,
            (false, Some(kind), 1) => kind.elt_size_in_bytes(),
            (false, ..) => summed_in(self.kind).elt_size_in_bytes(),
        };
        let factor = self.reserved.map_or(0.0, |method| method.state_factor_in(self.kind));
        let state = (numbers * weight as u64) as f64 * factor;
        Ok(numbers * (weight + gradient) as u64 * replicas as u64 + state as u64)
    }

    fn free_host_bytes(&self) -> Result<u64> {
        match self.host_arena_bytes() {
            Some(free) => Ok(free),
            None => Ok(memory::host()?.available.0),
        }
    }

    /// Returns the free bytes of the host's arena, if it has a limit.
    pub(super) fn host_arena_bytes(&self) -> Option<u64> {
        let arena = self.host.as_ref()?;
        Some(arena.limit()?.saturating_sub(arena.current()))
    }
}
