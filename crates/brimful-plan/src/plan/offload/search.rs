//! Searches for the best way to run each stage: simulates the results of knapsacks, then small changes.

use crate::schedule::{
    Actions, CostError, DeviceId, Location, Recompute, StageId, StageLocation, Transfer,
    TransferKind, Transfers, simulate_transfers,
};

use super::super::knapsack::{self, Offer};
use super::ways::{Kept, StageStep, StageWay, WayCost};
use super::{OffloadChoice, OffloadError, OffloadRequest};

/// Number of corrections of the knapsack's capacity; a few are enough, because each corrects the whole
/// difference.
const TRIES: usize = 6;

/// Largest number of changes simulated in the end: nearly all single changes of a pipeline of 32 stages.
const CHANGES: usize = 150;

/// Factor by which a step must be shorter to be better: times are sums in different orders, so equal steps can
/// differ by rounding.
const ROUNDING: f64 = 1.0 - 1e-9;

/// Numbers of device buffers to compare: two hide the fetches, one needs less memory.
const DEVICE_BUFFERS: [usize; 2] = [2, 1];

/// Prices of host memory, tried in this order until the offloaded bytes fit the host. A price is for all bytes
/// that could be offloaded, as a multiple of the estimated time of all stages. The last price outweighs all times.
const HOST_PRICES: [f64; 5] = [0.0, 0.01, 0.1, 1.0, 100.0];

/// One way of a stage: its index in [`StageWay::ALL`], and its cost.
type WayOffer = (usize, WayCost);

/// Index of each stage's way in [`StageWay::ALL`].
type Ways = Vec<usize>;

/// Way of each stage, and the simulated step.
#[derive(Clone)]
struct Tried {
    ways: Ways,
    choice: OffloadChoice,
}

pub(super) struct Search<'a> {
    request: &'a OffloadRequest<'a>,
    placement: Vec<DeviceId>,
    /// Allowed ways of each stage with their separate costs; the leanest last.
    offers: Vec<Vec<WayOffer>>,
}

impl<'a> Search<'a> {
    pub(super) fn new(request: &'a OffloadRequest<'a>) -> Result<Self, OffloadError> {
        let devices = request.memory.len();
        let actions = request.schedule.actions(devices, request.micro_batches, Recompute::Never)?;
        request.costs.check(actions.stages())?;
        let all_at_host = vec![StageLocation::HOST; actions.stages()];
        let transfers =
            Transfers::new(&actions, &all_at_host, DEVICE_BUFFERS[0]).map_err(CostError::from)?;
        let offers =
            (0..actions.stages()).map(|j| offers(request, &actions, &transfers, j)).collect();
        Ok(Self { request, placement: actions.placement().to_vec(), offers })
    }

    pub(super) fn best(&self) -> Result<OffloadChoice, OffloadError> {
        // If the whole model fits, nothing is offloaded, whatever the estimates say.
        if self.request.location != Some(Location::Host) {
            let all = self.simulated(vec![0; self.offers.len()], 0)?;
            if self.over(&all.choice).is_none() {
                return Ok(all.choice);
            }
        }
        let [two, one] =
            DEVICE_BUFFERS.map(|device_buffers| self.with_device_buffers(device_buffers));
        match (two, one) {
            // If memory is scarce, the second buffer's bytes can be worth more elsewhere.
            (Ok(two), Ok(one)) if self.rank(&one, 0.0) < self.rank(&two, 0.0) => Ok(one.choice),
            (Ok(two), _) => Ok(two.choice),
            (Err(_), one) => one.map(|one| one.choice),
        }
    }

    fn with_device_buffers(&self, device_buffers: usize) -> Result<Tried, OffloadError> {
        let last = |offers: &Vec<WayOffer>| offers.last().map_or(0, |(number, _)| *number);
        let leanest = self.offers.iter().map(last).collect();
        let leanest = self.simulated(leanest, device_buffers)?;
        match self.device_over(&leanest.choice) {
            Some(error) => Err(error),
            None => self.beyond_leanest(&leanest),
        }
    }

