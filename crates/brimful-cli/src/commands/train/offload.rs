//! A model that lives on the host: the flag, and where its layers are cut.

use std::fmt;

use anyhow::{Result, ensure};
use brimful::pipeline::{BalanceBy, Homes};
use brimful::schedule::Schedule;
use brimful::{Bytes, Layers};
use clap::ValueEnum;
use tch::Tensor;

use super::TrainOptions;
use crate::exit::wrong_use;
use crate::setting::typed;

/// Where weights, gradients and the optimizer's state live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum Offload {
    /// On the host where they do not fit in --memory-limit, else on the device
    Auto,
    /// On the device
    #[default]
    None,
    /// On the host; a stage's weights come to the device when it is their turn
    All,
}

impl Offload {
    /// Whether the layers' weights are to live on the host of so many devices.
    pub(super) fn is_at_home(
        self,
        layers: &Layers,
        devices: usize,
        options: &TrainOptions,
    ) -> Result<bool> {
        match (self, options.memory_limit) {
            (Self::All, _) => Ok(true),
            (Self::Auto, Some(Bytes(limit))) => {
                let weights =
                    layers.parameter_count()? * options.dtype.kind().elt_size_in_bytes() as u64;
                // Weights, their gradients, and what the optimizer keeps of each.
                let each = match options.fine_tune.lora {
                    // What LoRA trains is small beside the weights.
                    Some(_) => 1.0,
                    None => 2.0 + options.recipe.method().state_factor(),
                };
                Ok(weights as f64 * each > limit as f64 * devices as f64)
            }
            (Self::Auto | Self::None, _) => Ok(false),
        }
    }
}

impl fmt::Display for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value();
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}

/// How a model is cut into stages, in which order they run, and where they live.
#[derive(Debug)]
pub(super) struct StageCut {
    pub(super) balance: BalanceBy,
    pub(super) schedule: Schedule,
    pub(super) homes: Homes,
}

impl StageCut {
    /// That of a model over so many devices; `sample` is a micro-batch to measure layers with.
    pub(super) fn new(
        layers: &Layers,
        devices: usize,
        options: &TrainOptions,
        sample: &Tensor,
    ) -> Result<Self> {
        let stages = &options.stages;
        if stages.offload.is_at_home(layers, devices, options)? {
            return Self::at_home(layers, devices, stages.schedule);
        }
        let schedule = stages.schedule.unwrap_or(Schedule::OneFOneB);
        let count = devices * schedule.stages_per_device();
        check_stages(count, layers.len(), "")?;
        if count == 1 {
            // It has every layer, whatever they cost.
            return Ok(Self { balance: [layers.len()].into(), schedule, homes: Homes::Device });
        }
        let sample = typed(sample, options.dtype.kind());
        let balance = BalanceBy::by_time(&sample).optimizer(options.recipe.method());
        Ok(Self { balance, schedule, homes: Homes::Device })
    }

    /// As fine as it can be, unless the schedule says how many stages there are: slots on the device are
    /// as large as the largest stage.
    fn at_home(layers: &Layers, devices: usize, schedule: Option<Schedule>) -> Result<Self> {
        let finest = finest_stages(layers)?;
        let stages_per_device = match schedule {
            Some(schedule) => schedule.stages_per_device(),
            None => (finest.len() / devices).max(1),
        };
        let stages = devices * stages_per_device;
        check_stages(stages, finest.len(), " with parameters")?;
        Ok(Self {
            balance: joined(finest, stages).into(),
            schedule: schedule.unwrap_or(Schedule::BreadthFirst { stages_per_device }),
            homes: Homes::Host,
        })
    }
}

/// Every stage needs a layer.
fn check_stages(stages: usize, layers: usize, of_a_kind: &str) -> Result<()> {
    ensure!(
        stages <= layers,
        wrong_use(format!(
            "{stages} stages need as many layers{of_a_kind}, but the model has {layers}: lower --stages"
        ))
    );
    Ok(())
}

/// Consecutive layers that go together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LayerGroup {
    layers: usize,
    parameters: u64,
}

impl LayerGroup {
    fn with(self, next: Self) -> Self {
        let parameters = self.parameters + next.parameters;
        Self { layers: self.layers + next.layers, parameters }
    }
}

/// A stage for each layer that has parameters, of its own or shared; those without go with the one
/// before, and the very first ones with the first that has some.
fn finest_stages(layers: &Layers) -> Result<Vec<LayerGroup>> {
    let mut counts = layers.parameter_counts()?;
    for (user, owner) in layers.shared()? {
        counts[user] += counts[owner];
    }
    Ok(grouped(&counts))
}

fn grouped(counts: &[u64]) -> Vec<LayerGroup> {
    let mut groups: Vec<LayerGroup> = Vec::new();
    for &parameters in counts {
        let layer = LayerGroup { layers: 1, parameters };
        match groups.last_mut() {
            Some(last) if parameters == 0 || last.parameters == 0 => *last = last.with(layer),
            _ => groups.push(layer),
        }
    }
    groups
}

/// How many layers each of so many stages has: neighbours with the fewest parameters are joined, so that
/// the largest stage stays small.
fn joined(mut groups: Vec<LayerGroup>, stages: usize) -> Vec<usize> {
    while groups.len() > stages {
        let pairs = groups.windows(2).map(|pair| pair[0].with(pair[1]).parameters);
        let Some((at, _)) = pairs.enumerate().min_by_key(|(_, parameters)| *parameters) else {
            break;
        };
        let next = groups.remove(at + 1);
        groups[at] = groups[at].with(next);
    }
    groups.into_iter().map(|group| group.layers).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_without_parameters_go_with_the_one_before() {
        let cut = |counts: &[u64], stages| joined(grouped(counts), stages);
        assert_eq!(cut(&[0, 5, 0, 0, 7, 1, 0], 3), [4, 1, 2]);
        assert_eq!(cut(&[5, 6, 7], 9), [1, 1, 1]);
        assert_eq!(cut(&[0, 0], 1), [2]);
    }

    #[test]
    fn the_smallest_neighbours_are_joined() {
        let cut = |counts: &[u64], stages| joined(grouped(counts), stages);
        assert_eq!(cut(&[9, 1, 2, 9, 4], 4), [1, 2, 1, 1]);
        assert_eq!(cut(&[9, 1, 2, 9, 4], 2), [3, 2]);
    }
}
