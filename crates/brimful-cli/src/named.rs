//! Tensors by name, and the comparison of a file's tensors with a model's.

use std::collections::{BTreeMap, HashMap};

use anyhow::Result;
use tch::{Kind, Tensor};

/// Tensors with their names.
pub(crate) type Named = Vec<(String, Tensor)>;

/// Number of names listed in an error.
const NAMES_LISTED: usize = 5;

/// Comparison of a file's tensors with a model's.
#[derive(Debug)]
pub(crate) struct Comparison {
    /// Float tensors whose name and shape match a tensor of the model.
    pub(crate) fitting: Named,
    missing: Vec<String>,
    left_over: Vec<String>,
    misshapen: Vec<String>,
    /// Tensors of integers or 8-bit floats: quantized weights, which need scales to be used.
    mistyped: Vec<String>,
}

impl Comparison {
    pub(crate) fn new(model: &[(String, Tensor)], saved: Named) -> Self {
        let mut missing: BTreeMap<&str, &Tensor> =
            model.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let mut fitting = Named::new();
        let mut left_over = Vec::new();
        let mut misshapen = Vec::new();
        let mut mistyped = Vec::new();
        for (name, tensor) in saved {
            match missing.remove(name.as_str()) {
                Some(own) if own.size() != tensor.size() => {
                    misshapen.push(format!("{name} {:?} (here {:?})", tensor.size(), own.size()));
                }
                Some(_) => match tensor.kind() {
                    Kind::Double | Kind::Float | Kind::Half | Kind::BFloat16 => {
                        fitting.push((name, tensor));
                    }
                    other => mistyped.push(format!("{name} {other:?}")),
                },
                None => left_over.push(name),
            }
        }
        let missing = missing.into_keys().map(str::to_owned).collect();
        left_over.sort();
        misshapen.sort();
        mistyped.sort();
        Self { fitting, missing, left_over, misshapen, mistyped }
    }

    /// Describes the differences between file and model, or returns none if they match.
    pub(crate) fn differences(&self) -> Option<String> {
        let lists = [
            ("it lacks", &self.missing),
            ("it has", &self.left_over),
            ("of other shapes are", &self.misshapen),
            ("of other numbers than floats are", &self.mistyped),
        ];
        let told = lists.into_iter().filter(|(_, names)| !names.is_empty());
        let told: Vec<String> =
            told.map(|(what, names)| format!("{what} {}", listed(names))).collect();
        (!told.is_empty()).then(|| told.join("; "))
    }
}

/// Copies values to the variables of the same names.
pub(crate) fn put(variables: Named, values: Named) -> Result<()> {
    let _without = tch::no_grad_guard();
    let mut values: HashMap<String, Tensor> = values.into_iter().collect();
    for (name, mut variable) in variables {
        if let Some(value) = values.remove(&name) {
            variable.f_copy_(&value)?;
        }
    }
    Ok(())
}

/// Joins names as `a, b and 7 more`.
fn listed(names: &[String]) -> String {
    let shown = names[..names.len().min(NAMES_LISTED)].join(", ");
    match names.len().saturating_sub(NAMES_LISTED) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    fn named(list: &[(&str, i64)]) -> Named {
        let zeros = |length| Tensor::zeros([length], (Kind::Float, Device::Cpu));
        list.iter().map(|(name, length)| ((*name).to_owned(), zeros(*length))).collect()
    }

    fn copied(list: &[(String, Tensor)]) -> Named {
        list.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect()
    }

    #[test]
    fn what_is_missing_left_over_or_of_another_shape_is_listed() {
        let model = named(&[("a", 1), ("b", 2), ("c", 3)]);
        let compared = Comparison::new(&model, named(&[("b", 2), ("c", 4), ("d", 1)]));
        assert_eq!(compared.fitting.len(), 1);
        assert_eq!(
            compared.differences().as_deref(),
            Some("it lacks a; it has d; of other shapes are c [4] (here [3])")
        );
        let mut whole = named(&[("a", 1), ("b", 2), ("c", 3)]);
        assert_eq!(Comparison::new(&model, copied(&whole)).differences(), None);
        whole[1].1 = whole[1].1.to_kind(Kind::Int8);
        let compared = Comparison::new(&model, whole);
        assert_eq!(compared.fitting.len(), 2);
        let says = "of other numbers than floats are b Int8";
        assert_eq!(compared.differences().as_deref(), Some(says));
    }

    #[test]
    fn a_long_list_is_cut() {
        let names: Vec<String> = (0..7).map(|number| number.to_string()).collect();
        assert_eq!(listed(&names), "0, 1, 2, 3, 4 and 2 more");
    }
}
