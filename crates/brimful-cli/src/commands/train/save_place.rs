//! Checks of `--save`: no other run saves there, and the disk has enough free bytes.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use brimful::{Bytes, Layers, World, save};
use brimful_torch::meta;
use tch::nn::VarStore;
use tch::{Device, Tensor};

use super::TrainOptions;
use super::checkpoints;
use super::run_files::Keep;
use crate::claimed_place::ClaimedPlace;
use crate::files::folder_of;
use crate::fine_tune::FineTune;
use crate::output;

/// Inputs to compute the size and number of the files that a run will save.
#[derive(Debug)]
pub(super) struct ToSave<'a> {
    pub(super) options: &'a TrainOptions,
    pub(super) layers: &'a Layers,
    /// Folder of the model, if it is from one.
    pub(super) folder: Option<&'a FineTune>,
    /// Steps in an epoch.
    pub(super) in_epoch: usize,
}

impl ToSave<'_> {
    /// Locks the path of `--save` until the returned lock is dropped, and checks the free bytes of its disk. The first
    /// rank does so, and shares its error with all ranks.
    pub(super) fn claim(&self, world: &World) -> Result<Option<ClaimedPlace>> {
        let path = self.options.files.save.as_deref();
        let path = path.filter(|path| world.rank() == 0 && save::place(path).is_some());
        let claimed = path.map(|path| {
            let claimed = ClaimedPlace::of(path);
            let claimed = claimed.and_then(|claimed| self.check_free_bytes(path).map(|()| claimed));
            claimed.with_context(|| format!("--save {}", path.display()))
        });
        let claimed = claimed.transpose();
        let told = world.share("save", &claimed.as_ref().err().map(output::causes))?;
        match told.into_iter().flatten().next() {
            Some(reason) => bail!(reason),
            None => claimed,
        }
    }

    /// Refuses a disk that would fill up during the run.
    fn check_free_bytes(&self, path: &Path) -> Result<()> {
        let Some(free) = free_bytes(path) else { return Ok(()) };
        let (each, files) = (self.bytes()?, self.files(path));
        let needed = Bytes(each.0.saturating_mul(files));
        let kept = match files {
            1 => String::new(),
            _ => format!(
                " ({files} files of {each}: the next one is written before the last one is removed)"
            ),
        };
        ensure!(
            needed <= free,
            "it needs {needed}{kept}, but its disk has {free} free: free some space, or save elsewhere"
        );
        Ok(())
    }

    /// Returns the bytes of one save: the model, the optimizer's state and the averages of weights. A folder may hold
    /// some weights twice: in the model's files, and in the file to resume from.
    fn bytes(&self) -> Result<Bytes> {
        let options = self.options;
        let _shapes_alone = meta::enter();
        let store = VarStore::new(Device::Cpu);
        self.layers.build(&store.root())?;
        let kind = options.dtype().kind();
        let bytes = |numbers: usize| (numbers * kind.elt_size_in_bytes()) as u64;
        let recipe = &options.recipe;
        let variables = store.variables();
        let of = |is_wanted: &dyn Fn(&str) -> bool| {
            let wanted = variables.iter().filter(|(name, _)| is_wanted(name));
            bytes(wanted.map(|(_, variable)| variable.numel()).sum())
        };
        let model = match (self.folder, options.saved_folder()) {
            (Some(folder), Some(_)) => {
                let lacks = |name: &str| folder.lacks(name, recipe.ema.is_some());
                of(&|name| folder.writes(name)) + of(&lacks)
            }
            _ => of(&|_| true),
        };
        let trained = store.trainable_variables();
        let trained = trained.iter().filter(|variable| variable.requires_grad());
        let factor = recipe.method().state_factor_in(kind);
        let state = bytes(trained.map(Tensor::numel).sum()) as f64 * factor;
        let averages = recipe.ema.map_or(0, |_| model);
        Ok(Bytes(model + state as u64 + averages))
    }

    /// Returns how many files the run adds at most: kept files that do not exist yet, and the one being written.
    fn files(&self, path: &Path) -> u64 {
        let files = &self.options.files;
        let before_last = self.options.length.steps(self.in_epoch).saturating_sub(1);
        let between = files.save_every.map_or(0, |every| before_last / every);
        let saves = before_last / self.in_epoch.max(1) + between + 1;
        let (kept, there) = checkpoints::kept_and_there(path, files.keep);
        let more = kept.saturating_sub(there) + 1;
        // The best model so far is a file of its own.
        let written = if files.keep == Keep::Best { 2 * saves } else { saves };
        more.min(written) as u64
    }
}

/// Returns the free bytes of the path's file system for this user; none if the file system does not report them.
fn free_bytes(path: &Path) -> Option<Bytes> {
    let found = rustix::fs::statvfs(folder_of(path)).ok().filter(|found| found.f_blocks > 0)?;
    Some(Bytes(found.f_bavail.saturating_mul(found.f_frsize)))
}
