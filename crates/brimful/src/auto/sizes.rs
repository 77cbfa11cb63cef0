//! Sizers of all kinds of mini-batches that one model runs, and sizes found by earlier runs.
//!
//! Several models may share the file of remembered sizes. The file is optional: a damaged or foreign file is left
//! unchanged, and a warning is logged.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::{fmt, fs};

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::memory_model::{Line, predict_line};
use super::policy::Goal;
use super::sizer::{Finding, Sizer};
use crate::batch::{Batch, Leaf};
use crate::save;

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
        let found = read(&path, &identity);
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

    /// Puts the sizer back, and writes the size that it has found to the file, if the size is new.
    pub(crate) fn put(&mut self, kind: Kind, sizer: Sizer) {
        if let (Some(file), Some(finding)) = (&mut self.file, sizer.finding())
            && file.goal == self.goal
            && file.found.get(&kind).is_none_or(|known| known.size != finding.size)
        {
            file.found.insert(kind.clone(), finding);
            write(&file.path, &file.identity, &file.found);
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

    /// Returns a sizer that starts from what is known of samples of other shapes: their cost per element, and
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
        // Only the nearest shape counts, because kernels, and with them the fastest size, change with the length
        // of a sample.
        let nearest = sizes.min_by_key(|(elements, _)| elements.abs_diff(kind.elements()));
        match (lines, nearest) {
            (Some(lines), Some((elements, best))) => {
                let ratio = elements as f64 / kind.elements().max(1) as f64;
                Sizer::predicted(self.goal, &lines, floors, self.start(best, ratio))
            }
            _ => Sizer::new(self.goal, floors),
        }
    }

    /// Returns twice the expected fastest size, because half of it is tried first. For the largest size there is
    /// no expectation: the memory model alone decides.
    fn start(&self, best: usize, ratio: f64) -> usize {
        match self.goal {
            Goal::Fastest => ((2.0 * best as f64 * ratio) as usize).max(1),
            Goal::Largest => usize::MAX,
        }
    }
}

/// Placeholder for the length of a sequence: sizes count its tokens, and the shape's other numbers are
/// those of a token.
const ANY_LENGTH: i64 = -1;

/// Use of a mini-batch; each use has memory needs of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Use {
    /// Forward and backward.
    Train,
    /// Forward, a loss on the whole, forward again and backward.
    TrainWhole,
    /// Forward and a loss, without gradients.
    Evaluate,
    /// Forward, without gradients.
    Map,
}

/// Kind of mini-batch: its use, and dtype and shape of its samples.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Kind {
    pub(crate) used: Use,
    /// Dtype of each leaf and shape of a sample in it.
    leaves: Vec<(String, Vec<i64>)>,
}

impl Kind {
    pub(crate) fn of(used: Use, batch: &impl Batch) -> Self {
        let mut leaves = Vec::new();
        batch.visit(&mut |leaf| {
            let tensor = leaf.tensor();
            // Counting the samples refuses an undefined tensor.
            if !tensor.defined() {
                return;
            }
            let sample = || tensor.size().into_iter().skip(1);
            let shape = match leaf {
                Leaf::Cut(_) => sample().collect(),
                Leaf::Shared(_) => Vec::new(),
                // Sequences of any length share one kind: needs are counted by the token.
                Leaf::Ragged { .. } => {
                    std::iter::once(ANY_LENGTH).chain(sample().skip(1)).collect()
                }
                Leaf::Widths(_) => return,
            };
            leaves.push((format!("{:?}", tensor.kind()), shape));
        });
        Self { used, leaves }
    }

    /// Returns whether gradients are computed.
    pub(crate) fn is_training(&self) -> bool {
        matches!(self.used, Use::Train | Use::TrainWhole)
    }

    /// Returns the number of elements in a sample.
    pub(crate) fn elements(&self) -> u64 {
        let count = |shape: &Vec<i64>| shape.iter().map(|&n| n.unsigned_abs()).product::<u64>();
        self.leaves.iter().map(|(_, shape)| count(shape)).sum()
    }

