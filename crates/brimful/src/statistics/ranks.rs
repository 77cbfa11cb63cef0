//! Statistics of all ranks' samples, in one sum.
//!
//! Each rank contributes sums around the running mean r, which all ranks share, for each channel of each layer
//! that has run on any rank. So cancellation costs little precision, and the sums are in f64.
//!
//! ```text
//!   n, n (μ − r), q + n (μ − r)²    summed over the ranks to N, S, T
//!   M = r + S / N                   Q = T − S² / N
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::pool::Seen;
use super::{Momentum, Pending, Running};
use crate::Result;
use crate::ranks::RankSum;

/// A layer that has reported, by the names of its variables.
#[derive(Debug, Clone, PartialEq, PartialOrd, Serialize, Deserialize)]
pub(crate) struct ReportedLayer {
    mean: String,
    variance: String,
    momentum: Option<f64>,
    /// Name of the variable that counts its batches, if there is one.
    batches: Option<String>,
}

impl ReportedLayer {
    /// Returns whether this is the name of one of the layer's statistics.
    pub(crate) fn has(&self, name: &str) -> bool {
        [Some(&self.mean), Some(&self.variance), self.batches.as_ref()]
            .into_iter()
            .flatten()
            .any(|own| own == name)
    }
}

impl Pending {
    /// Returns the layers that have reported and whose variables `name` knows.
    pub(crate) fn layers(&self, name: impl Fn(&Tensor) -> Option<String>) -> Vec<ReportedLayer> {
        let layer = |seen: &Seen| {
            let Running { mean, variance, momentum, .. } = &seen.running;
            Some(ReportedLayer {
                mean: name(mean)?,
                variance: name(variance)?,
                momentum: momentum.given(),
                batches: momentum.batches().and_then(&name),
            })
        };
        self.deferred.values().filter_map(layer).collect()
    }

    /// Sums the statistics of these layers over all ranks; `number` identifies the sum in the collective.
    pub(crate) fn sum_over_ranks(
        &mut self,
        collective: &RankSum,
        number: usize,
        layers: impl IntoIterator<Item = ReportedLayer>,
        variable: impl Fn(&str) -> Option<Tensor>,
    ) -> Result<()> {
        // Every rank sums in the order of the names.
        let layers: BTreeMap<_, _> = layers.into_iter().map(|l| (l.mean.clone(), l)).collect();
        self.pool()?;
        // One sum serves all layers, because each further sum would be another collective.
        let mut ids = Vec::new();
        for layer in layers.into_values() {
            let (Some(mean), Some(variance)) = (variable(&layer.mean), variable(&layer.variance))
            else {
                continue;
            };
            let batches = layer.batches.and_then(|name| variable(&name));
            let Some(momentum) =
                layer.momentum.map(Momentum::Given).or(batches.map(Momentum::Average))
            else {
                continue;
            };
            ids.push(self.find_or_add(mean, variance, momentum));
        }
        let rows = ids.iter().map(|id| self.deferred[id].moments()).collect::<Result<Vec<_>>>()?;
        let all = Tensor::f_cat(&rows, 0)?.f_contiguous()?;
        collective.sum_now(number, &all)?;
        let lengths = rows.iter().map(Tensor::size1).collect::<Result<Vec<_>, _>>()?;
        for (id, part) in ids.iter().zip(all.f_split_with_sizes(lengths, 0)?) {
            if let Some(seen) = self.deferred.get_mut(id) {
                seen.set_moments(&part)?;
            }
        }
        Ok(())
    }

    /// Returns the statistics that layers have moved at every micro-batch.
    pub(crate) fn moved_at_once(&self) -> impl Iterator<Item = &Tensor> {
        self.changed.values().flat_map(|(running, _)| running.all())
    }

    /// Returns the id of the layer with these variables. Adds the layer if it has not run on this rank.
    fn find_or_add(&mut self, mean: Tensor, variance: Tensor, momentum: Momentum) -> u64 {
        let place = mean.data_ptr();
        let known = self.deferred.iter().find(|(_, s)| s.running.mean.data_ptr() == place);
        if let Some((id, _)) = known {
            return *id;
        }
        let running = Running::new(mean, variance, momentum);
        let id = running.id;
        self.deferred.insert(id, Seen::new(running));
        id
    }
}
