//! Sizers of all kinds of mini-batches that one model runs.

use std::collections::HashMap;
use std::path::PathBuf;

use super::kind::Kind;
use super::memory_model::{Line, predict_line};
use super::policy::Goal;
use super::remembered::{self, Identity};
use super::sizer::{Finding, Sizer};

/// Sizers by goal and kind, and the file of remembered sizes.
#[derive(Debug)]
pub(crate) struct Sizes {
    goal: Goal,
    kinds: HashMap<(Goal, Kind), Sizer>,
    file: Option<File>,
}

/// File of remembered sizes, and the sizes read from it.
#[derive(Debug)]
struct File {
    path: PathBuf,
    /// Goal that the file's sizes were found for.
    goal: Goal,
    identity: Identity,
    found: HashMap<Kind, Finding>,
}

impl Sizes {
    pub(crate) fn new(goal: Goal) -> Self {
        Self { goal, kinds: HashMap::new(), file: None }
    }

    /// Uses the file's sizes for this model, device and memory, and writes new ones there.
    pub(crate) fn remember(&mut self, path: PathBuf, identity: Identity) {
        let found = remembered::read(&path, &identity);
        self.file = found.map(|found| File { path, goal: self.goal, identity, found });
    }

    /// Sets the goal from now on. The sizers of another goal are kept.
    pub(crate) fn set_goal(&mut self, goal: Goal) {
        self.goal = goal;
    }

    /// Takes this kind's sizer out for the duration of a step; `None` for a new kind.
    pub(crate) fn take(&mut self, kind: &Kind) -> Option<Sizer> {
        self.kinds.remove(&(self.goal, kind.clone()))
    }

    /// Puts the sizer back, and writes its size to the file if it is new.
    pub(crate) fn put(&mut self, kind: Kind, sizer: Sizer) {
        if let (Some(file), Some(finding)) = (&mut self.file, sizer.finding())
            && file.goal == self.goal
            && file.found.get(&kind).is_none_or(|known| known.size != finding.size)
        {
            file.found.insert(kind.clone(), finding);
            remembered::write(&file.path, &file.identity, &file.found);
        }
        self.kinds.insert((self.goal, kind), sizer);
    }

    /// Adapts all sizers to a new memory format, which is faster by this factor.
    pub(crate) fn rearranged(&mut self, factor: f64) {
        self.kinds.values_mut().for_each(|sizer| sizer.rearranged(factor));
    }

    /// Returns a sizer for a new kind; `floors` are the least needs of a step in each memory.
    pub(crate) fn new_kind(&self, kind: &Kind, floors: &[u64]) -> Sizer {
        let file = self.file.as_ref().filter(|file| file.goal == self.goal);
        let remembered = file.and_then(|file| file.found.get(kind));
        match remembered.filter(|found| found.lines.len() == floors.len()) {
            Some(found) => Sizer::remembered(self.goal, found, floors),
            None => self.suggested_by_others(kind, floors),
        }
    }

    /// Returns a sizer that starts from samples of other shapes: from their cost for each element, and
    /// their best sizes.
    fn suggested_by_others(&self, kind: &Kind, floors: &[u64]) -> Sizer {
        let memories = floors.len();
        let akin = || {
            let same_goal = self.kinds.iter().filter(|((goal, _), _)| *goal == self.goal);
            let all = same_goal.map(|((_, other), sizer)| (other, sizer));
            all.filter(|(other, _)| other.is_akin(kind))
        };
        let known: Vec<(u64, Vec<Line>)> = akin()
            .filter_map(|(other, sizer)| Some((other.elements(), sizer.lines()?)))
            .filter(|(_, lines)| lines.len() == memories)
            .collect();
        let line = |memory: usize| {
            let of_one: Vec<_> = known.iter().map(|(e, lines)| (*e, lines[memory])).collect();
            predict_line(&of_one, kind.elements())
        };
        let lines: Option<Vec<Line>> = (0..memories).map(line).collect();
        let sizes =
            akin().filter_map(|(other, sizer)| Some((other.elements(), sizer.policy.best()?)));
        // Only the nearest shape counts: kernels, and so the fastest size, change with the length of a
        // sample.
        let nearest = sizes.min_by_key(|(elements, _)| elements.abs_diff(kind.elements()));
        match (lines, nearest) {
            (Some(lines), Some((elements, best))) => {
                let ratio = elements as f64 / kind.elements().max(1) as f64;
                Sizer::predicted(self.goal, &lines, floors, self.start(best, ratio))
            }
            _ => Sizer::new(self.goal, floors),
        }
    }

    /// Returns twice the expected fastest size, because half of it is tried first. The largest size is left
    /// to the memory model.
    fn start(&self, best: usize, ratio: f64) -> usize {
        match self.goal {
            Goal::Fastest => ((2.0 * best as f64 * ratio) as usize).max(1),
            Goal::Largest => usize::MAX,
        }
    }
}
