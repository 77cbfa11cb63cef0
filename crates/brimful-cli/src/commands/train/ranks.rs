//! Training over several processes: their world, and the use of its ranks.

use std::env;
use std::time::Duration;

use anyhow::Result;
use brimful::World;
use brimful::save::Metadata;
use clap::Args;

use super::stages::Stages;
use super::{TrainOptions, Trainer, saved};
use crate::exit::{self, Exit, ensure_use, wrong_use};
use crate::setting::{NormStatistics, words};

/// Environment variables that launchers set for the processes that they start.
const LAUNCHED: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMIX_RANK"];

/// Replicas, and timeouts of the ranks that mpirun or srun has started.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Devices")]
pub struct RankOptions {
    /// Data-parallel replicas, each with a part of every mini-batch
    ///
    /// In one process, each replica has its own devices. With mpirun or srun, ranks are divided equally among the replicas
    #[arg(long, value_name = "R", value_parser = words::count, default_value_t = 1)]
    pub(crate) replicas: usize,
    /// Seconds without a heartbeat after which a rank counts as lost
    #[arg(long, value_name = "SECONDS", default_value_t = 30, hide_short_help = true)]
    #[arg(value_parser = words::seconds)]
    pub(crate) heartbeat_timeout: u64,
    /// Seconds that a rank may keep the others waiting before the step fails
    #[arg(long, value_name = "SECONDS", default_value_t = 1800, hide_short_help = true)]
    #[arg(value_parser = words::seconds)]
    pub(crate) timeout: u64,
}

impl RankOptions {
    /// Returns the world that a launcher started this process in, or a world of one.
    pub fn world(&self) -> Result<World> {
        if !LAUNCHED.iter().any(|name| env::var_os(name).is_some()) {
            return Ok(World::alone());
        }
        let world = start()?;
        world.set_heartbeat_timeout(Duration::from_secs(self.heartbeat_timeout))?;
        world.set_timeout(Duration::from_secs(self.timeout))?;
        Ok(world)
    }

    /// Returns the number of replicas in each rank, if every rank holds at least one whole model.
    pub(super) fn whole_models(&self, world: &World) -> Option<usize> {
        let each = self.replicas / world.size();
        (each * world.size() == self.replicas).then_some(each)
    }

    /// Returns the number of parts into which the ranks divide a mini-batch. The ranks of one replica load the same
    /// part.
    pub(super) fn parts(&self, world: &World) -> usize {
        self.replicas.min(world.size())
    }

    /// Returns the number of devices in each pipeline.
    pub(super) fn devices_of_pipeline(&self, world: &World, stages: &Stages) -> usize {
        stages.stages.unwrap_or_else(|| self.ranks_of_pipeline(world))
    }

    /// Returns the number of ranks in each pipeline.
    fn ranks_of_pipeline(&self, world: &World) -> usize {
        (world.size() / self.replicas).max(1)
    }

    /// Returns the number of devices that this rank provides to the pipelines.
    pub(super) fn devices(&self, world: &World, stages: &Stages) -> Result<usize> {
        let devices = self.devices_of_pipeline(world, stages);
        if world.size() == 1 {
            return Ok(devices * self.replicas);
        }
        let ranks = self.ranks_of_pipeline(world);
        ensure_use!(
            devices.is_multiple_of(ranks),
            "--stages {devices}: {} ranks in {} replicas leave {ranks} ranks per replica: give a multiple of {ranks}",
            world.size(),
            self.replicas
        );
        Ok(devices / ranks)
    }
}

/// Refuses options that the ranks cannot run together, before any rank builds its part of the model.
pub(super) fn check(world: &World, options: &TrainOptions) -> Result<()> {
    let (ranks, replicas) = (world.size(), options.ranks.replicas);
    if ranks == 1 {
        return Ok(());
    }
    check_same(world, options)?;
    ensure_use!(
        ranks.is_multiple_of(replicas) || replicas.is_multiple_of(ranks),
        "--replicas {replicas}: {ranks} ranks cannot be divided into {replicas} replicas of equal size: start a \
         multiple of {replicas}, as in mpirun -n {replicas}, or srun"
    );
    ensure_use!(
        options.batch_norm != Some(NormStatistics::Exact),
        "--batch-norm exact is for one device, but there are {ranks} ranks: start one, or give --batch-norm \
             deferred"
    );
    Ok(())
}

/// Refuses ranks with different options, which would train different models.
fn check_same(world: &World, options: &TrainOptions) -> Result<()> {
    let all = world.share("the flags of the run", &saved::told(options))?;
    // Paths may differ between machines.
    let is_place = |flag: &str| ["adapter", "data", "model"].contains(&flag);
    let flags = || all.iter().flat_map(|told| told.keys()).filter(|flag| !is_place(flag));
    let differing = all.iter().enumerate().find_map(|(rank, told)| {
        let flag = flags().find(|flag| told.get(*flag) != all[0].get(*flag))?;
        let shown = |told: &Metadata| saved::shown(flag, told.get(flag).map(String::as_str));
        Some((flag, rank, [told, &all[0]].map(shown)))
    });
    match differing {
        Some((flag, rank, [there, first])) => Err(wrong_use(format!(
            "rank {rank} has {there}, but rank 0 has {first}: give all ranks the same --{flag}"
        ))),
        None => Ok(()),
    }
}

#[cfg(feature = "mpi")]
fn start() -> Result<World> {
    Ok(World::start()?)
}

#[cfg(not(feature = "mpi"))]
fn start() -> Result<World> {
    let reason = "it was started by mpirun or srun, but built without MPI: build it with \
                  --features mpi";
    Err(wrong_use(reason))
}

impl Trainer {
    /// Returns whether this is the rank that prints and writes.
    pub(super) fn is_first(&self) -> bool {
        self.world.rank() == 0
    }
}

/// Returns the exit code if any rank was interrupted.
pub(super) fn asked(world: &World) -> brimful::Result<Option<Exit>> {
    let here = exit::asked();
    if world.size() == 1 {
        return Ok(here);
    }
    let signal = here.map(|exit| exit.code() - 128);
    let all = world.share("interrupt", &signal)?;
    Ok(all.into_iter().flatten().next().map(|signal| Exit::Interrupted { signal }))
}
