//! Memory that CUDA graphs use besides their own pool. It is kept alive for the graphs, and released once nothing
//! but the graphs holds it.

use std::collections::HashMap;

use brimful_torch::touched::any_is_left;
use tch::Tensor;

/// Blocks by address, each held once for all CUDA graphs.
#[derive(Debug, Default)]
pub(super) struct Blocks(HashMap<usize, Tensor>);

impl Blocks {
    /// Keeps a block that others hold too; returns the handle that all graphs share.
    pub(super) fn keep(&mut self, block: &Tensor) -> Tensor {
        self.0.entry(address(block)).or_insert_with(|| block.shallow_clone()).shallow_clone()
    }

    /// Removes the blocks that nothing else holds any more, and returns their addresses.
    pub(super) fn take_left(&mut self) -> Vec<usize> {
        let all: Vec<Tensor> = self.0.values().map(Tensor::shallow_clone).collect();
        if !any_is_left(&all) {
            return Vec::new();
        }
        let left = all.iter().filter(|block| any_is_left(std::slice::from_ref(*block)));
        let left: Vec<usize> = left.map(address).collect();
        self.0.retain(|address, _| !left.contains(address));
        left
    }
}

pub(super) fn address(block: &Tensor) -> usize {
    block.data_ptr() as usize
}

#[cfg(test)]
mod tests {
    use brimful_torch::touched::touched;
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn what_two_pieces_of_work_use_is_held_once_and_known_to_be_left() {
        let ones = || Tensor::ones([4], (Kind::Float, Device::Cpu));
        let (x, y, mut blocks) = (ones(), ones(), Blocks::default());
        let (sum, one) = touched(|| &x + &y).expect("a list");
        let (product, two) = touched(|| &x * 2.0).expect("a list");
        let held: Vec<_> = one.read.iter().chain(&two.read).map(|b| blocks.keep(b)).collect();
        assert!(held.iter().filter(|block| address(block) == address(&x)).count() == 2);
        drop((one, two, sum, product));
        assert!(blocks.take_left().is_empty());
        let left = address(&x);
        drop(x);
        assert_eq!(blocks.take_left(), [left]);
        assert!(blocks.take_left().is_empty());
    }
}