    /// Returns the best ways that fit. `leanest` has ways that fit on the devices, and the number of device
    /// buffers.
    fn beyond_leanest(&self, leanest: &Tried) -> Result<Tried, OffloadError> {
        let mut least_over = None;
        for price in HOST_PRICES {
            let best = self.knapsacks(leanest, price)?;
            match self.over(&best.choice) {
                None => return self.changed_from([best, leanest.clone()]),
                Some(error) => least_over = Some(error),
            }
        }
        // The last price outweighs all times, so even the fewest possible offloaded bytes do not fit.
        Err(least_over.unwrap_or(OffloadError::HostTooSmall { needed: 0, memory: 0 }))
    }

    /// Returns the best result of several knapsacks that fits on the devices. The first capacity is a device's
    /// memory without the bytes that its stages share. The excess or the free bytes of each result correct the
    /// capacity.
    fn knapsacks(&self, leanest: &Tried, price: f64) -> Result<Tried, OffloadError> {
        let mut capacities = self.capacities(leanest);
        let mut best: Option<Tried> = None;
        for _ in 0..TRIES {
            let Some(ways) = self.picked(&capacities, price) else { break };
            let tried = self.simulated(ways, leanest.choice.transfers.device_buffers())?;
            for (capacity, used) in capacities.iter_mut().zip(self.left(&tried.choice)) {
                *capacity = capacity.saturating_add_signed(used);
            }
            let fits = self.device_over(&tried.choice).is_none();
            let is_better = |best: &Tried| self.rank(&tried, price) < self.rank(best, price);
            if fits && best.as_ref().is_none_or(is_better) {
                best = Some(tried);
            }
        }
        Ok(best.unwrap_or_else(|| leanest.clone()))
    }

    /// Improves the knapsack's ways and the leanest ways by small changes, and returns the better result.
    fn changed_from(&self, starts: [Tried; 2]) -> Result<Tried, OffloadError> {
        let [found, leanest] = starts.map(|start| self.changed(start));
        let (found, leanest) = (found?, leanest?);
        let fits = self.over(&leanest.choice).is_none();
        let is_shorter = self.rank(&leanest, 0.0) < self.rank(&found, 0.0);
        Ok(if fits && is_shorter { leanest } else { found })
    }

    /// Changes single stages, then pairs of them, the most promising first, while the simulated step gets
    /// shorter.
    fn changed(&self, mut best: Tried) -> Result<Tried, OffloadError> {
        let mut left = CHANGES;
        while let Some(better) = self.better(&best, &mut left)? {
            best = better;
        }
        Ok(best)
    }

    /// Returns the first change that fits and makes the simulated step shorter.
    fn better(&self, best: &Tried, left: &mut usize) -> Result<Option<Tried>, OffloadError> {
        for ways in self.changes(best, *left) {
            *left -= 1;
            let tried = self.simulated(ways, best.choice.transfers.device_buffers())?;
            let is_shorter = self.rank(&tried, 0.0) < self.rank(best, 0.0) * ROUNDING;
            if is_shorter && self.over(&tried.choice).is_none() {
                return Ok(Some(tried));
            }
        }
        Ok(None)
    }

    /// Returns at most `most` changes. First come changes of single stages, sorted by estimated gain. They
    /// include estimated losses, because the simulation may show a gain. Then come changes of two stages,
    /// where one frees memory for the other.
    fn changes(&self, best: &Tried, most: usize) -> Vec<Ways> {
        let mut singles = Vec::new();
        for (j, offers) in self.offers.iter().enumerate() {
            let now = self.offer(j, best.ways[j]).seconds;
            let others = offers.iter().filter(|(number, _)| *number != best.ways[j]);
            singles.extend(others.map(|(number, cost)| (now - cost.seconds, j, *number)));
        }
        singles.sort_by(|(a, ..), (b, ..)| b.total_cmp(a));
        let changed = |changes: &[(f64, usize, usize)]| {
            let mut ways = best.ways.clone();
            changes.iter().for_each(|(_, j, number)| ways[*j] = *number);
            ways
        };
        let pairs = singles.iter().enumerate().flat_map(|(at, gain)| {
            let losses = singles[at + 1..].iter().rev().filter(|loss| loss.1 != gain.1);
            losses.map(|loss| changed(&[*gain, *loss]))
        });
        singles.iter().map(|single| changed(&[*single])).chain(pairs).take(most).collect()
    }