    /// Returns whether the kinds have the same use, and samples that differ at most in the lengths of their
    /// dimensions.
    pub(crate) fn is_akin(&self, other: &Self) -> bool {
        let types = |kind: &Self| {
            kind.leaves.iter().map(|(kind, s)| (kind.clone(), s.len())).collect::<Vec<_>>()
        };
        self.used == other.used && types(self) == types(other)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let leaf = |(kind, shape): &(String, Vec<i64>)| format!("{kind} {shape:?}");
        let leaves: Vec<String> = self.leaves.iter().map(leaf).collect();
        f.write_str(&leaves.join(" and "))
    }
}

/// Name of the file's format, with its version.
const FORMAT: &str = "brimful sizes 1";

/// Cache key of remembered micro-batch sizes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    /// Hash of the variables' names, shapes and dtypes.
    pub(crate) model: String,
    pub(crate) dtype: String,
    pub(crate) device: String,
    /// Total memory of the device, in bytes.
    pub(crate) memory: u64,
    pub(crate) goal: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Contents {
    format: String,
    sizes: Vec<RememberedSize>,
}

#[derive(Debug, Serialize, Deserialize)]
struct RememberedSize {
    #[serde(flatten)]
    identity: Identity,
    kind: Kind,
    #[serde(flatten)]
    found: Finding,
}

/// Reads this model's sizes; `None` if the file is not one of brimful's.
fn read(path: &Path, identity: &Identity) -> Option<HashMap<Kind, Finding>> {
    let mine = entries(path)?.into_iter().filter(|entry| entry.identity == *identity);
    let sound = mine.filter(|entry| is_sound(&entry.found));
    Some(sound.map(|entry| (entry.kind, entry.found)).collect())
}

/// Writes this model's sizes in place of its earlier ones; entries of other models stay.
fn write(path: &Path, identity: &Identity, found: &HashMap<Kind, Finding>) {
    // Read again, because other runs share the file; a file that is no longer ours is not overwritten.
    let Some(entries) = entries(path) else { return };
    let others = entries.into_iter().filter(|entry| entry.identity != *identity);
    let mine = found.iter().map(|(kind, found)| RememberedSize {
        identity: identity.clone(),
        kind: kind.clone(),
        found: found.clone(),
    });
    let contents = Contents { format: FORMAT.into(), sizes: others.chain(mine).collect() };
    let text = serde_json::to_string_pretty(&contents).expect("numbers and texts");
    if let Err(error) = save::replace(path, text.as_bytes()) {
        tracing::warn!(%error, "the micro-batch size was found but cannot be remembered");
    }
}

fn entries(path: &Path) -> Option<Vec<RememberedSize>> {
    let ignored = |reason: String| {
        let path = path.display();
        tracing::warn!(%path, reason, "remembered micro-batch sizes are not used");
        None
    };
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Some(Vec::new()),
        Err(error) => return ignored(error.to_string()),
    };
    match serde_json::from_str::<Contents>(&text) {
        Ok(contents) if contents.format == FORMAT => Some(contents.sizes),
        Ok(contents) => ignored(format!("it is '{}', not '{FORMAT}'", contents.format)),
        Err(error) => ignored(format!("it is not a file of brimful's: {error}")),
    }
}

fn is_sound(found: &Finding) -> bool {
    let sound = |line: &Line| line.fixed.is_finite() && line.per_sample.is_finite();
    found.size > 0 && found.lines.iter().all(sound)
}

/// Hashes variables' names, shapes and dtypes, in order.
pub(crate) fn hash_of_variables<'a>(named: impl Iterator<Item = (&'a str, &'a Tensor)>) -> String {
    let line = |(name, tensor): (&str, &Tensor)| {
        format!("{name} {:?} {:?}\n", tensor.size(), tensor.kind())
    };
    hash_of(&named.map(line).collect::<String>())
}

/// Hashes a text to 16 hexadecimal digits.
pub(crate) fn hash_of(text: &str) -> String {
    format!("{:016x}", fnv(text.as_bytes()))
}

/// Computes the FNV-1a hash, which is equal on every machine and with every compiler.
fn fnv(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}
