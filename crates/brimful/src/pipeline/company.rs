//! What ranks tell each other before they build a pipeline together.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::balance::{Balance, Question, limit};
use crate::crew::StageDevice;
use crate::world::{World, WorldError};
use crate::{Result, balance};

/// The devices of one pipeline, as all its ranks know them.
#[derive(Debug)]
pub(super) struct Company<'a> {
    world: &'a World,
    /// Where each device's memory ends, if that is known.
    pub(super) limits: Vec<Option<u64>>,
    /// How many devices each rank has.
    pub(super) devices: Vec<usize>,
}

/// What a rank brings with it.
#[derive(Debug, Serialize, Deserialize)]
struct Brought {
    common: String,
    limits: Vec<Option<u64>>,
}

impl<'a> Company<'a> {
    /// Makes sure that all ranks build the same, and counts their devices. Gives this rank's, too.
    pub(super) fn meet(
        world: &'a World,
        replicas: usize,
        brought: Result<(Vec<StageDevice>, String)>,
    ) -> Result<(Vec<StageDevice>, Self)> {
        let told = brought.as_ref().map(|(devices, common)| Brought {
            common: common.clone(),
            limits: devices.iter().map(limit).collect(),
        });
        let all = world.settle("build", told.map_err(Clone::clone), Duration::ZERO)?;
        if all.iter().any(|other| other.common != all[0].common) {
            let found = all.into_iter().map(|brought| brought.common).collect();
            return Err(WorldError::Differs { what: "the pipeline".into(), found }.into());
        }
        if replicas == 0 || !world.size().is_multiple_of(replicas) {
            return Err(WorldError::DoesNotDivide { ranks: world.size(), replicas }.into());
        }
        let ranks = world.size() / replicas;
        let devices: Vec<usize> = all.iter().map(|brought| brought.limits.len()).collect();
        let rows: Vec<String> = devices.chunks(ranks).map(|row| format!("{row:?}")).collect();
        if rows.iter().any(|row| *row != rows[0]) {
            let what = "the number of devices of each rank".into();
            return Err(WorldError::Differs { what, found: rows }.into());
        }
        let mine = world.rank() / ranks * ranks;
        let limits = all.into_iter().skip(mine).take(ranks).flat_map(|brought| brought.limits);
        let company = Self { world, limits: limits.collect(), devices: devices[..ranks].to_vec() };
        Ok((brought?.0, company))
    }

    /// The balance in numbers, as rank 0 finds it: measured times differ from rank to rank.
    pub(super) fn settle_balance(
        &self,
        question: &Question<'_>,
        balance: &Balance,
    ) -> Result<balance::Balance> {
        let here = match self.world.rank() {
            0 => question.settle(balance).map(|balance| balance.sizes().to_vec()),
            _ => Ok(Vec::new()),
        };
        let mut all = self.world.settle("balance", here, Duration::ZERO)?;
        Ok(balance::Balance::new(all.swap_remove(0), question.layers.len())?)
    }
}
