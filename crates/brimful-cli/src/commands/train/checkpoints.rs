//! Files of `--save`. The module checks them before a run, and decides when they are written, by which rank, and
//! which of them are kept.
//!
//! After a step, the program writes the run to a file, straight from the tensors in memory. A thread then syncs
//! the file to the disk and renames it into place, while the next steps run. There is at most one such thread: the
//! next save waits for the thread, and returns the thread's error.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use brimful::save::{self, WrittenFile};
use brimful::{Bytes, Layers, World};
use brimful_torch::meta;
use tch::nn::VarStore;
use tch::{Device, Tensor};

use super::options::{Keep, RunFiles};
use super::saved::SavedRun;
use super::{TrainOptions, Trainer};
use crate::files::{self, ClaimedPlace, folder_of};
use crate::model::FineTune;
use crate::{output, progress};

/// Extension of a run that is saved to a file.
const EXTENSION: &str = "safetensors";
/// Mark in the name of the file of the best run, which is saved beside the last run.
const BEST: &str = "best";

/// Saves of a run.
#[derive(Debug)]
pub(super) struct Checkpoints {
    writer: Option<brimful::Result<JoinHandle<brimful::Result<()>>>>,
    /// Number of steps done at the last save; none before the first save.
    last: Option<usize>,
}

impl Checkpoints {
    pub(super) fn new(trainer: &Trainer) -> Self {
        // A resumed run is on the disk already, unless `--save` names another place.
        let RunFiles { save, resume, .. } = &trainer.options.files;
        let is_there = |from: &&PathBuf| save.as_ref().is_none_or(|to| files::is_same(from, to));
        let last = resume.as_ref().filter(is_there).map(|_| trainer.steps_done());
        Self { writer: None, last }
    }

    /// Saves the run as it is after its last step, unless this state is saved already.
    pub(super) fn save(&mut self, trainer: &Trainer) -> Result<()> {
        let steps = trainer.steps_done();
        if self.last == Some(steps) {
            return Ok(());
        }
        self.last = Some(steps);
        let files = &trainer.options.files;
        let Some(path) = files.save.clone() else { return Ok(()) };
        let numbered = match files.keep {
            Keep::Newest(count) => Some((beside(&path, &step_mark(steps)), count)),
            Keep::Last | Keep::Best => None,
        };
        self.write(trainer, SavedRun::of, move |run| match numbered {
            // Writes the numbered file first. If the run is killed before the file of `--save` is replaced, the
            // run resumes from the previous save, and writes the numbered file again.
            Some((file, count)) => {
                let written = run.write(&file)?;
                if written.is_none() {
                    run.write(&path)?;
                }
                Ok(Put::new(written, move |is_file| {
                    if is_file {
                        let linked = save::replace_by_link(&file, &path);
                        linked.or_else(|_| save::replace_by_copy(&path, &file))?;
                    }
                    remove_older(&path, steps, count);
                    Ok(())
                }))
            }
            None => Ok(Put::new(run.write(&path)?, |_| Ok(()))),
        })
    }

    /// Saves the run as the best so far, if `--keep best` is given.
    pub(super) fn save_best(&mut self, trainer: &Trainer) -> Result<()> {
        let files = &trainer.options.files;
        match &files.save {
            Some(path) if files.keep == Keep::Best => {
                let best = beside(path, BEST);
                let write = move |run: &SavedRun| Ok(Put::new(run.write(&best)?, |_| Ok(())));
                self.write(trainer, SavedRun::of_best, write)
            }
            _ => Ok(()),
        }
    }

    /// Waits until the save that is being written is complete. Collective: every rank takes part.
    pub(super) fn finish(&mut self, trainer: &Trainer) -> Result<()> {
        let join = |writer: JoinHandle<_>| {
            writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        let written = self.writer.take().map_or(Ok(()), |writer| writer.and_then(join));
        trainer.world.vote("save", written, Duration::ZERO)?;
        Ok(())
    }

    /// Waits until the last save is complete, then lets the first rank write the run. A thread renames the file
    /// into place.
    fn write(
        &mut self,
        trainer: &Trainer,
        take: impl FnOnce(&Trainer) -> Result<SavedRun>,
        write: impl FnOnce(&SavedRun) -> brimful::Result<Put>,
    ) -> Result<()> {
        self.finish(trainer)?;
        let run = take(trainer)?;
        if trainer.is_first() {
            self.writer = Some(write(&run).and_then(Put::start));
        }
        Ok(())
    }
}

/// Work that renames a written run into place.
struct Put(Box<dyn FnOnce() -> brimful::Result<()> + Send>);

impl Put {
    /// Makes the work that renames the written file into place, if there is one, and then calls `then`. The
    /// argument of `then` is true if there is a file.
    fn new(
        written: Option<WrittenFile>,
        then: impl FnOnce(bool) -> brimful::Result<()> + Send + 'static,
    ) -> Self {
        Self(Box::new(move || {
            let is_file = written.is_some();
            written.map_or(Ok(()), WrittenFile::replace)?;
            then(is_file)
        }))
    }