    /// Picks a way for each stage, by a knapsack for each device.
    fn picked(&self, capacities: &[u64], price: f64) -> Option<Ways> {
        let price = price * self.price_of_a_byte();
        let priced = |(way, cost): &WayOffer| {
            let seconds = cost.seconds + price * cost.host_bytes as f64;
            Offer { way: *way, bytes: cost.device_bytes, seconds }
        };
        let offers = |j: usize| self.offers[j].iter().map(priced).collect();
        knapsack::pick_all(&self.placement, capacities.iter().copied(), offers)
    }

    /// Returns the stages of a device.
    fn stages_of(&self, device: usize) -> impl Iterator<Item = usize> {
        (0..self.placement.len()).filter(move |j| self.placement[*j].index() == device)
    }

    /// Returns the unit of prices: the estimated time of all stages, divided by all bytes that could be
    /// offloaded.
    fn price_of_a_byte(&self) -> f64 {
        let leanest = || self.offers.iter().filter_map(|offers| offers.last());
        let seconds: f64 = leanest().map(|(_, cost)| cost.seconds).sum();
        let bytes: f64 = leanest().map(|(_, cost)| cost.host_bytes as f64).sum();
        seconds / bytes.max(1.0)
    }

    /// Returns the capacity of each device's knapsack: its memory without the bytes that stages share, such
    /// as device buffers.
    fn capacities(&self, leanest: &Tried) -> Vec<u64> {
        let own = |d: usize, number: &dyn Fn(usize) -> usize| -> u64 {
            let bytes = self.stages_of(d).map(|j| self.offer(j, number(j)).device_bytes);
            bytes.fold(0, u64::saturating_add)
        };
        let capacity = |(d, memory): (usize, &Option<u64>)| match memory {
            // Without a limit, the capacity is enough for the largest ways, with their rounding.
            None => own(d, &|j| self.offers[j][0].0).saturating_mul(2),
            Some(memory) => {
                let leanest_own = own(d, &|j| leanest.ways[j]);
                let shared = leanest.choice.peak_bytes()[d].saturating_sub(leanest_own);
                memory.saturating_sub(shared)
            }
        };
        self.request.memory.iter().enumerate().map(capacity).collect()
    }

    /// Returns the free bytes of each device, negative if the step exceeds its memory; 0 without a limit.
    fn left(&self, choice: &OffloadChoice) -> Vec<i64> {
        let left = |(memory, peak): (&Option<u64>, u64)| difference(memory.unwrap_or(peak), peak);
        self.request.memory.iter().zip(choice.peak_bytes()).map(left).collect()
    }

    fn offer(&self, stage: usize, number: usize) -> WayCost {
        let offer = self.offers[stage].iter().find(|(other, _)| *other == number);
        offer.expect("ways are picked from the offers").1
    }

    /// Returns the step's time, plus a small price for transfers (among equal steps, fewer are better) and
    /// the price of host memory.
    fn rank(&self, tried: &Tried, price: f64) -> f64 {
        let offers = tried.ways.iter().enumerate().map(|(j, number)| self.offer(j, *number));
        let disturbance: f64 = offers.map(|offer| offer.disturbance).sum();
        let host = price * self.price_of_a_byte() * tried.choice.host_bytes as f64;
        tried.choice.simulation.makespan() + disturbance + host
    }

    /// Offloads both of two stages that share parameters if one is offloaded.
    fn together(&self, mut ways: Ways) -> Ways {
        let is_at_host = |way: usize| StageWay::ALL[way].weights == Location::Host;
        for &(one, other) in &self.request.ties {
            if is_at_host(ways[one]) || is_at_host(ways[other]) {
                [one, other].iter().for_each(|j| ways[*j] = StageWay::ALL[ways[*j]].at_host());
            }
        }
        ways
    }

