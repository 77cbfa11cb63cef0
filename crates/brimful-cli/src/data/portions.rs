//! Independent jobs on several threads. Above all, portions of a text file are tokenised in parallel, and the
//! results are used in order.

use std::fs::File;
use std::io::Read;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, Builder};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use brimful_torch::threads::limit_threads;

use crate::progress::Progress;

/// Approximate bytes of a portion.
const PORTION: usize = 1 << 18;
const MEGABYTE: u64 = 1_000_000;
/// Time of work after which progress is shown.
const SOON: Duration = Duration::from_secs(1);

/// Places at which a text may be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TextCut {
    /// After a line.
    Lines,
    /// Before a line that is not indented. If no such line begins in the bytes read, before a space, or else
    /// between characters. Tokens rarely span such a place.
    Words,
}

/// Whole lines or words of a text.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Portion {
    pub(super) text: String,
    /// Character before the portion; none at the beginning of the file.
    pub(super) before: Option<char>,
    /// Number of line ends before the portion.
    pub(super) lines_before: usize,
}

/// Portions of a file, in order.
#[derive(Debug)]
struct Portions {
    path: PathBuf,
    file: File,
    cut: TextCut,
    size: usize,
    /// Bytes that were read but not yet handed out.
    rest: Vec<u8>,
    /// Number of bytes, number of line ends, and last character before `rest`.
    bytes_before: u64,
    lines_before: usize,
    before: Option<char>,
}

/// Runs `work` on the portions of a file in parallel, and passes the results to `take` in order.
pub(super) fn each<T: Send>(
    path: &Path,
    cut: TextCut,
    work: impl Fn(&Portion) -> Result<T> + Sync,
    mut take: impl FnMut(T) -> Result<()>,
) -> Result<()> {
    let mut portions = Portions::open(path, cut, PORTION)?;
    let length = portions.file.metadata()?.len();
    let at_once = cores();
    let (start, mut progress) = (Instant::now(), None);
    loop {
        let group = portions.by_ref().take(at_once).collect::<Result<Vec<_>>>()?;
        if group.is_empty() {
            return Ok(());
        }
        let worked = in_parallel(group, at_once, |portion| work(&portion));
        worked.into_iter().try_for_each(|worked| take(worked?))?;
        if start.elapsed() > SOON {
            let progress = progress
                .get_or_insert_with(|| Progress::new((length / MEGABYTE) as usize, "MB read"));
            progress.reach((portions.bytes_before / MEGABYTE) as usize);
        }
    }
}

impl Portions {
    fn open(path: &Path, cut: TextCut, size: usize) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
        let (rest, path) = (Vec::new(), path.to_owned());
        Ok(Self { path, file, cut, size, rest, bytes_before: 0, lines_before: 0, before: None })
    }

    fn read_on(&mut self) -> Result<Option<Portion>> {
        loop {
            let more = (&mut self.file).take(self.size as u64).read_to_end(&mut self.rest);
            let more = more.with_context(|| format!("cannot read {}", self.path.display()))?;
            let cut = if more == 0 { Some(self.rest.len()) } else { self.cut.place(&self.rest) };
            match cut {
                Some(0) => return Ok(None),
                Some(length) => return self.hand_out(length).map(Some),
                None => {}
            }
        }
    }

    /// Hands out the first `length` bytes that were read.
    fn hand_out(&mut self, length: usize) -> Result<Portion> {
        let after = self.rest.split_off(length);
        let text = String::from_utf8(std::mem::replace(&mut self.rest, after));
        let text = text.map_err(|error| {
            let place = self.bytes_before + error.utf8_error().valid_up_to() as u64;
            anyhow!("{} is not UTF-8 text: byte {place} begins no letter", self.path.display())
        })?;
        let lines_before = self.lines_before;
        self.lines_before += text.bytes().filter(|byte| *byte == b'\n').count();
        self.bytes_before += length as u64;
        let before = self.before;
        self.before = text.chars().next_back();
        Ok(Portion { text, before, lines_before })
    }
}

impl Iterator for Portions {
    type Item = Result<Portion>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read_on().transpose()
    }
}

impl TextCut {
    /// Returns the last place at which these bytes may be cut, if there is one.
    fn place(self, bytes: &[u8]) -> Option<usize> {
        match self {
            Self::Lines => bytes.iter().rposition(|byte| *byte == b'\n').map(|end| end + 1),
            Self::Words => {
                let begins_line = |pair: &[u8]| pair[0] == b'\n' && !pair[1].is_ascii_whitespace();
                let line = bytes.windows(2).rposition(begins_line).map(|end| end + 1);
                let space = || bytes.iter().rposition(|byte| *byte == b' ');
                let letter = || bytes.iter().rposition(|byte| *byte & 0xc0 != 0x80);
                let place = line.or_else(space).filter(|place| *place > 0).or_else(letter);
                // A UTF-8 character has at most four bytes. So more bytes without a place to cut are invalid. They
                // are handed out, and an error then reports them.
                let none = (bytes.len() > 4).then_some(bytes.len());
                place.filter(|place| *place > 0).or(none)
            }
        }
    }
}