    fn start(self) -> brimful::Result<JoinHandle<brimful::Result<()>>> {
        let thread = thread::Builder::new().name("brimful save".to_owned());
        thread.spawn(self.0).map_err(|reason| {
            let reason = format!("{reason}: no thread can be started: look at ulimit -u");
            brimful::Error::File { action: "write", path: "the run".to_owned(), reason }
        })
    }
}

impl Drop for Checkpoints {
    /// Finishes the current save if the run breaks off. Otherwise the program would end during the save, and leave
    /// an incomplete file.
    fn drop(&mut self) {
        let failed = match self.writer.take() {
            Some(Ok(writer)) => writer.join().ok().and_then(Result::err),
            Some(Err(error)) => Some(error),
            None => None,
        };
        if let Some(error) = failed {
            progress::say(&format!("brimful: {error}"));
        }
    }
}

/// Adds a mark to the name of a file or folder. Returns `model.step-40.safetensors` for `model.safetensors`, and
/// `llama-3.1.best` for `llama-3.1`, whose last dot begins no extension.
fn beside(path: &Path, mark: &str) -> PathBuf {
    match path.extension().filter(|extension| *extension == EXTENSION) {
        Some(_) => path.with_extension(format!("{mark}.{EXTENSION}")),
        None => path.with_added_extension(mark),
    }
}

fn step_mark(steps: usize) -> String {
    format!("step-{steps}")
}

/// Returns the `--save` path of the run that wrote this file. `keep` is the run's `--keep`.
pub(crate) fn place_of_run(file: &Path, keep: Option<&str>) -> PathBuf {
    let whole = || file.to_owned();
    let (Some(keep), Some(name)) = (keep, file.file_name().and_then(|name| name.to_str())) else {
        return whole();
    };
    let (name, end) = match name.strip_suffix(&format!(".{EXTENSION}")) {
        Some(name) => (name, format!(".{EXTENSION}")),
        None => (name, String::new()),
    };
    let is_kept = |mark: &str| match keep {
        BEST => mark == BEST,
        _ => mark.strip_prefix("step-").is_some_and(|steps| steps.parse::<usize>().is_ok()),
    };
    match name.rsplit_once('.').filter(|(_, mark)| is_kept(mark)) {
        Some((name, _)) => file.with_file_name(format!("{name}{end}")),
        None => whole(),
    }
}

/// Removes numbered files of at most `steps` steps, except the newest `keep` of them. Ignores errors, because a
/// file that cannot be removed does no harm.
fn remove_older(path: &Path, steps: usize, keep: usize) {
    let mut done = numbered(path);
    done.retain(|there| *there <= steps);
    done.sort_unstable();
    let older = done.iter().rev().skip(keep);
    older.for_each(|steps| drop(fs::remove_file(beside(path, &step_mark(*steps)))));
}

/// Lists the numbers of steps in the names of the numbered files on the disk.
fn numbered(path: &Path) -> Vec<usize> {
    let Ok(entries) = fs::read_dir(files::folder_of(path)) else { return Vec::new() };
    let number = |name: OsString| {
        let mut numbers = name.to_str()?.split(|c: char| !c.is_ascii_digit());
        numbers.find_map(|number| {
            let steps = number.parse().ok()?;
            (beside(path, &step_mark(steps)).file_name() == Some(&name)).then_some(steps)
        })
    };
    entries.flatten().filter_map(|entry| number(entry.file_name())).collect()
}

/// Returns how many files are kept, and how many such files exist already.
pub(super) fn kept_and_there(path: &Path, keep: Keep) -> (usize, usize) {
    let is_there = |path: &Path| usize::from(path.exists());
    match keep {
        Keep::Last => (1, is_there(path)),
        Keep::Best => (2, is_there(path) + is_there(&beside(path, BEST))),
        Keep::Newest(count) => (count, numbered(path).len()),
    }
}

/// Lists the paths beside the `--save` path that the run writes, and the paths of existing files that the run may
/// remove.
pub(super) fn kept_beside(path: &Path, keep: Keep) -> Vec<PathBuf> {
    match keep {
        Keep::Last => Vec::new(),
        Keep::Best => vec![beside(path, BEST)],
        Keep::Newest(_) => {
            let steps = numbered(path).into_iter();
            steps.map(|steps| beside(path, &step_mark(steps))).collect()
        }
    }
}

/// Check of `--save` before the run: no other run saves to the path, and the disk has enough free bytes. The
/// fields determine the size and number of the files that the run will save.
#[derive(Debug)]
pub(super) struct ToSave<'a> {
    pub(super) options: &'a TrainOptions,
    pub(super) layers: &'a Layers,
    /// Folder of the model, if the model is from a folder.
    pub(super) folder: Option<&'a FineTune>,
    /// Steps in an epoch.
    pub(super) in_epoch: usize,
}

