//! All replicas' parts of a mini-batch: run at once and joined, or all undone.

use std::mem;
use std::ops::Range;
use std::time::Duration;

use super::Replicas;
use super::reduce::reduce;
use super::replica::{Done, Errand, Replica};
use crate::accumulate::Sums;
use crate::auto::{Peaks, Story};
use crate::batch::{self, Batch};
use crate::bytes::Bytes;
use crate::crew;
use crate::micro::Window;
use crate::micro::attempt::Scale;
use crate::oom::{self, Caught};
use crate::{Error, Result, Size};

/// How a replica's part ended; a replica without a sample has none.
type Ended<O> = Option<Result<Done<O>, Caught<Error>>>;

impl<M: 'static> Replicas<M> {
    /// Lets every replica run its part, and puts the parts together. If one fails, all is undone.
    pub(super) fn attempt<B: Send + 'static, O: Batch + 'static>(
        &self,
        parts: Vec<Option<Errand<B>>>,
        work: &(impl Fn(&mut Replica<M>, Errand<B>) -> Result<Done<O>> + Clone + Send + 'static),
    ) -> Result<Joined<O>, Caught<Error>> {
        let work = work.clone();
        let run = move |replica: &mut Replica<M>, part: Option<Errand<B>>| {
            Ok(part.map(|part| oom::catch(|| work(replica, part))))
        };
        let ended: Result<Vec<Ended<O>>> =
            self.crew.all(Replica::take_over).and_then(|_| self.crew.each_or_error(parts, run));
        let (mut windows, mut outputs, mut told) = (Vec::new(), Vec::new(), Vec::new());
        for done in all_done(ended.map_err(Caught::Error)?)? {
            told.push(done.as_ref().map(Told::of));
            if let Some(done) = done {
                windows.push(done.window);
                outputs.push(done.outputs);
            }
        }
        let (window, outputs) = self.joined(windows, outputs).map_err(Caught::Error)?;
        Ok(Joined { window, outputs, told })
    }

    /// All replicas' parts as one, in their order; undone where that fails.
    fn joined<O: Batch>(&self, mut windows: Vec<Window>, outputs: Vec<O>) -> Result<(Window, O)> {
        let sums = windows.iter_mut().map(|window| mem::take(&mut window.sums)).collect();
        let (sums, addends) = Sums::of_replicas(sums);
        let mut windows = windows.into_iter();
        let mut whole = windows.next().ok_or(Error::EmptyBatch)?;
        let joined = oom::catch(|| {
            reduce(&self.crew, addends)?;
            whole.sums = self.home(sums)?;
            windows.try_for_each(|window| whole.extend(window))?;
            batch::join(outputs)
        });
        match joined {
            Ok(outputs) => Ok((whole, outputs)),
            Err(caught) => {
                whole.undo.run()?;
                Err(crew::of(caught))
            }
        }
    }

    /// The sums on the first replica's device, brought there by its own thread.
    fn home(&self, sums: Sums) -> Result<Sums> {
        let home = self.device();
        if sums.are_on(home) { Ok(sums) } else { self.crew.one(0, move |_| sums.on(home)) }
    }
}

/// All replicas' parts of a mini-batch, in which nothing is committed.
pub(super) struct Joined<O> {
    pub(super) window: Window,
    pub(super) outputs: O,
    pub(super) told: Vec<Option<Told>>,
}

impl<O> Joined<O> {
    /// Each replica's peak.
    pub(super) fn peaks(&self) -> Peaks {
        self.told.iter().map(|told| told.as_ref().and_then(|told| told.peak)).collect()
    }
}

impl Joined<()> {
    pub(super) fn with_outputs<O>(self, outputs: O) -> Joined<O> {
        let Self { window, told, .. } = self;
        Joined { window, outputs, told }
    }
}

/// Mini-batches that have been run but not committed.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) window: Window,
    pub(super) told: Vec<Option<Told>>,
    pub(super) story: Story,
    /// The first one's.
    pub(super) seed: Option<u64>,
}

/// What a replica tells of its part.
#[derive(Debug, Clone, Copy)]
pub(super) struct Told {
    pub(super) samples: usize,
    pub(super) time: Duration,
    pub(super) peak: Option<Bytes>,
    pub(super) replayed: usize,
}

impl Told {
    fn of<O>(done: &Done<O>) -> Self {
        let Done { window, time, peak, replayed, .. } = done;
        let (samples, time, peak, replayed) = (window.sizes.iter().sum(), *time, *peak, *replayed);
        Self { samples, time, peak, replayed }
    }

    /// What each replica tells of one mini-batch after another.
    pub(super) fn added(before: &[Option<Self>], later: Vec<Option<Self>>) -> Vec<Option<Self>> {
        let both = |before: Self, later: Self| Self {
            samples: before.samples + later.samples,
            time: before.time + later.time,
            peak: before.peak.max(later.peak),
            replayed: before.replayed + later.replayed,
        };
        let pairs = before.iter().copied().zip(later);
        pairs
            .map(|(before, later)| before.zip(later).map(|(a, b)| both(a, b)).or(before).or(later))
            .collect()
    }
}

/// Each replica's samples, cut by the size. The first replica has a part even without a sample: it
/// commits what other ranks have done.
pub(super) fn errands<B: Batch>(
    batch: &B,
    shares: &[Range<usize>],
    size: Size,
    place: impl Fn(usize) -> Scale,
) -> Result<Vec<Option<Errand<B>>>> {
    let errand = |(replica, share): (usize, &Range<usize>)| {
        if share.is_empty() && replica > 0 {
            return Ok(None);
        }
        let ranges = match share.len() {
            0 => Vec::new(),
            samples => size.cut(samples)?.ok_or(Error::NothingToCut)?,
        };
        let batch = batch::slice(batch, share.clone())?;
        Ok(Some(Errand { batch, ranges, scale: place(replica) }))
    };
    shares.iter().enumerate().map(errand).collect()
}

/// What all have done, or how the first of those that failed ended: then it is all undone.
fn all_done<O>(ended: Vec<Ended<O>>) -> Result<Vec<Option<Done<O>>>, Caught<Error>> {
    let mut all = Vec::with_capacity(ended.len());
    let mut failure = None;
    for ended in ended {
        match ended.transpose() {
            Ok(done) => all.push(done),
            Err(caught) => failure = failure.or(Some(caught)),
        }
    }
    let Some(failure) = failure else { return Ok(all) };
    for done in all.into_iter().flatten() {
        done.window.undo.run().map_err(Caught::Error)?;
    }
    Err(failure)
}