/// Returns the number of cores.
pub(super) fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Runs the jobs on the calling thread and on helper threads, and returns the results in the jobs' order. If the
/// system cannot start a helper, the other threads run its jobs.
pub(super) fn in_parallel<J: Send, R: Send>(
    jobs: Vec<J>,
    threads: usize,
    work: impl Fn(J) -> R + Sync,
) -> Vec<R> {
    in_parallel_helped_by(Builder::new, jobs, threads, work)
}

fn in_parallel_helped_by<J: Send, R: Send>(
    helper: impl Fn() -> Builder,
    jobs: Vec<J>,
    threads: usize,
    work: impl Fn(J) -> R + Sync,
) -> Vec<R> {
    let threads = threads.min(jobs.len());
    let jobs = Mutex::new(jobs.into_iter().enumerate());
    let next = || jobs.lock().unwrap_or_else(PoisonError::into_inner).next();
    let worker = || {
        // libtorch may use one core in each of these threads, because the other threads use the other cores.
        let _alone = limit_threads(1);
        let mut done = Vec::new();
        while let Some((place, job)) = next() {
            done.push((place, work(job)));
        }
        done
    };
    let mut done: Vec<(usize, R)> = thread::scope(|scope| {
        let helper = |_| helper().spawn_scoped(scope, worker).ok();
        let helpers: Vec<_> = (1..threads).map_while(helper).collect();
        let mut done = worker();
        for helper in helpers {
            done.extend(helper.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        done
    });
    done.sort_unstable_by_key(|(place, _)| *place);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn portions(text: &[u8], cut: TextCut, size: usize) -> Result<Vec<String>> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("text");
        fs::write(&path, text).expect("written");
        let mut lines = 0;
        Portions::open(&path, cut, size)?
            .map(|portion| {
                let Portion { text, lines_before, .. } = portion?;
                assert_eq!(lines_before, lines);
                lines += text.matches('\n').count();
                Ok(text)
            })
            .collect()
    }

    #[test]
    fn a_text_is_cut_where_a_line_begins_or_else_at_a_space_or_between_letters() {
        let cut = |text: &str, size| portions(text.as_bytes(), TextCut::Words, size).expect("text");
        assert_eq!(cut("ab\ncd\n\n  ef\ngh", 8), ["ab\n", "cd\n\n  ef\n", "gh"]);
        assert_eq!(cut("ab cd ef gh", 7), ["ab cd", " ef", " gh"]);
        assert_eq!(cut("ééé", 3), ["é", "é", "é"]);
        assert!(cut("", 3).is_empty());
        for size in 1..9 {
            let text = "né\n\n né ü\n€uro né\nabc";
            assert_eq!(cut(text, size).concat(), text, "{size}");
        }
    }

    #[test]
    fn lines_stay_whole_however_long() {
        let cut = |text: &str| portions(text.as_bytes(), TextCut::Lines, 3).expect("text");
        assert_eq!(cut("a\nb\nlonger than three\nc"), ["a\n", "b\n", "longer than three\n", "c"]);
    }

    #[test]
    fn what_is_no_text_is_named_with_its_place() {
        let error = portions(b"some text\nand\xff more", TextCut::Words, 4).expect_err("no text");
        assert!(
            error.to_string().ends_with("is not UTF-8 text: byte 13 begins no letter"),
            "{error}"
        );
    }

    #[test]
    fn results_come_in_the_order_of_their_jobs() {
        for threads in [1, 3, 40] {
            let squares = in_parallel((0..20).collect(), threads, |number: u64| number * number);
            assert!(squares.into_iter().eq((0..20).map(|number| number * number)), "{threads}");
        }
        assert!(in_parallel(Vec::<u64>::new(), 4, |number| number).is_empty());
    }

    #[test]
    fn jobs_are_done_where_no_helper_can_be_started() {
        // No machine has memory for such a stack, so no helper can be started.
        let helper = || Builder::new().stack_size(1 << 60);
        let squares =
            in_parallel_helped_by(helper, vec![1, 2, 3], 3, |number: u64| number * number);
        assert_eq!(squares, [1, 4, 9]);
    }
}
