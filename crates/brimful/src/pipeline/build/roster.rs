//! What ranks tell each other before they build a pipeline together.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::balance::{Question, SettledBalance, limit};
use crate::workers::DeviceSpec;
use crate::world::{World, WorldError};
use crate::{Result, balance};

/// The devices of one pipeline, as all its ranks know them.
#[derive(Debug)]
pub(crate) struct Roster<'a> {
    world: &'a World,
    /// Where each device's memory ends, if that is known.
    pub(crate) limits: Vec<Option<u64>>,
    /// How many devices each rank has.
    pub(crate) devices: Vec<usize>,
}

/// What a rank brings with it.
#[derive(Debug, Serialize, Deserialize)]
struct RosterHello {
    common: String,
    limits: Vec<Option<u64>>,
}

impl<'a> Roster<'a> {
    /// Makes sure that all ranks build the same, and counts their devices. Gives this rank's, too.
    pub(crate) fn handshake(
        world: &'a World,
        replicas: usize,
        replicas_here: usize,
        brought: Result<(Vec<DeviceSpec>, String)>,
    ) -> Result<(Vec<DeviceSpec>, Self)> {
        let told = brought.as_ref().map(|(devices, common)| RosterHello {
            common: common.clone(),
            limits: devices.iter().map(limit).collect(),
        });
        let all = world.settle("build", told.map_err(Clone::clone), Duration::ZERO)?;
        let common = all.iter().map(|brought| brought.common.clone()).collect();
        WorldError::check_same("the pipeline", common)?;
        if replicas == 0 || !world.size().is_multiple_of(replicas) {
            return Err(WorldError::DoesNotDivide { ranks: world.size(), replicas }.into());
        }
        let ranks = world.size() / replicas;
        // Of several pipelines in one process each has its part of the devices, as many as the others.
        let devices: Vec<usize> =
            all.iter().map(|hello| hello.limits.len() / replicas_here).collect();
        let rows = devices.chunks(ranks).map(|row| format!("{row:?}")).collect();
        WorldError::check_same("the number of devices of each rank", rows)?;
        let mine = world.rank() / ranks * ranks;
        let limits = all.into_iter().skip(mine).take(ranks).flat_map(|hello| hello.limits);
        let limits = limits.take(devices[..ranks].iter().sum()).collect();
        let roster = Self { world, limits, devices: devices[..ranks].to_vec() };
        // Cannot fail here: had this rank brought an error, `settle` would have returned one.
        Ok((brought?.0, roster))
    }

    /// The balance in numbers and what automatic lists are made from, as rank 0 finds them: measured
    /// times differ from rank to rank, and all must make the same lists.
    pub(super) fn settle_balance(&self, question: &Question<'_>) -> Result<SettledBalance> {
        if self.world.size() == 1 {
            return question.settle();
        }
        let told = |settled: SettledBalance| (settled.balance.sizes().to_vec(), settled.recipe);
        let here = match self.world.rank() {
            0 => question.settle().map(|settled| Some(told(settled))),
            _ => Ok(None),
        };
        let first = self.world.settle("balance", here, Duration::ZERO)?.swap_remove(0);
        let (sizes, recipe) = first.unwrap_or_default();
        let balance = balance::Balance::new(sizes, question.builder.layers.len())?;
        Ok(SettledBalance { balance, recipe })
    }
}
