//! Tied variables of several workers, in this rank or in others: the copies' gradients go to the owner, the
//! owner's values to the copies.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use super::Ranks;
use crate::Result;
use crate::pipeline::worker::{Variable, Worker};
use crate::workers::Workers;
use crate::world::Collective;

/// Copy of a variable in another rank than its owner.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Tie {
    name: String,
    /// Workers of the copy and of the owner.
    copy: usize,
    owner: usize,
}

/// Gradient of a copy, with its owner and the variable's name.
pub(crate) type TiedGradient = (usize, String, Tensor);

/// Gradients of one worker's copies, with the variables' names.
pub(crate) type NamedGradients = Vec<(String, Tensor)>;

impl Ranks {
    /// Finds the copies of variables in all ranks, and marks the variables that have copies.
    pub(crate) fn tie(&mut self, workers: &Workers<Worker>) -> Result<()> {
        let ties = workers.all(|worker| {
            let number = worker.number;
            let tie =
                |copy: &Variable| Tie { name: copy.name.clone(), copy: number, owner: copy.owner };
            let copies = worker.variables.all().filter(|v| !worker.variables.owns(v));
            Ok(copies.map(tie).collect::<Vec<_>>())
        });
        let here = ties.map(|ties| ties.into_iter().flatten().collect());
        let all: Vec<Tie> = self.of_workers("ties", here)?;
        let names: Vec<String> = all.iter().map(|tie| tie.name.clone()).collect();
        self.has_ties = !names.is_empty();
        workers.all(move |worker| {
            worker.variables.share(&names);
            Ok(())
        })?;
        let far: Vec<Tie> =
            all.into_iter().filter(|tie| self.of(tie.copy) != self.of(tie.owner)).collect();
        self.ties = Arc::from(far);
        Ok(())
    }

    /// Returns the ties whose `end` (copy or owner) is in this rank, each with a number that no other channel has.
    fn ties_of(&self, end: fn(&Tie) -> usize) -> impl Iterator<Item = (u32, &Tie)> {
        // Numbers below 2^28 belong to channels between stages and to buckets of gradients.
        (1 << 28..).zip(&*self.ties).filter(move |(_, tie)| self.has(end(tie)))
    }
}

/// Sends the copies' gradients, given by each worker of this rank, to their owners. Returns what arrives at each
/// worker of this rank, by the worker of the copies.
pub(crate) fn gather(
    ranks: &Ranks,
    collective: &Collective,
    outgoing: Vec<Vec<TiedGradient>>,
) -> Result<Vec<Vec<NamedGradients>>> {
    let first = ranks.here().start;
    let mut arriving: Vec<Vec<NamedGradients>> = outgoing.iter().map(|_| Vec::new()).collect();
    // Sends everything, with unlimited capacity, before it receives anything: two ranks with copies of each
    // other's variables would otherwise wait for each other.
    for (number, tie) in ranks.ties_of(|tie| tie.copy) {
        let mut own = outgoing[tie.copy - first].iter();
        let gradient = own.find(|(_, name, _)| *name == tie.name);
        let gradient =
            gradient.map(|(_, _, gradient)| gradient.f_to_device(Device::Cpu)).transpose()?;
        collective.outlet(ranks.of(tie.owner), number, usize::MAX).send(vec![vec![gradient]])?;
    }
    for copies in outgoing {
        let mut by_owner: BTreeMap<usize, NamedGradients> = BTreeMap::new();
        for (owner, name, gradient) in copies.into_iter().filter(|(owner, ..)| ranks.has(*owner)) {
            by_owner.entry(owner - first).or_default().push((name, gradient));
        }
        by_owner.into_iter().for_each(|(owner, copies)| arriving[owner].push(copies));
    }
    for (number, tie) in ranks.ties_of(|tie| tie.owner) {
        let came = collective.inlet(ranks.of(tie.copy), number, 1, None)?.take()?;
        let came = came.into_iter().flatten().flatten();
        // Each copy has its own list, because two workers may have copies of the same variable.
        arriving[tie.owner - first].extend(came.map(|gradient| vec![(tie.name.clone(), gradient)]));
    }
    Ok(arriving)
}

/// Returns whether a variable that this rank owns has changed since its copies were last updated.
pub(crate) fn have_changed(workers: &Workers<Worker>) -> Result<bool> {
    let changed = workers.all(|worker| {
        worker.offload_all()?;
        Ok(worker.variables.changed().next().is_some())
    })?;
    Ok(changed.contains(&true))
}

/// Copies the owners' current values to all copies, in other ranks too. All ranks must make this call together.
pub(crate) fn spread(workers: &Workers<Worker>, ranks: &Ranks) -> Result<()> {
    if !ranks.has_ties {
        return Ok(());
    }
    // Everything that may fail is inside the closure, because the other ranks wait for this rank's vote.
    ranks.together("shared variables", |collective| {
        let changed: Vec<Vec<(String, Tensor)>> = workers.all(|worker| {
            worker.offload_all()?;
            worker.variables.changed().map(as_sent).collect()
        })?;
        let mut all: Vec<(String, Tensor)> = changed.into_iter().flatten().collect();
        all.extend(from_others(ranks, collective, &all)?);
        follow(workers, &all)
    })?;
    // Marked only when all copies are updated, so that after a failure the next step finds the changes again.
    let noted = workers.all(|worker| {
        worker.variables.followed();
        Ok(())
    });
    noted.map(drop)
}

/// Returns a variable's name and its detached tensor, which requires a gradient if the variable is trained.
fn as_sent(variable: &Variable) -> Result<(String, Tensor)> {
    let tensor = &variable.tensor;
    let sent = tensor.f_detach()?.f_set_requires_grad(tensor.requires_grad())?;
    Ok((variable.name.clone(), sent))
}

/// Sends these owners' values to all workers that have copies.
fn follow(workers: &Workers<Worker>, owners: &[(String, Tensor)]) -> Result<()> {
    if owners.is_empty() {
        return Ok(());
    }
    let jobs = (0..workers.len()).map(|_| shared(owners)).collect();
    workers.each_or_error(jobs, |worker, owners| worker.variables.follow(&owners)).map(drop)
}

/// Sends this rank's changed values to copies elsewhere, and receives those for copies here.
fn from_others(
    ranks: &Ranks,
    collective: &Collective,
    changed: &[(String, Tensor)],
) -> Result<Vec<(String, Tensor)>> {
    for (number, tie) in ranks.ties_of(|tie| tie.owner) {
        let value = changed.iter().find(|(name, _)| *name == tie.name);
        // Sends a list without a tensor if the value is unchanged, because the other rank waits for a list.
        let value = value.map(|(_, value)| on_host(value)).transpose()?;
        collective.outlet(ranks.of(tie.copy), number, usize::MAX).send(vec![vec![value]])?;
    }
    let mut came = Vec::new();
    for (number, tie) in ranks.ties_of(|tie| tie.copy) {
        let value = collective.inlet(ranks.of(tie.owner), number, 1, None)?.take()?;
        came.extend(value.into_iter().flatten().flatten().map(|value| (tie.name.clone(), value)));
    }
    Ok(came)
}

fn on_host(value: &Tensor) -> Result<Tensor> {
    let host = value.f_detach()?.f_to_device(Device::Cpu)?;
    Ok(host.f_set_requires_grad(value.requires_grad())?)
}

pub(crate) fn shared(values: &[(String, Tensor)]) -> Vec<(String, Tensor)> {
    values.iter().map(|(name, value)| (name.clone(), value.shallow_clone())).collect()
}
