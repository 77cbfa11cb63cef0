//! Handshake of the ranks that build a pipeline together.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::search::{Question, ResolvedBalance, limit};
use crate::workers::DeviceSpec;
use crate::world::{World, WorldError};
use crate::{Result, balance};

/// Devices of one pipeline, as all its ranks know them.
#[derive(Debug)]
pub(crate) struct Roster<'a> {
    world: &'a World,
    /// Memory limit of each device, if known.
    pub(crate) limits: Vec<Option<u64>>,
    /// Number of devices of each rank.
    pub(crate) devices: Vec<usize>,
}

/// Data that a rank sends in the handshake.
#[derive(Debug, Serialize, Deserialize)]
struct RosterHello {
    common: String,
    limits: Vec<Option<u64>>,
}

impl<'a> Roster<'a> {
    /// Checks that all ranks build the same pipeline, and counts their devices. Also returns this rank's devices.
    pub(crate) fn handshake(
        world: &'a World,
        replicas: usize,
        replicas_here: usize,
        request: Result<(Vec<DeviceSpec>, String)>,
    ) -> Result<(Vec<DeviceSpec>, Self)> {
        let reported = request.as_ref().map(|(devices, common)| RosterHello {
            common: common.clone(),
            limits: devices.iter().map(limit).collect(),
        });
        let all = world.vote("build", reported.map_err(Clone::clone), Duration::ZERO)?;
        let common = all.iter().map(|request| request.common.clone()).collect();
        WorldError::check_same("the pipeline", common)?;
        if replicas == 0 || !world.size().is_multiple_of(replicas) {
            return Err(WorldError::DoesNotDivide { ranks: world.size(), replicas }.into());
        }
        let ranks = world.size() / replicas;
        // With several pipelines in one process, each has an equal part of the devices.
        let devices: Vec<usize> =
            all.iter().map(|hello| hello.limits.len() / replicas_here).collect();
        let rows = devices.chunks(ranks).map(|row| format!("{row:?}")).collect();
        WorldError::check_same("the number of devices of each rank", rows)?;
        let mine = world.rank() / ranks * ranks;
        let limits = all.into_iter().skip(mine).take(ranks).flat_map(|hello| hello.limits);
        let limits = limits.take(devices[..ranks].iter().sum()).collect();
        let roster = Self { world, limits, devices: devices[..ranks].to_vec() };
        // Cannot fail here: an error of this rank would have ended `vote` with an error.
        Ok((request?.0, roster))
    }

    /// Returns the balance in numbers, and the costs for automatic schedules, as rank 0 finds them. Measured times
    /// differ between ranks, but all ranks must make the same lists of actions.
    pub(super) fn resolve_balance(&self, question: &Question<'_>) -> Result<ResolvedBalance> {
        if self.world.size() == 1 {
            return question.resolve();
        }
        let reported =
            |resolved: ResolvedBalance| (resolved.balance.sizes().to_vec(), resolved.recipe);
        let here = match self.world.rank() {
            0 => question.resolve().map(|resolved| Some(reported(resolved))),
            _ => Ok(None),
        };
        let first = self.world.vote("balance", here, Duration::ZERO)?.swap_remove(0);
        let (sizes, recipe) = first.unwrap_or_default();
        let balance = balance::Balance::new(sizes, question.builder.layers.len())?;
        Ok(ResolvedBalance { balance, recipe })
    }
}