impl ToSave<'_> {
    /// Locks the path of `--save` until the returned lock is dropped, and checks the free bytes of its disk. Only
    /// the first rank does this work; all ranks get its error.
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

    /// Returns the bytes of one save: the model, the optimizer's state and the averages of weights. A folder may
    /// hold some weights twice: in the model's files, and in the file to resume from.
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

    /// Returns how many files the run adds at most: kept files that do not exist yet, and the file that is being
    /// written.
    fn files(&self, path: &Path) -> u64 {
        let files = &self.options.files;
        let before_last = self.options.length.steps(self.in_epoch).saturating_sub(1);
        let between = files.save_every.map_or(0, |every| before_last / every);
        let saves = before_last / self.in_epoch.max(1) + between + 1;
        let (kept, there) = kept_and_there(path, files.keep);
        let more = kept.saturating_sub(there) + 1;
        // The best run is saved to a separate file.
        let written = if files.keep == Keep::Best { 2 * saves } else { saves };
        more.min(written) as u64
    }
}

/// Returns the bytes of the path's file system that are free for this user, or none if the file system does not
/// report them.
fn free_bytes(path: &Path) -> Option<Bytes> {
    let found = rustix::fs::statvfs(folder_of(path)).ok().filter(|found| found.f_blocks > 0)?;
    Some(Bytes(found.f_bavail.saturating_mul(found.f_frsize)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_kept_beside_the_one_that_was_named() {
        let named = |path| beside(Path::new(path), &step_mark(40));
        assert_eq!(named("a/model.safetensors"), Path::new("a/model.step-40.safetensors"));
        assert_eq!(named("model"), Path::new("model.step-40"));
        assert_eq!(named("llama-3.1-tuned"), Path::new("llama-3.1-tuned.step-40"));
    }

    #[test]
    fn a_file_that_was_kept_tells_the_place_of_its_run() {
        for (file, keep, place) in [
            ("a/m.step-40.safetensors", Some("3"), "a/m.safetensors"),
            ("a/m.step-40.safetensors", Some("best"), "a/m.step-40.safetensors"),
            ("m.best.safetensors", Some("best"), "m.safetensors"),
            ("m.best.safetensors", None, "m.best.safetensors"),
            ("llama-3.1.best", Some("best"), "llama-3.1"),
            ("llama-3.1", Some("best"), "llama-3.1"),
        ] {
            assert_eq!(place_of_run(Path::new(file), keep), Path::new(place), "{file}");
        }
    }

    #[test]
    fn the_newest_files_stay() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("m.safetensors");
        for steps in [5, 20, 40, 60, 90] {
            fs::write(beside(&path, &step_mark(steps)), b"").expect("written");
        }
        // Files of another run, or without a valid number.
        for name in ["n.step-5.safetensors", "m.step-05.safetensors", "m.step-x.safetensors"] {
            fs::write(folder.path().join(name), b"").expect("written");
        }
        let there =
            [Keep::Newest(2), Keep::Best, Keep::Last].map(|keep| kept_and_there(&path, keep));
        remove_older(&path, 60, 2);
        let left = [5, 20, 40, 60, 90].map(|steps| beside(&path, &step_mark(steps)).exists());
        assert_eq!(left, [false, false, true, true, true]);
        assert_eq!(there, [(2, 5), (2, 0), (1, 0)]);
    }
}
