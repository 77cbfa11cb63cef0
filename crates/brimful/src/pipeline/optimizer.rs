//! An optimizer whose every part steps on its own stages' thread.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use brimful_torch::foreach;
use tch::Tensor;

use super::Pipeline;
use super::crew::Crew;
use super::saved;
use super::worker::Worker;
use crate::optim::{self, Method, Optimizer};
use crate::save::{self, Metadata};
use crate::{Error, Result};

/// Updates a pipeline's parameters by their gradients.
///
/// It is one optimizer over all parameters: its state has the form of [`Optimizer`]'s, and loads
/// into one, or into a pipeline of any other balance.
#[derive(Debug)]
pub struct PipelineOptimizer {
    crew: Arc<Mutex<Crew>>,
    learning_rate: f64,
}

impl Pipeline {
    /// An optimizer of all parameters, frozen ones included: those are skipped while they are
    /// frozen. It takes the place of an earlier one.
    ///
    /// # Errors
    /// When an option makes no sense.
    pub fn optimizer(&mut self, config: impl Into<Method>) -> Result<PipelineOptimizer> {
        let method = config.into();
        self.crew().all(move |worker| {
            let owned = worker.variables.owned().filter(|variable| variable.trainable);
            let named = owned.map(|v| (v.name.clone(), v.tensor.shallow_clone())).collect();
            worker.optimizer = Some(Optimizer::for_named(named, method)?);
            Ok(())
        })?;
        let learning_rate = method.learning_rate();
        Ok(PipelineOptimizer { crew: Arc::clone(&self.crew), learning_rate })
    }
}

impl PipelineOptimizer {
    /// Gives the parameters whose names satisfy `members` options and a learning rate of their own.
    ///
    /// # Errors
    /// As [`Optimizer::group`].
    pub fn group(
        &mut self,
        name: &str,
        members: impl Fn(&str) -> bool,
        config: impl Into<Method>,
    ) -> Result<()> {
        let (name, method) = (name.to_owned(), config.into());
        let crew = self.crew();
        let names = crew.all(|worker| Ok(names(optimizer(worker))))?;
        let chosen: Vec<Vec<String>> = (names.iter())
            .map(|names| names.iter().filter(|name| members(name)).cloned().collect())
            .collect();
        if chosen.iter().all(Vec::is_empty) {
            let all: Vec<String> = names.into_iter().flatten().collect();
            let first = all.first().cloned().unwrap_or_default();
            return Err(Error::EmptyGroup { group: name, parameters: all.len(), first });
        }
        let made = crew.each_or_error(chosen, move |worker, chosen| {
            if chosen.is_empty() {
                return Ok(());
            }
            let is_member = |name: &str| chosen.iter().any(|chosen| chosen == name);
            optimizer(worker).group(&name, is_member, method)
        });
        made.map(drop)
    }

    /// Updates every parameter that has a gradient, on all devices or on none.
    ///
    /// # Errors
    /// As [`Optimizer::step`].
    pub fn step(&mut self) -> Result<()> {
        let crew = self.crew();
        let plans = crew.all(|worker| optimizer(worker).prepare())?;
        crew.each_or_error(plans, |worker, plan| optimizer(worker).commit(plan))?;
        saved::spread(&crew)
    }

    /// Leaves every parameter without a gradient.
    ///
    /// # Errors
    /// When a worker has ended.
    pub fn zero_grad(&mut self) -> Result<()> {
        saved::zero_grad(&self.crew())
    }

    /// Scales all gradients, of all stages, down together where their 2-norm exceeds `max_norm`.
    /// Gives the norm that they had, for which the host waits.
    ///
    /// # Errors
    /// As [`clip_gradient_norm`](crate::optim::clip_gradient_norm).
    pub fn clip_gradient_norm(&mut self, max_norm: f64) -> Result<f64> {
        optim::check_max_norm(max_norm)?;
        let crew = self.crew();
        let norms = crew.all(|worker| {
            let gradients = gradients(optimizer(worker));
            let norm = (!gradients.is_empty()).then(|| foreach::norm(&gradients)).transpose()?;
            let parameters = optimizer(worker).parameters().count();
            Ok((parameters, norm.map(|norm| norm.f_double_value(&[])).transpose()?))
        })?;
        let parameters = norms.iter().map(|(count, _)| count).sum();
        if norms.iter().all(|(_, norm)| norm.is_none()) {
            return Err(Error::NoGradient { parameters });
        }
        let norm = norms.iter().filter_map(|(_, norm)| *norm).fold(0.0, f64::hypot);
        let factor = optim::clip_factor(norm, max_norm);
        crew.all(move |worker| Ok(foreach::scale(&gradients(optimizer(worker)), factor)?))?;
        Ok(norm)
    }

    /// The learning rate of the parameters that are in no group of their own.
    pub fn learning_rate(&self) -> f64 {
        self.learning_rate
    }

    /// Sets the learning rate of every group.
    ///
    /// # Errors
    /// When it is negative or not finite; the old ones stay then.
    pub fn set_learning_rate(&mut self, rate: f64) -> Result<()> {
        self.crew().all(move |worker| optimizer(worker).set_learning_rate(rate))?;
        self.learning_rate = rate;
        Ok(())
    }

