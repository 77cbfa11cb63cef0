//! The files of `--save`: when they are written, by whom, and which are kept.
//!
//! A run is written after its step, straight from where it lives, and forced to the disk and put in its place while
//! the next steps run. There is one such thread at a time: the next save waits for it, and finds out what came of it.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::Result;
use brimful::save::{self, WrittenFile};

use super::Trainer;
use super::run_files::{Keep, RunFiles};
use super::saved::SavedRun;
use crate::{files, progress};

/// The saves of a run.
#[derive(Debug)]
pub(super) struct Checkpoints {
    writer: Option<brimful::Result<JoinHandle<brimful::Result<()>>>>,
    /// After how many steps the last one was; none before the first.
    last: Option<usize>,
}

impl Checkpoints {
    pub(super) fn new(trainer: &Trainer) -> Self {
        // What it goes on from is there already, unless another place was named.
        let RunFiles { save, resume, .. } = &trainer.options.files;
        let is_there = |from: &&PathBuf| save.as_ref().is_none_or(|to| files::is_same(from, to));
        let last = resume.as_ref().filter(is_there).map(|_| trainer.steps_done());
        Self { writer: None, last }
    }

    /// Saves the run as it is after its step, if that was not done.
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
        match numbered {
            // The numbered one first: a run that is killed in between goes on from before it, and
            // writes the same once more.
            Some((file, count)) => self.write(trainer, &file.clone(), move || {
                replace_by_link(&file, &path).or_else(|_| save::replace_by_copy(&path, &file))?;
                remove_older(&path, steps, count);
                Ok(())
            }),
            None => self.write(trainer, &path, || Ok(())),
        }
    }

    /// Saves the run as the best so far, where those are kept.
    pub(super) fn save_best(&mut self, trainer: &Trainer) -> Result<()> {
        let files = &trainer.options.files;
        match &files.save {
            Some(path) if files.keep == Keep::Best => {
                let best = beside(path, "best");
                self.write(trainer, &best, || Ok(()))
            }
            _ => Ok(()),
        }
    }

    /// Waits until everything is written. Of several ranks, all take part.
    pub(super) fn finish(&mut self, trainer: &Trainer) -> Result<()> {
        let join = |writer: JoinHandle<_>| {
            writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        let written = self.writer.take().map_or(Ok(()), |writer| writer.and_then(join));
        trainer.world.settle("save", written, Duration::ZERO)?;
        Ok(())
    }

    /// Lets the first rank write the run, once the one before is in its place; then comes what is left to do.
    fn write(
        &mut self,
        trainer: &Trainer,
        path: &Path,
        then: impl FnOnce() -> brimful::Result<()> + Send + 'static,
    ) -> Result<()> {
        self.finish(trainer)?;
        let run = SavedRun::of(trainer)?;
        if trainer.is_first() {
            let put = |written: Option<WrittenFile>| {
                thread::spawn(move || {
                    written.map_or(Ok(()), WrittenFile::replace)?;
                    then()
                })
            };
            self.writer = Some(run.write(path).map(put));
        }
        Ok(())
    }
}

impl Drop for Checkpoints {
    /// Where the run breaks off, what is being written is finished: the program would else end in the midst
    /// of it, and leave half a file.
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

/// `model.step-40.safetensors` beside `model.safetensors`.
fn beside(path: &Path, mark: &str) -> PathBuf {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some(extension) => path.with_extension(format!("{mark}.{extension}")),
        None => path.with_added_extension(mark),
    }
}

fn step_mark(steps: usize) -> String {
    format!("step-{steps}")
}

/// Lets `path` be the same file, without a moment in which there is none.
fn replace_by_link(file: &Path, path: &Path) -> std::io::Result<()> {
    let link = path.with_added_extension("new");
    // One that a killed run has left.
    let _ = fs::remove_file(&link);
    fs::hard_link(file, &link)?;
    fs::rename(&link, path)?;
    // Two names of one file are not renamed onto each other: the link stays.
    let _ = fs::remove_file(&link);
    Ok(())
}

/// Removes the numbered files of up to so many steps, but for the newest. One that stays does no harm.
fn remove_older(path: &Path, steps: usize, keep: usize) {
    let mut done = numbered(path);
    done.retain(|there| *there <= steps);
    done.sort_unstable();
    let older = done.iter().rev().skip(keep);
    older.for_each(|steps| drop(fs::remove_file(beside(path, &step_mark(*steps)))));
}

/// After how many steps each of the numbered files was written that are there.
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

/// How many files are kept, and how many of them are there already.
pub(super) fn kept_and_there(path: &Path, keep: Keep) -> (usize, usize) {
    let is_there = |path: &Path| usize::from(path.exists());
    match keep {
        Keep::Last => (1, is_there(path)),
        Keep::Best => (2, is_there(path) + is_there(&beside(path, "best"))),
        Keep::Newest(count) => (count, numbered(path).len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_kept_beside_the_one_that_was_named() {
        let named = |path| beside(Path::new(path), &step_mark(40));
        assert_eq!(named("a/model.safetensors"), Path::new("a/model.step-40.safetensors"));
        assert_eq!(named("model"), Path::new("model.step-40"));
    }

    #[test]
    fn the_newest_files_stay() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("m.safetensors");
        for steps in [5, 20, 40, 60, 90] {
            fs::write(beside(&path, &step_mark(steps)), b"").expect("written");
        }
        // Of another run, or no number.
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
