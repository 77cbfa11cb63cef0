//! Optimizer steps as CUDA graphs: captured once and replayed while no tensor moves.
//!
//! A CUDA graph holds addresses, not tensors. So each step reads the addresses of parameters, gradients and
//! state. If they were unchanged for a few steps, the step is captured; otherwise it runs normally. Learning rates
//! are tensors in the graph, so they can change without a new capture.

use brimful_torch::autograd::count_change;
use brimful_torch::graph::{self, Pool};
use brimful_torch::stream::Stream;
use tch::{Device, Kind, Tensor};

use super::captured_step::{Captured, OptimizerGraphs};
use super::{OptimizerPart, Parameter, ParameterGroup, state};
use crate::oom::catch_unseen;
use crate::{Error, Result};

/// Number of consecutive steps with unchanged addresses before a step is captured.
const CALM_STEPS: usize = 2;
/// Largest number of captures: where tensors move again and again, captures cost more than they save.
const MOST_CAPTURES: usize = 8;

impl OptimizerPart {
    /// Sets whether steps are captured and replayed on CUDA.
    pub(crate) fn set_cuda_graphs(&mut self, wanted: bool) {
        self.graphs = OptimizerGraphs { wanted, ..OptimizerGraphs::default() };
    }

    /// Returns the number of steps that were replayed.
    pub(crate) fn replayed(&self) -> usize {
        self.graphs.replayed
    }

    /// Takes the step by replaying a CUDA graph, if possible; returns whether it did.
    pub(super) fn step_again(&mut self) -> Result<bool> {
        if !self.graphs.wanted {
            return Ok(false);
        }
        let (device, places) = self.places()?.unwrap_or((Device::Cpu, Vec::new()));
        if places != self.graphs.places || places.is_empty() {
            self.graphs.forget();
            self.graphs.places = places;
            return Ok(false);
        }
        // Counts only unchanged addresses: gradients that are allocated anew have another address at every
        // step.
        self.graphs.calm_steps += 1;
        if self.graphs.captured.is_none() && !self.capture(device)? {
            return Ok(false);
        }
        let Some(captured) = &mut self.graphs.captured else { return Ok(false) };
        for ((tensor, written), group) in captured.rates.iter_mut().zip(&self.groups) {
            let rate = group.method.learning_rate();
            // Written only if it has changed, because a fill is a kernel launch.
            if *written != rate {
                let _ = tensor.f_fill_(rate)?;
                *written = rate;
            }
        }
        captured.graph.replay()?;
        self.graphs.replayed += 1;
        self.count_changes();
        Ok(true)
    }

    /// Raises the versions of the parameters. A replay does not raise them, but autograd and copies of the
    /// parameters depend on them.
    fn count_changes(&mut self) {
        for Parameter { tensor, state, .. } in &mut self.parameters {
            if tensor.requires_grad() && tensor.grad().defined() {
                count_change(tensor);
                if let Some(state) = state {
                    state.version = state::version(tensor);
                }
            }
        }
    }

    /// Returns the addresses of all tensors that a step reads or writes; `None` unless all are on one CUDA device
    /// and no state is missing.
    fn places(&self) -> Result<Option<(Device, Vec<usize>)>> {
        let mut places = Vec::with_capacity(4 * self.parameters.len());
        let mut device = None;
        for parameter in &self.parameters {
            let tensor = &parameter.tensor;
            let gradient = tensor.f_grad()?;
            if !tensor.requires_grad() || !gradient.defined() {
                // A placeholder, not left out: a parameter that gets a gradient again must change the list.
                places.push(0);
                continue;
            }
            let method = &self.method_of(parameter);
            let Some(state) = parameter.state.as_ref().filter(|s| s.is_current(tensor, method))
            else {
                return Ok(None);
            };
            let here = *device.get_or_insert(tensor.device());
            if !here.is_cuda() || tensor.device() != here || gradient.is_sparse() {
                return Ok(None);
            }
            let all = [tensor, &gradient].into_iter().chain(state.all_tensors());
            places.extend(all.map(|tensor| tensor.data_ptr() as usize));
        }
        Ok(device.map(|device| (device, places)))
    }

    /// Captures a step without running it; returns whether there is a graph now.
    fn capture(&mut self, device: Device) -> Result<bool> {
        let OptimizerGraphs { calm_steps, captures, .. } = self.graphs;
        if calm_steps < CALM_STEPS || captures == MOST_CAPTURES {
            return Ok(false);
        }
        self.graphs.captures += 1;
        let rate = |group: &ParameterGroup| {
            let rate = group.method.learning_rate();
            Ok((Tensor::f_full([0_i64; 0], rate, (Kind::Float, device))?, rate))
        };
        let rates = self.groups.iter().map(rate).collect::<Result<Vec<_>>>()?;
        let tensors = rates.iter().map(|(tensor, _)| tensor.shallow_clone()).collect();
        let recorded = catch_unseen(|| {
            // CUDA does not capture the default stream.
            let stream = Stream::urgent(device)?;
            let step = || {
                let mut plan = self.prepare()?;
                plan.rates = tensors;
                self.commit(&mut plan)
            };
            let (graph, ()) = graph::record(stream, &mut Pool::default(), step)?;
            Ok::<_, Error>(graph)
        });
        match recorded {
            Ok(graph) => self.graphs.captured = Some(Captured { graph, rates }),
            Err(cause) => {
                tracing::warn!(%cause, "the optimizer's steps are not replayed");
                self.graphs.wanted = false;
            }
        }
        Ok(self.graphs.captured.is_some())
    }
}
