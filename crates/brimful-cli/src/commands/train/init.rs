//! `--init`: a run that begins with the weights of a file.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result};
use tch::Tensor;

use super::Trainer;
use super::engine::{self, Named};
use crate::exit::wrong_use;
use crate::progress;
use crate::saved_weights::SavedWeights;

/// How many names of a list are shown.
const SHOWN: usize = 5;

/// Gives the model the weights that the file has for it.
pub(super) fn load(path: &Path, partial: bool, trainer: &mut Trainer) -> Result<()> {
    let weights = SavedWeights::read(path)
        .map(SavedWeights::into_tensors)
        .with_context(|| format!("cannot begin with the weights of {}", path.display()))?;
    let variables = trainer.engine.variables()?;
    let Sorted { fitting, differences } = Sorted::new(&variables, weights);
    let shown = path.display();
    let refused = match (differences.as_str(), partial) {
        ("", _) => None,
        (_, false) => Some(format!("{differences}; --init-partial takes the others")),
        (_, true) if fitting.is_empty() => {
            Some(format!("none of its weights is the model's: {differences}"))
        }
        (_, true) => None,
    };
    // Of a pipeline over ranks, the first one alone knows all variables.
    let told = trainer.world.share("init", &refused.filter(|_| trainer.is_first()))?;
    if let Some(reason) = told.into_iter().flatten().next() {
        return Err(wrong_use(format!("--init {shown}: {reason}")));
    }
    if trainer.is_first() && !differences.is_empty() {
        let count = fitting.len();
        progress::say(&format!("brimful: {count} weights of {shown} were taken; {differences}"));
    }
    engine::put(variables, fitting)
}

/// The weights of a file, as the model can use them.
#[derive(Debug)]
struct Sorted {
    fitting: Named,
    /// In words; empty where there is none.
    differences: String,
}

impl Sorted {
    fn new(model: &Named, weights: Named) -> Self {
        let mut missing: BTreeMap<&str, &Tensor> =
            model.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let mut fitting = Named::new();
        let mut left_over = Vec::new();
        let mut misshapen = Vec::new();
        for (name, tensor) in weights {
            match missing.remove(name.as_str()) {
                Some(own) if own.size() == tensor.size() => fitting.push((name, tensor)),
                Some(own) => {
                    misshapen.push(format!("{name} {:?} (here {:?})", tensor.size(), own.size()));
                }
                None => left_over.push(name),
            }
        }
        let missing: Vec<String> = missing.into_keys().map(str::to_owned).collect();
        let mut differences = String::new();
        let lists =
            [("it lacks", missing), ("it has", left_over), ("of other shapes are", misshapen)];
        for (what, names) in lists {
            if !names.is_empty() {
                let begin = if differences.is_empty() { "" } else { "; " };
                // Writing to a text cannot fail.
                let _ = write!(differences, "{begin}{what} {}", listed(&names));
            }
        }
        Self { fitting, differences }
    }
}

/// `a, b and 7 more`.
fn listed(names: &[String]) -> String {
    let shown = names[..names.len().min(SHOWN)].join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    fn named(list: &[(&str, i64)]) -> Named {
        let zeros = |length| Tensor::zeros([length], (Kind::Float, Device::Cpu));
        list.iter().map(|(name, length)| ((*name).to_owned(), zeros(*length))).collect()
    }

    #[test]
    fn what_is_missing_left_over_or_of_another_shape_is_listed() {
        let model = named(&[("a", 1), ("b", 2), ("c", 3)]);
        let weights = named(&[("b", 2), ("c", 4), ("d", 1)]);
        let Sorted { fitting, differences } = Sorted::new(&model, weights);
        assert_eq!(fitting.len(), 1);
        assert_eq!(differences, "it lacks a; it has d; of other shapes are c [4] (here [3])");
        assert!(Sorted::new(&model, named(&[("a", 1), ("b", 2), ("c", 3)])).differences.is_empty());
    }

    #[test]
    fn a_long_list_is_cut() {
        let names: Vec<String> = (0..7).map(|number| number.to_string()).collect();
        assert_eq!(listed(&names), "0, 1, 2, 3, 4 and 2 more");
    }
}
