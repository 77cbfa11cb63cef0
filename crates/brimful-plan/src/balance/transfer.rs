//! Of all cuts under a bound, the one that sends the fewest bytes over its boundaries; of equals, an
//! even one.
//!
//! Stage by stage, for each layer where the stage can end: the cheapest way to get there. A later end
//! only ever loses starts on the left ([Note: monotone]), so the possible starts are a window that
//! slides to the right, and its cheapest are kept at the front of a queue.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use super::bands::bands;
use super::problem::PartitionProblem;

/// The end of each stage, or `None` where no cut keeps every stage at `bound` or below.
pub(super) fn least(problem: &PartitionProblem<'_>, bound: f64) -> Option<Vec<usize>> {
    let search = CutSearch { problem, bound };
    let mut column = StageEnds { first: 0, ways: vec![Some(Way::ENTRANCE)] };
    let mut starts = Vec::with_capacity(problem.stages());
    for (j, band) in bands(problem, bound)?.into_iter().enumerate() {
        column = search.column(&column, j, band);
        starts.push(StageStarts::of(&column));
    }
    trace_back(&starts, problem.layers())
}

/// The ways to end a stage at each layer of its band.
struct StageEnds {
    first: usize,
    ways: Vec<Option<Way>>,
}

impl StageEnds {
    fn end(&self) -> usize {
        self.first + self.ways.len()
    }
}

/// The best way to end a stage at a layer.
#[derive(Clone, Copy)]
struct Way {
    /// Where the stage starts.
    start: usize,
    /// Bytes over all boundaries until the end of this stage.
    sent: u128,
    /// The sum of the squared costs, which is least where they are even.
    unevenness: f64,
}

impl Way {
    /// Before the first stage: layer 0, nothing sent.
    const ENTRANCE: Self = Self { start: 0, sent: 0, unevenness: 0.0 };

    /// By more than rounding.
    fn is_more_even(&self, other: &Self) -> bool {
        self.unevenness < other.unevenness * (1.0 - 1e-9)
    }
}

struct CutSearch<'a> {
    problem: &'a PartitionProblem<'a>,
    bound: f64,
}

impl CutSearch<'_> {
    fn column(&self, before: &StageEnds, j: usize, band: RangeInclusive<usize>) -> StageEnds {
        let first = *band.start();
        let mut window = StartWindow { queue: VecDeque::new(), next: before.first, best: 0 };
        let ways = band.map(|end| {
            window.open_to(end, before);
            window.close(|start| self.problem.allows(j, start, end, self.bound));
            self.best(&mut window, j, end)
        });
        StageEnds { first, ways: ways.collect() }
    }

    /// An even one of the ways that send least. As the end moves right so does the best start, so the
    /// search goes on from where it was. Of equals the earliest start wins, which gives later stages
    /// more layers: earlier ones hold more micro-batches under most schedules.
    fn best(&self, window: &mut StartWindow, j: usize, end: usize) -> Option<Way> {
        let least = window.queue.front()?.1.sent;
        let candidate = |at: usize| {
            let (start, way) = *window.queue.get(at).filter(|(_, way)| way.sent == least)?;
            let unevenness = way.unevenness + self.problem.cost(j, start, end).powi(2);
            Some(Way { start, sent: least, unevenness })
        };
        // The last end's best start may have left the window, or its bytes may no longer be least.
        let mut at = if candidate(window.best).is_some() { window.best } else { 0 };
        let mut best = candidate(at)?;
        while let Some(next) = candidate(at + 1).filter(|next| next.is_more_even(&best)) {
            best = next;
            at += 1;
        }
        window.best = at;
        // Nothing is sent behind the last layer.
        let sends = if end < self.problem.layers() { self.problem.transfer(end) } else { 0 };
        Some(Way { sent: least + u128::from(sends), ..best })
    }
}

/// The possible starts of a stage and the ways there; none sends less than those before it.
struct StartWindow {
    queue: VecDeque<(usize, Way)>,
    /// The first start that was not yet let in.
    next: usize,
    /// Where in the queue the last end's best start is.
    best: usize,
}

impl StartWindow {
    /// Lets in the starts before `end`.
    fn open_to(&mut self, end: usize, before: &StageEnds) {
        for start in self.next..end.min(before.end()) {
            self.next = start + 1;
            let Some(way) = before.ways[start - before.first] else { continue };
            // Later starts stay possible longer, so one that sends less makes those before it that
            // send more useless for good.
            while self.queue.back().is_some_and(|(_, last)| last.sent > way.sent) {
                self.queue.pop_back();
            }
            self.queue.push_back((start, way));
        }
    }

    fn close(&mut self, allows: impl Fn(usize) -> bool) {
        while self.queue.front().is_some_and(|(start, _)| !allows(*start)) {
            self.queue.pop_front();
            self.best = self.best.saturating_sub(1);
        }
    }
}

/// What is kept of a stage's ends when the next stage's are made: where the stage starts for each. Four
/// bytes each instead of a whole [`Way`], because thousands of stages times layers are kept.
struct StageStarts {
    first: usize,
    starts: Vec<u32>,
}

impl StageStarts {
    const NONE: u32 = u32::MAX;

    fn of(column: &StageEnds) -> Self {
        let start = |way: &Option<Way>| way.map_or(Self::NONE, |way| way.start as u32);
        Self { first: column.first, starts: column.ways.iter().map(start).collect() }
    }

    fn start(&self, end: usize) -> Option<usize> {
        let start = self.starts.get(end - self.first).filter(|start| **start != Self::NONE)?;
        Some(*start as usize)
    }
}

fn trace_back(starts: &[StageStarts], layers: usize) -> Option<Vec<usize>> {
    let mut end = layers;
    let mut ends = Vec::with_capacity(starts.len());
    for trace in starts.iter().rev() {
        ends.push(end);
        end = trace.start(end)?;
    }
    ends.reverse();
    Some(ends)
}
