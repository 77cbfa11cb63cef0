//! One layer under measurement: its times, and what it keeps.

use tch::Tensor;

use super::measure::Bench;
use crate::layers::{Model, Stashed};
use crate::oom::{self, Caught};
use crate::{Error, Result};

/// How often a layer is run, after a first run that does not count: so often at least, and until so
/// many agree with the fastest, but not more than so often.
const RUNS: usize = 5;
const AGREEING: usize = 3;
const MOST_RUNS: usize = 25;
/// How much slower than the fastest a run may be to agree with it.
const AGREES: f64 = 1.1;

/// Seconds of one call.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Times {
    pub(super) forward: f64,
    pub(super) backward: f64,
    /// The backward for the input's gradient alone.
    pub(super) input_gradient: f64,
}

/// The layer that is being measured.
pub(super) struct Subject<'a> {
    pub(super) bench: &'a Bench,
    pub(super) name: &'a str,
    pub(super) model: &'a Model,
    pub(super) parameters: Vec<Tensor>,
    /// What earlier layers have stashed.
    pub(super) stashed: Stashed,
    pub(super) is_first: bool,
}

impl Subject<'_> {
    /// The least times with all samples, or with the first `few` of them: whatever else the machine
    /// does can only add to them, and adds to some layers alone.
    pub(super) fn times(&self, input: &[Tensor], few: Option<i64>) -> Result<Times> {
        self.run(input, few)?; // libraries set themselves up, caches fill
        let mut runs = Vec::new();
        while runs.len() < RUNS || !agree(&runs) && runs.len() < MOST_RUNS {
            runs.push(self.run(input, few)?);
        }
        Ok(Times {
            forward: least(&runs, |run| run.forward),
            backward: least(&runs, |run| run.backward),
            input_gradient: least(&runs, |run| run.input_gradient),
        })
    }

    /// The same with a quarter of the samples, where that is more than one.
    pub(super) fn part_times(&self, input: &[Tensor]) -> Result<Option<(i64, Times)>> {
        let few = self.bench.samples / 4;
        // Only an output with a row for each sample can be cut again.
        let rows = |value: &Tensor| value.size().first() == Some(&self.bench.samples);
        if few < 2 || !input.iter().chain(self.stashed.all()).all(rows) {
            return Ok(None);
        }
        Ok(Some((few, self.times(input, Some(few))?)))
    }

    fn run(&self, input: &[Tensor], few: Option<i64>) -> Result<Times> {
        let input = self.leaves(input, few)?;
        let mut stashed = self.stashed.map(|values| self.leaves(values, few))?;
        let leaves: Vec<Tensor> =
            input.iter().chain(stashed.all()).map(Tensor::shallow_clone).collect();
        let (output, forward) = self.bench.timed(|| self.forward(input, &mut stashed))?;
        let traced: Vec<&Tensor> = leaves.iter().filter(|leaf| leaf.requires_grad()).collect();
        let mut wanted: Vec<&Tensor> = self.parameters.iter().collect();
        wanted.extend(&traced);
        // The first half keeps the graph for the second, which is the whole backward.
        let input_gradient = self.backward(&output, &traced, true)?;
        let backward = self.backward(&output, &wanted, false)?;
        Ok(Times { forward, backward, input_gradient: input_gradient.min(backward) })
    }

    /// The bytes that the forward leaves behind, its output, and what is stashed for later layers.
    pub(super) fn kept(&self, input: &[Tensor]) -> Result<(u64, Vec<Tensor>, Stashed)> {
        let detached = |values: &[Tensor]| -> Result<Vec<Tensor>> {
            values.iter().map(|value| Ok(value.f_detach()?)).collect()
        };
        let input = self.leaves(input, None)?;
        let mut stashed = self.stashed.map(|values| self.leaves(values, None))?;
        let before = self.bench.in_use()?;
        let output = self.forward(input, &mut stashed)?;
        let kept = self.bench.in_use()?.saturating_sub(before);
        Ok((kept, detached(&output)?, stashed.map(detached)?))
    }

    /// The input as the boundary of a stage: with a gradient, unless it comes from outside.
    fn leaves(&self, values: &[Tensor], few: Option<i64>) -> Result<Vec<Tensor>> {
        let leaf = |value: &Tensor| {
            let leaf = match few {
                Some(few) => value.f_narrow(0, 0, few)?.f_detach()?,
                None => value.f_detach()?,
            };
            let wants_gradient = !self.is_first && leaf.is_floating_point();
            Ok(leaf.f_set_requires_grad(wants_gradient)?)
        };
        values.iter().map(leaf).collect()
    }

    fn forward(&self, input: Vec<Tensor>, stashed: &mut Stashed) -> Result<Vec<Tensor>> {
        let shape = input.first().map(Tensor::size).unwrap_or_default();
        let run = oom::catch(|| Ok::<_, Error>(self.model.run(input, stashed, true, |_| {})));
        run.map_err(|caught| match caught {
            Caught::OutOfMemory(oom) => oom.into(),
            Caught::Error(error) => error,
            Caught::Panic(payload) => Error::LayerRun {
                layer: self.name.to_owned(),
                shape,
                message: oom::panic_words(&*payload).unwrap_or_else(|| "a panic".to_owned()),
            },
        })
    }

    /// The seconds of a backward to these tensors; none where there is nothing to trace back to.
    /// No `grad` of anyone is touched.
    fn backward(&self, output: &[Tensor], wanted: &[&Tensor], keep_graph: bool) -> Result<f64> {
        let roots: Vec<&Tensor> = output.iter().filter(|value| value.requires_grad()).collect();
        if wanted.is_empty() || roots.is_empty() {
            return Ok(0.0);
        }
        let run = || Ok(Tensor::f_run_backward(&roots, wanted, keep_graph, false)?);
        Ok(self.bench.timed(run)?.1)
    }
}

/// Whether enough runs took no longer than the fastest, more or less.
fn agree(runs: &[Times]) -> bool {
    let all = |run: &Times| run.forward + run.backward;
    let limit = least(runs, all) * AGREES;
    runs.iter().filter(|run| all(run) <= limit).count() >= AGREEING
}

fn least(runs: &[Times], of: impl Fn(&Times) -> f64) -> f64 {
    runs.iter().map(of).fold(f64::INFINITY, f64::min)
}
