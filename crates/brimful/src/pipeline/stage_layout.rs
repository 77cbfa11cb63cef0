//! Layers, skip connections and worker of each stage.

use std::collections::HashMap;
use std::ops::Range;

use crate::layers::{Layers, Skip};
use crate::{Result, balance};
use brimful_plan::schedule::{DeviceId, StageId};

/// Model, cut into stages and spread over workers.
#[derive(Debug)]
pub(crate) struct StageLayout {
    pub(crate) layers: Layers,
    pub(crate) stages: Vec<StagePlan>,
    pub(crate) workers: usize,
    /// Positions of the layers, by name.
    positions: HashMap<String, usize>,
    /// Pairs (user, owner) of layers that share variables.
    shared: Vec<(usize, usize)>,
}

/// Plan of one stage.
#[derive(Debug)]
pub(crate) struct StagePlan {
    pub(crate) worker: usize,
    pub(crate) range: Range<usize>,
    /// Stash positions of skips that this stage pops and an earlier stage stashes.
    pub(crate) imports: Vec<usize>,
    /// Skips that this stage stashes and later stages pop.
    pub(crate) exports: Vec<Export>,
}

/// Skip that leaves its stage.
#[derive(Debug, Clone)]
pub(crate) struct Export {
    /// Position of the skip's stash.
    pub(crate) stash: usize,
    /// Stages to which the skip goes directly.
    pub(crate) targets: Vec<usize>,
}

impl StageLayout {
    pub(crate) fn new(
        layers: Layers,
        balance: &balance::Balance,
        placement: &[DeviceId],
    ) -> Result<Self> {
        let ranges: Vec<_> = balance.ranges().collect();
        let skips = layers.paired_skips()?;
        let plan = |(j, range): (usize, &Range<usize>)| StagePlan {
            worker: placement[j].index(),
            range: range.clone(),
            imports: imports(&skips, range),
            exports: exports(&skips, range, &ranges),
        };
        let stages: Vec<_> = ranges.iter().enumerate().map(plan).collect();
        let workers = stages.iter().map(|stage| stage.worker + 1).max().unwrap_or(0);
        let numbered = layers.names().enumerate();
        let positions = numbered.map(|(position, name)| (name.to_owned(), position)).collect();
        let shared = layers.shared()?;
        Ok(Self { layers, stages, workers, positions, shared })
    }

    /// Returns the stages of a worker, in order.
    pub(crate) fn of_worker(&self, worker: usize) -> impl Iterator<Item = (StageId, &StagePlan)> {
        let numbered = self.stages.iter().enumerate().map(|(j, stage)| (StageId::at(j), stage));
        numbered.filter(move |(_, stage)| stage.worker == worker)
    }

    /// Returns the position of the layer that a variable of this name belongs to.
    pub(crate) fn position_of(&self, name: &str) -> Option<usize> {
        // Names of layers may contain dots, but no layer is inside another layer, so at most one name matches.
        let mut outer = name.match_indices('.').map(|(dot, _)| &name[..dot]);
        outer.find_map(|outer| self.positions.get(outer).copied())
    }

    /// Returns whether a stage's layers own or share the variable of this name.
    pub(crate) fn uses(&self, plan: &StagePlan, name: &str) -> bool {
        let Some(position) = self.position_of(name) else { return false };
        let shares =
            |(user, owner): &(usize, usize)| *owner == position && plan.range.contains(user);
        plan.range.contains(&position) || self.shared.iter().any(shares)
    }

    /// Returns the worker that has the layer at this position.
    pub(crate) fn worker_of(&self, position: usize) -> usize {
        let found = self.stages.iter().find(|stage| stage.range.contains(&position));
        found.expect("the balance covers every layer").worker
    }

    pub(crate) fn first_worker(&self) -> usize {
        self.stages[0].worker
    }

    pub(crate) fn last_worker(&self) -> usize {
        self.stages[self.stages.len() - 1].worker
    }
}

fn imports(skips: &[Skip], range: &Range<usize>) -> Vec<usize> {
    let popped = |skip: &&Skip| skip.pops.iter().any(|pop| range.contains(pop));
    let foreign = skips.iter().filter(popped).filter(|skip| !range.contains(&skip.stash));
    foreign.map(|skip| skip.stash).collect()
}

fn exports(skips: &[Skip], range: &Range<usize>, ranges: &[Range<usize>]) -> Vec<Export> {
    let own = skips.iter().filter(|skip| range.contains(&skip.stash));
    let export = |skip: &Skip| {
        let popped = |stage: &Range<usize>| skip.pops.iter().any(|pop| stage.contains(pop));
        let stages =
            ranges.iter().enumerate().filter(|(_, stage)| popped(stage) && *stage != range);
        Export { stash: skip.stash, targets: stages.map(|(j, _)| j).collect() }
    };
    own.map(export).filter(|export| !export.targets.is_empty()).collect()
}
