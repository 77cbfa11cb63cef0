//! A part of a model that runs backward by itself, with the indices of its parameters.

use tch::Tensor;

use super::sums::Sum;

/// Some of an accumulator's parameters.
#[derive(Debug)]
pub(super) struct ModelPart {
    places: Vec<usize>,
    pub(super) parameters: Vec<Tensor>,
}

impl ModelPart {
    pub(super) fn new(places: Vec<usize>, all: &[Tensor]) -> Self {
        let parameters = places.iter().map(|at| all[*at].shallow_clone()).collect();
        Self { places, parameters }
    }

    /// Runs `f` with the part's own parameters and their sums, which are taken out of `whole` while `f` runs.
    pub(super) fn with_sums<T>(
        &self,
        whole: &mut Sum,
        f: impl FnOnce(&[Tensor], &mut [Option<Tensor>]) -> T,
    ) -> T {
        let mut own: Sum = self.places.iter().map(|at| whole[*at].take()).collect();
        let result = f(&self.parameters, &mut own);
        for (at, sum) in self.places.iter().zip(own) {
            whole[*at] = sum;
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tch::nn::{Init, VarStore};
    use tch::{Device, Kind, Tensor};

    use crate::accumulate::{Accumulator, Named};

    /// Returns the sums of three parameters, after two backwards of the first of two parts and one of the second.
    /// The third parameter is the first one again. The first part uses all parameters.
    fn sums(kind: Kind) -> Vec<Option<f64>> {
        let mut store = VarStore::new(Device::Cpu);
        let one = |name: &str| store.root().var(name, &[1], Init::Const(1.0));
        let (a, b) = (one("a"), one("b"));
        store.set_kind(kind);
        let list = vec![a.shallow_clone(), b.shallow_clone(), a.shallow_clone()];
        let named: Named = Arc::clone(&store.variables_);
        let begun = Accumulator::begin(list, &named).expect("parameters");
        let mut accumulator = begun.in_parts(vec![vec![0], vec![1]]);
        accumulator.expect_groups(1);
        for part in [0, 0, 1] {
            let loss = if part == 0 { &a * 3.0 + &b * 5.0 } else { &b * 7.0 };
            accumulator.expect_part(Some(part));
            accumulator.add(0, &[(&loss, loss.ones_like())], &[], false).expect("a backward");
        }
        let (_, sums) = accumulator.finish().expect("sums");
        let number = |sum: &Option<Tensor>| sum.as_ref().map(|sum| sum.double_value(&[0]));
        sums.groups[0].iter().map(number).collect()
    }

    #[test]
    fn what_a_part_brings_to_another_ones_parameter_is_not_lost() {
        // Gradients stay in their parameters, so a parameter that is listed twice is found twice.
        assert_eq!(sums(Kind::Double), [Some(6.0), Some(17.0), Some(6.0)]);
        // Sums are kept apart.
        assert_eq!(sums(Kind::BFloat16), [Some(6.0), Some(17.0), None]);
    }
}