    /// Sets the learning rate of one group.
    ///
    /// # Errors
    /// When there is no such group, or the rate is negative or not finite.
    pub fn set_group_learning_rate(&mut self, group: &str, rate: f64) -> Result<()> {
        let group = group.to_owned();
        // A worker none of whose parameters is in the group does not know it.
        let crew = self.crew();
        let jobs = (0..crew.len()).map(|_| group.clone()).collect();
        let answers = crew.each(jobs, move |worker, group| {
            optimizer(worker).set_group_learning_rate(&group, rate)
        })?;
        let (known, unknown): (Vec<_>, Vec<_>) =
            answers.into_iter().partition(|answer| !matches!(answer, Err(Error::NoGroup { .. })));
        match unknown.into_iter().next() {
            Some(error) if known.is_empty() => error,
            _ => known.into_iter().collect(),
        }
    }

    /// The whole state, as [`Optimizer::state`] gives it.
    ///
    /// # Errors
    /// When a worker has ended.
    pub fn state(&self) -> Result<(Vec<(String, Tensor)>, Metadata)> {
        let parts = self.crew().all(|worker| Ok(optimizer(worker).state()))?;
        let (tensors, metadata): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        let mut tensors: Vec<_> = tensors.into_iter().flatten().collect();
        tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
        Ok((tensors, metadata.into_iter().flatten().collect()))
    }

    /// Writes the state to a safetensors file, whole or not at all.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let (tensors, metadata) = self.state()?;
        save::write(path, &tensors, &metadata)
    }

    /// Reads the state from a file that a pipeline's optimizer, or an [`Optimizer`], has written.
    ///
    /// # Errors
    /// When the file cannot be read, or as [`Optimizer::load_state`]; nothing is changed then.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let (tensors, metadata) = save::read(path)?;
        self.load_state(&tensors, &metadata)
    }

    /// Takes over a state that [`PipelineOptimizer::state`] or [`Optimizer::state`] gave.
    ///
    /// # Errors
    /// As [`Optimizer::load_state`]; nothing is changed then.
    pub fn load_state(&mut self, tensors: &[(String, Tensor)], metadata: &Metadata) -> Result<()> {
        let crew = self.crew();
        let known = crew.all(|worker| Ok(Known::of(optimizer(worker))))?;
        let parts = portions(&known, tensors, metadata)?;
        let answers = crew.each(parts, |worker, (tensors, metadata)| {
            let before = optimizer(worker).state();
            optimizer(worker).load_state(&tensors, &metadata).map(|()| before)
        })?;
        if answers.iter().all(Result::is_ok) {
            let rates = crew.all(|worker| Ok(optimizer(worker).learning_rate()))?;
            drop(crew);
            self.learning_rate = rates[0];
            return Ok(());
        }
        // Those who could load go back to what they had.
        let (befores, errors): (Vec<_>, Vec<_>) = answers.into_iter().map(split).unzip();
        crew.each_or_error(befores, |worker, before| match before {
            Some((tensors, metadata)) => optimizer(worker).load_state(&tensors, &metadata),
            None => Ok(()),
        })?;
        errors.into_iter().flatten().next().map_or(Ok(()), Err)
    }

    fn crew(&self) -> MutexGuard<'_, Crew> {
        self.crew.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn optimizer(worker: &mut Worker) -> &mut Optimizer {
    worker.optimizer.as_mut().expect("it was made on every worker")
}

fn names(optimizer: &Optimizer) -> Vec<String> {
    optimizer.parameters().map(|(name, _)| name.to_owned()).collect()
}

fn gradients(optimizer: &Optimizer) -> Vec<Tensor> {
    let all = optimizer.parameters().map(|(_, tensor)| tensor.grad());
    all.filter(Tensor::defined).collect()
}

fn split<T>(answer: Result<T>) -> (Option<T>, Option<Error>) {
    match answer {
        Ok(value) => (Some(value), None),
        Err(error) => (None, Some(error)),
    }
}

/// What a worker's optimizer has.
struct Known {
    parameters: BTreeSet<String>,
    groups: BTreeSet<String>,
}

impl Known {
    fn of(optimizer: &Optimizer) -> Self {
        let parameters = names(optimizer).into_iter().collect();
        Self { parameters, groups: optimizer.groups().map(str::to_owned).collect() }
    }
}

type State = (Vec<(String, Tensor)>, Metadata);

/// Each worker's part of a whole state, of which nothing may be left.
fn portions(
    known: &[Known],
    tensors: &[(String, Tensor)],
    metadata: &Metadata,
) -> Result<Vec<State>> {
    let mut parts: Vec<State> = known.iter().map(|_| State::default()).collect();
    let of_parameter = |name: &str| known.iter().position(|known| known.parameters.contains(name));
    let left = |name: &str, saved: &str| {
        Err(Error::StateMismatch { name: name.into(), saved: saved.into(), here: "missing".into() })
    };
    for (name, tensor) in tensors {
        let parameter = name.rsplit_once('.').map_or("", |(parameter, _)| parameter);
        let Some(worker) = of_parameter(parameter) else { return left(name, "a tensor") };
        parts[worker].0.push((name.clone(), tensor.shallow_clone()));
    }
    for (key, text) in metadata {
        let mut put = |worker: usize| drop(parts[worker].1.insert(key.clone(), text.clone()));
        if let Some(parameter) = key.strip_prefix("parameter.") {
            let Some(worker) = of_parameter(parameter) else { return left(parameter, "there") };
            put(worker);
        } else if let Some(group) = key.strip_prefix("group.") {
            let has = |(_, known): &(usize, &Known)| known.groups.contains(group);
            let workers: Vec<_> = known.iter().enumerate().filter(has).map(|(w, _)| w).collect();
            if workers.is_empty() {
                return left(group, "a group");
            }
            workers.into_iter().for_each(put);
        } else {
            (0..known.len()).for_each(put);
        }
    }
    Ok(parts)
}
