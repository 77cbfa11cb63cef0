//! Finds the cut under a bound that sends the fewest bytes over its boundaries; among equals, an even one.
//!
//! Dynamic programming, stage by stage: for each layer at which the stage can end, it finds the cheapest cut of
//! the layers up to there. A later end only excludes starts on the left ([Note: monotone]), so the possible starts
//! are a window that slides to the right. A queue keeps the cheapest start of the window in front.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use super::bands::bands;
use super::problem::PartitionProblem;

/// Returns the end of each stage, or `None` if no cut keeps every stage at or below `bound`.
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

/// Best ways to end a stage at each layer of its band.
struct StageEnds {
    first: usize,
    ways: Vec<Option<Way>>,
}

impl StageEnds {
    fn end(&self) -> usize {
        self.first + self.ways.len()
    }
}

/// Best way to end a stage at a layer.
#[derive(Clone, Copy)]
struct Way {
    /// Start of the stage.
    start: usize,
    /// Bytes over all boundaries up to the end of this stage.
    sent: u128,
    /// Sum of the stages' squared costs, which is smallest if the costs are equal.
    unevenness: f64,
}

impl Way {
    /// Way before the first stage: layer 0, nothing sent.
    const ENTRANCE: Self = Self { start: 0, sent: 0, unevenness: 0.0 };

    /// Returns whether it is more even than `other`, by more than rounding.
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

    /// Returns an even way among those that send the fewest bytes. As the end moves right, so does the best start.
    /// So the search begins at the best start of the previous end. Among equally even ways the earliest start
    /// wins: it leaves fewer layers to earlier stages, which hold more micro-batches under most schedules.
    fn best(&self, window: &mut StartWindow, j: usize, end: usize) -> Option<Way> {
        let least = window.queue.front()?.1.sent;
        let candidate = |at: usize| {
            let (start, way) = *window.queue.get(at).filter(|(_, way)| way.sent == least)?;
            let unevenness = way.unevenness + self.problem.cost(j, start, end).powi(2);
            Some(Way { start, sent: least, unevenness })
        };
        // The previous end's best start may have left the window, or may no longer send least.
        let mut at = if candidate(window.best).is_some() { window.best } else { 0 };
        let mut best = candidate(at)?;
        while let Some(next) = candidate(at + 1).filter(|next| next.is_more_even(&best)) {
            best = next;
            at += 1;
        }
        window.best = at;
        // The last layer sends nothing.
        let sends = if end < self.problem.layers() { self.problem.transfer(end) } else { 0 };
        Some(Way { sent: least + u128::from(sends), ..best })
    }
}

/// Possible starts of a stage with their ways, sorted by the bytes that they send, the fewest first.
struct StartWindow {
    queue: VecDeque<(usize, Way)>,
    /// First start that is not in the window yet.
    next: usize,
    /// Index in the queue of the previous end's best start.
    best: usize,
}

impl StartWindow {
    /// Adds the starts before `end`.
    fn open_to(&mut self, end: usize, before: &StageEnds) {
        for start in self.next..end.min(before.end()) {
            self.next = start + 1;
            let Some(way) = before.ways[start - before.first] else { continue };
            // Later starts stay possible for longer, so earlier starts that send more can be dropped.
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

/// Start of a stage for each of its ends, kept to trace the cut back. Four bytes each instead of a whole [`Way`],
/// because there can be thousands of pairs of a stage and a layer.
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
