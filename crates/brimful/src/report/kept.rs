//! Which steps are kept action by action: the first, the fastest, the slowest and the last.

use std::sync::Arc;

use super::{Compared, Ran, Record, Timeline, Unit};
use crate::bytes::Bytes;
use crate::schedule::{Costs, Simulation, simulate};

/// The most actions of all kept steps together: a page of them stays a page.
const ACTIONS: usize = 100_000;

/// The steps that are kept.
#[derive(Debug, Default)]
pub(super) struct Kept {
    first: Option<Arc<Numbered>>,
    /// Of those after the first, which has everything still to set up.
    fastest: Option<Arc<Numbered>>,
    slowest: Option<Arc<Numbered>>,
    last: Option<Arc<Numbered>>,
}

#[derive(Debug)]
struct Numbered {
    number: usize,
    rate: f64,
    ran: Ran,
    peaks: Vec<Option<Bytes>>,
}

impl Kept {
    /// Looks at a step, and takes its actions.
    pub(super) fn look(&mut self, number: usize, step: &mut Record) {
        let Some(ran) = step.ran.take() else { return };
        let step = Numbered { number, rate: step.rate(), ran, peaks: step.peaks.clone() };
        let step = Arc::new(step);
        self.last = Some(Arc::clone(&step));
        if self.first.is_none() {
            self.first = Some(step);
            return;
        }
        if self.fastest.as_ref().is_none_or(|fastest| step.rate > fastest.rate) {
            self.fastest = Some(Arc::clone(&step));
        }
        if self.slowest.as_ref().is_none_or(|slowest| step.rate < slowest.rate) {
            self.slowest = Some(step);
        }
    }

    /// The last one's actions.
    pub(super) fn last(&self) -> Option<&Ran> {
        self.last.as_ref().map(|step| &step.ran)
    }

    /// As many as there is room for, in the order of the run, the last one in any case.
    pub(super) fn compared(&self) -> Vec<Compared> {
        let roles = [
            ("last", &self.last),
            ("slowest", &self.slowest),
            ("first", &self.first),
            ("fastest", &self.fastest),
        ];
        let mut chosen: Vec<(&Numbered, Vec<&str>)> = Vec::new();
        let mut room = ACTIONS;
        for (role, step) in roles.iter().filter_map(|(role, step)| Some((*role, step.as_ref()?))) {
            if let Some((_, roles)) = chosen.iter_mut().find(|(one, _)| one.number == step.number) {
                roles.push(role);
            } else if chosen.is_empty() || step.actions() <= room {
                room = room.saturating_sub(step.actions());
                chosen.push((step, vec![role]));
            }
        }
        chosen.sort_by_key(|(step, _)| step.number);
        chosen.iter().map(|(step, roles)| step.compared(roles)).collect()
    }
}

impl Numbered {
    fn actions(&self) -> usize {
        self.ran.timeline.iter().map(Vec::len).sum()
    }

    /// Beside it the same schedule on paper.
    fn compared(&self, roles: &[&str]) -> Compared {
        let Ran { actions, timeline } = &self.ran;
        let compact = |step: &Simulation| Timeline::new(actions, step, Unit::Seconds);
        let measured = Simulation::measured(actions, timeline, &self.peaks);
        let simulated = simulate(actions, &Costs::measured(actions, timeline)).ok();
        Compared {
            title: format!("step {}: {}", self.number, roles.join(", ")),
            measured: Some(compact(&measured)),
            simulated: simulated.as_ref().map(compact),
        }
    }
}
