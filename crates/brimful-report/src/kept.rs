//! Chooses the steps whose actions are kept: the first, the fastest, the slowest and the last.

use std::sync::Arc;

use super::{Compared, Record, TimelineRecord, Unit};
use brimful::Timeline;
use brimful_plan::bytes::Bytes;
use brimful_plan::schedule::{Costs, Simulation, simulate};

/// Largest number of actions in all kept steps together, which keeps the report page small.
const ACTIONS: usize = 100_000;

/// Steps whose actions are kept.
#[derive(Debug, Default)]
pub(super) struct Kept {
    first: Option<Arc<Numbered>>,
    /// Fastest and slowest step after the first, which includes all set-up.
    fastest: Option<Arc<Numbered>>,
    slowest: Option<Arc<Numbered>>,
    last: Option<Arc<Numbered>>,
}

#[derive(Debug)]
struct Numbered {
    number: usize,
    rate: f64,
    ran: Timeline,
    peaks: Vec<Option<Bytes>>,
}

impl Kept {
    /// Considers a step, and takes its actions.
    pub(super) fn look(&mut self, number: usize, step: &mut Record) {
        let Some(ran) = step.timeline.take() else { return };
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

    /// Returns the last step's actions.
    pub(super) fn last(&self) -> Option<&Timeline> {
        self.last.as_ref().map(|step| &step.ran)
    }

    /// Returns as many steps as the limit on actions allows, in the order of the run; the last one always.
    pub(super) fn compared(&self) -> Vec<Compared> {
        let roles = [
            ("last", &self.last),
            ("slowest", &self.slowest),
            ("first", &self.first),
            ("fastest", &self.fastest),
        ];
        let mut chosen: Vec<(&Numbered, Vec<&str>)> = Vec::new();
        let mut budget = ACTIONS;
        for (role, step) in roles.iter().filter_map(|(role, step)| Some((*role, step.as_ref()?))) {
            if let Some((_, roles)) = chosen.iter_mut().find(|(one, _)| one.number == step.number) {
                roles.push(role);
            } else if chosen.is_empty() || step.actions() <= budget {
                budget = budget.saturating_sub(step.actions());
                chosen.push((step, vec![role]));
            }
        }
        chosen.sort_by_key(|(step, _)| step.number);
        chosen.iter().map(|(step, roles)| step.compared(roles)).collect()
    }
}

impl Numbered {
    /// Returns the number of actions and transfers; a transfer takes as much space as an action.
    fn actions(&self) -> usize {
        let Timeline { spans, host_links, .. } = &self.ran;
        let transfers = host_links.iter().map(|host_link| host_link.transfers.len());
        spans.iter().map(Vec::len).chain(transfers).sum()
    }

    /// Returns the measured step beside a simulation of the same schedule.
    fn compared(&self, roles: &[&str]) -> Compared {
        let Timeline { actions, spans: timeline, host_links } = &self.ran;
        let compact = |step: &Simulation| TimelineRecord::new(actions, step, Unit::Seconds);
        let measured = Simulation::measured(actions, timeline, host_links, &self.peaks);
        let simulated = simulate(actions, &Costs::measured(actions, timeline)).ok();
        Compared {
            title: format!("step {}: {}", self.number, roles.join(", ")),
            measured: Some(compact(&measured)),
            simulated: simulated.as_ref().map(compact),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use brimful_plan::schedule::{Recompute, Schedule};

    /// Records a step for each of `seconds`; returns the titles of the kept steps.
    fn kept(micro_batches: usize, seconds: &[u64]) -> Vec<String> {
        let actions = Schedule::GPipe.actions(2, micro_batches, Recompute::Never);
        let actions = Arc::new(actions.expect("a schedule"));
        let step = simulate(&actions, &Costs::ticks(2)).expect("costs");
        let mut kept = Kept::default();
        for (i, seconds) in seconds.iter().enumerate() {
            let timeline = step.timeline().to_vec();
            let (actions, host_links) = (Arc::clone(&actions), Vec::new());
            let timeline = Some(Timeline { actions, spans: timeline, host_links });
            let time = Duration::from_secs(*seconds);
            kept.look(i + 1, &mut Record { samples: 1, time, timeline, ..Record::default() });
        }
        kept.compared().into_iter().map(|step| step.title).collect()
    }

    #[test]
    fn each_step_is_kept_once_with_all_that_it_is() {
        assert_eq!(kept(2, &[]), [""; 0]);
        assert_eq!(kept(2, &[9]), ["step 1: last, first"]);
        let titles = ["step 1: first", "step 2: slowest", "step 3: fastest", "step 4: last"];
        assert_eq!(kept(2, &[9, 5, 1, 2]), titles);
        assert_eq!(
            kept(2, &[9, 5, 1]),
            ["step 1: first", "step 2: slowest", "step 3: last, fastest"]
        );
    }

    #[test]
    fn many_actions_leave_space_for_fewer_steps() {
        // 2 stages, forward and backward: 40,000 actions a step.
        assert_eq!(kept(10_000, &[9, 5, 1, 2]), ["step 2: slowest", "step 4: last"]);
        assert_eq!(kept(30_000, &[9, 5, 1, 2]), ["step 4: last"]);
    }
}
