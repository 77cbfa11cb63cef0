//! Finest balance: a stage for each layer that has parameters.

use super::{Balance, BalanceError};

/// Returns a balance with a stage for each layer that has parameters. Offloaded stages are cut this way,
/// because a device buffer is as large as the largest stage. A layer without parameters joins the layer
/// before it, or the first layer that has parameters if none comes before. While there are more than `most`
/// stages, the neighbours with the fewest parameters in total are joined.
///
/// `parameters` has a number for each layer, in bytes or any proportional unit.
///
/// # Errors
/// If there is no layer, or `most` is 0.
pub fn finest(parameters: &[u64], most: usize) -> Result<Balance, BalanceError> {
    let groups = if most == 0 { Vec::new() } else { joined(grouped(parameters), most) };
    let sizes: Vec<usize> = groups.into_iter().map(|group| group.layers).collect();
    Balance::new(sizes, parameters.len())
}

/// Consecutive layers that stay together.
#[derive(Debug, Clone, Copy)]
struct LayerGroup {
    layers: usize,
    parameters: u64,
}

impl LayerGroup {
    fn with(self, next: Self) -> Self {
        let parameters = self.parameters.saturating_add(next.parameters);
        Self { layers: self.layers + next.layers, parameters }
    }
}

fn grouped(parameters: &[u64]) -> Vec<LayerGroup> {
    let mut groups: Vec<LayerGroup> = Vec::new();
    for &parameters in parameters {
        let layer = LayerGroup { layers: 1, parameters };
        match groups.last_mut() {
            Some(last) if parameters == 0 || last.parameters == 0 => *last = last.with(layer),
            _ => groups.push(layer),
        }
    }
    groups
}

fn joined(mut groups: Vec<LayerGroup>, most: usize) -> Vec<LayerGroup> {
    while groups.len() > most {
        let pairs = groups.windows(2).map(|pair| pair[0].with(pair[1]).parameters);
        let Some((at, _)) = pairs.enumerate().min_by_key(|(_, parameters)| *parameters) else {
            break;
        };
        let next = groups.remove(at + 1);
        groups[at] = groups[at].with(next);
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(parameters: &[u64], most: usize) -> Vec<usize> {
        finest(parameters, most).expect("a cut").sizes().to_vec()
    }

    #[test]
    fn layers_without_parameters_go_with_the_one_before() {
        assert_eq!(cut(&[0, 5, 0, 0, 7, 1, 0], 3), [4, 1, 2]);
        assert_eq!(cut(&[5, 6, 7], 9), [1, 1, 1]);
        assert_eq!(cut(&[0, 0], 1), [2]);
    }

    #[test]
    fn the_smallest_neighbours_are_joined() {
        assert_eq!(cut(&[9, 1, 2, 9, 4], 4), [1, 2, 1, 1]);
        assert_eq!(cut(&[9, 1, 2, 9, 4], 2), [3, 2]);
    }

    #[test]
    fn nothing_cannot_be_cut() {
        assert_eq!(finest(&[], 3), Err(BalanceError::NoStages));
        assert_eq!(finest(&[1, 2], 0), Err(BalanceError::NoStages));
    }
}