    fn simulated(&self, ways: Ways, device_buffers: usize) -> Result<Tried, OffloadError> {
        let ways = self.together(ways);
        let OffloadRequest { costs, schedule, micro_batches, .. } = *self.request;
        let devices = self.request.memory.len();
        let mode = |way: StageWay| match way.kept {
            Kept::Activations => Recompute::Never,
            Kept::Input | Kept::Nothing => Recompute::ExceptLast,
        };
        let chosen = |j: usize| StageWay::ALL[ways[j]];
        let recompute: Vec<_> = (0..ways.len()).map(|j| mode(chosen(j))).collect();
        let locations: Vec<_> = (0..ways.len()).map(|j| chosen(j).location()).collect();
        let by_stage = |stage: StageId| recompute[stage.index()];
        let actions = schedule.actions_by_stage(devices, micro_batches, by_stage)?;
        let transfers =
            Transfers::new(&actions, &locations, device_buffers).map_err(CostError::from)?;
        let simulation = simulate_transfers(&actions, &transfers, costs)?;
        let host = (0..ways.len()).map(|j| self.offer(j, ways[j]).host_bytes);
        let host_bytes = host.fold(0, u64::saturating_add);
        let choice = OffloadChoice { recompute, actions, transfers, simulation, host_bytes };
        Ok(Tried { ways, choice })
    }

    fn over(&self, choice: &OffloadChoice) -> Option<OffloadError> {
        let memory = self.request.host_memory.filter(|memory| choice.host_bytes > *memory);
        let host = || {
            memory.map(|memory| OffloadError::HostTooSmall { needed: choice.host_bytes, memory })
        };
        self.device_over(choice).or_else(host)
    }

    fn device_over(&self, choice: &OffloadChoice) -> Option<OffloadError> {
        let mut limits = self.request.memory.iter().zip(choice.peak_bytes()).enumerate();
        let (d, needed, memory) = limits.find_map(|(d, (memory, peak))| {
            memory.filter(|memory| peak > *memory).map(|memory| (d, peak, memory))
        })?;
        let fetched = self.request.location != Some(Location::Device);
        let stage = self.largest(d, fetched);
        Some(OffloadError::DeviceTooSmall {
            device: DeviceId::at(d),
            stage,
            needed,
            memory,
            fetched,
        })
    }

    /// Returns the stage of a device that needs most memory while it computes.
    fn largest(&self, device: usize, fetched: bool) -> StageId {
        let bytes = |j: &usize| {
            let cost = &self.request.costs.stages[*j];
            let weights = if fetched { cost.fetched_bytes } else { cost.parameter_bytes };
            weights.saturating_add(cost.gradient_bytes).saturating_add(cost.activation_bytes)
        };
        StageId::at(self.stages_of(device).max_by_key(bytes).unwrap_or(0))
    }
}

fn offers(
    request: &OffloadRequest<'_>,
    actions: &Actions,
    transfers: &Transfers,
    j: usize,
) -> Vec<WayOffer> {
    let is_fetch = |one: &&Transfer| one.kind == TransferKind::Fetch && one.stage.index() == j;
    let step = StageStep {
        costs: request.costs,
        actions,
        stage: StageId::at(j),
        fetches: transfers.lists().iter().flatten().filter(is_fetch).count(),
    };
    let ways = StageWay::ALL.into_iter().enumerate();
    let allowed =
        ways.filter(|(_, way)| request.location.is_none_or(|location| location == way.weights));
    allowed.map(|(number, way)| (number, step.cost(way))).collect()
}

/// Returns the difference of two numbers, clamped to the range of `i64`.
fn difference(one: u64, other: u64) -> i64 {
    let exact = i128::from(one) - i128::from(other);
    exact.clamp(i64::MIN.into(), i64::MAX.into()) as i64
}

#[cfg(test)]
mod tests {
    use super::difference;

    #[test]
    fn a_memory_without_bounds_is_not_too_small() {
        assert_eq!(difference(u64::MAX, 1), i64::MAX);
        assert_eq!(difference(1, u64::MAX), i64::MIN);
        assert_eq!((difference(7, 9), difference(9, 7)), (-2, 2));
    }
}
