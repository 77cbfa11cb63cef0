//! Activations held at a barrier stay on the device while they fit there; the rest is on the host.

use brimful::memory::Arena;
use brimful::schedule::Recompute;
use brimful::{DeviceSpec, Layers, Loss, MicroBatches, Pipeline, Result, StepReport};
use brimful_plan::schedule::{TransferKind, TransferSpan};
use tch::{Kind, Tensor};

use super::exact::{EXACT, four_norms, mix, norm};
use crate::support::{Named, assert_within, copies, numbers};

const SIZE: usize = 4;

/// Device and host arenas, and a pipeline that computes on the device.
struct Site {
    device: Arena,
    host: Arena,
    pipe: Pipeline,
}

impl Site {
    fn new(recompute: Recompute) -> Self {
        Self::of(four_norms(), recompute)
    }

    fn of(layers: Layers, recompute: Recompute) -> Self {
        let (device, host) = (Arena::new("device"), Arena::new("host"));
        let spec = DeviceSpec::cpu().threads(1).arena(device.clone());
        let pipe = Pipeline::builder(layers).devices([spec]).host(host.clone()).kind(Kind::Double);
        let pipe = pipe.recompute(recompute).micro_batches(MicroBatches::Samples(SIZE));
        tch::manual_seed(3);
        Self { pipe: pipe.build().expect("a pipeline"), device, host }
    }

    /// Limits the device to this many bytes.
    fn limited(recompute: Recompute, bytes: u64) -> Self {
        let site = Self::new(recompute);
        site.device.set_limit(Some(bytes)).expect("a limit");
        site
    }

    /// Runs three steps of this many micro-batches; each uses what the previous one measured. Returns the peaks
    /// of device and host in the last.
    fn steps(&mut self, micro_batches: i64) -> (u64, u64) {
        for _ in 0..3 {
            self.device.reset_peak();
            self.host.reset_peak();
            self.step(micro_batches);
        }
        (self.device.peak(), self.host.peak())
    }

    fn step(&mut self, micro_batches: i64) -> StepReport {
        self.try_step(micro_batches).expect("a step")
    }

    fn try_step(&mut self, micro_batches: i64) -> Result<StepReport> {
        let x = numbers(&[micro_batches * SIZE as i64, 3, 16, 16], 7);
        let square = |out: Tensor, _: &Tensor| Loss::mean(out.square().mean(Kind::Double));
        self.pipe.zero_grad().expect("no gradients");
        self.pipe.backward(&x, &x, square)
    }

    fn results(&self) -> Named {
        let gradients = self.pipe.gradients().expect("gradients").into_iter();
        let gradients = gradients.map(|(name, value)| (format!("gradient of {name}"), value));
        gradients.chain(self.pipe.variables().expect("variables")).collect()
    }
}

#[test]
fn within_a_limit_memory_does_not_grow_with_the_mini_batch() {
    for recompute in [Recompute::Never, Recompute::ExceptLast, Recompute::Always] {
        let (few, _) = Site::new(recompute).steps(4);
        let mut free = Site::new(recompute);
        let (all, _) = free.steps(64);
        let limit = few + few / 4;
        assert!(all > 3 * limit, "{recompute}: {all} bytes with no limit, {few} for few samples");
        let mut limited = Site::limited(recompute, limit);
        let (most, on_host) = limited.steps(64);
        assert!(most <= limit && on_host > 0, "{recompute}: {most} bytes here, {on_host} there");
        // The device is used: at least half of the bytes beside the model and its work.
        assert!(2 * most > limit, "{recompute}: {most} bytes of {limit}");
        assert_within(&limited.results(), &free.results(), 1e-12, &format!("{recompute}"));
    }
}

#[test]
fn within_a_limit_each_input_goes_to_the_host_once_and_nothing_else_does() {
    const COUNT: u64 = 16;
    const MEETINGS: u64 = 4;
    let (few, _) = Site::new(Recompute::Never).steps(4);
    let mut limited = Site::limited(Recompute::Never, few + few / 4);
    let mut copies = Vec::new();
    for _ in 0..2 {
        let before = limited.host.allocations();
        limited.steps(COUNT as i64);
        copies.push(limited.host.allocations() - before);
    }
    // Three steps after the measurement: stage inputs are offloaded, but neither outputs nor gradients.
    assert!(copies[1] > 0 && copies[1] <= 3 * COUNT * MEETINGS, "{copies:?} copies");
    assert!(copies[0] > copies[1], "{copies:?}: the first step sends all");
}

/// Blocks of two BatchNorms and a shortcut, which goes through the layers between or directly to the second.
fn blocks(straight: bool) -> Layers {
    let block = |_| {
        let layers = Layers::new().stash("entry").add("one", mix(4));
        let layers = layers.add_norm("norm", |p| norm(p, 2, EXACT).with_relu()).add("two", mix(4));
        if straight {
            return layers.pop_norm("sum", "entry", |p| {
                let norm = norm(p, 2, EXACT);
                move |x, entry, train| norm.forward_add_relu(x, entry, train)
            });
        }
        let both =
            |x: &[Tensor], entry: &[Tensor]| vec![x[0].shallow_clone(), entry[0].shallow_clone()];
        layers.pop_many("both", "entry", both).add_norm_many("sum", |p| {
            let norm = norm(p, 2, EXACT);
            move |x, train| vec![norm.forward_add_relu(&x[0], &x[1], train)]
        })
    };
    let first = Layers::new().add("in", mix(3));
    (0..3)
        .map(block)
        .enumerate()
        .fold(first, |layers, (number, block)| layers.add_layers(format!("block{number}"), block))
}

#[test]
fn a_shortcut_that_goes_straight_to_its_norm_waits_once() {
    let (few, _) = Site::of(blocks(false), Recompute::Never).steps(4);
    let sites = [false, true].map(|straight| Site::of(blocks(straight), Recompute::Never));
    let first = copies(&sites[0].pipe.variables().expect("variables"));
    let [(handed_on, expected), (straight, results)] = sites.map(|mut site| {
        site.pipe.set_variables(copies(&first)).expect("values");
        site.device.set_limit(Some(few + few / 4)).expect("a limit");
        site.steps(16);
        let before = site.host.allocations();
        site.steps(16);
        (site.host.allocations() - before, site.results())
    });
    assert!(0 < straight && straight < handed_on, "{straight} copies, and {handed_on}");
    assert_within(&results, &expected, 1e-12, "the same");
}

#[test]
fn transfers_for_want_of_memory_is_timed_as_what_was_planned_is() {
    const COUNT: i64 = 16;
    let (few, _) = Site::new(Recompute::Never).steps(4);
    let mut limited = Site::limited(Recompute::Never, few + few / 4);
    limited.pipe.trace_transfers(true);
    // The first step also offloads gradients, the second only stage inputs.
    for sends_gradients in [true, false] {
        let before = limited.host.allocations();
        let timeline = limited.step(COUNT).timeline.expect("a pipeline's");
        let sent = limited.host.allocations() - before;
        let transfers = &timeline.host_links[0].transfers;
        let out = || transfers.iter().filter(|span| span.transfer.kind.is_outward());
        assert_eq!(out().count() as u64, sent, "each is one tensor");
        let gradients = out().filter(|span| span.transfer.kind == TransferKind::GradientOut);
        assert_eq!(gradients.count() > 0, sends_gradients);
        for back in transfers.iter().filter(|span| span.transfer.kind.is_inward()) {
            let is_it = |kind| match kind {
                TransferKind::BoundaryOut => back.transfer.kind == TransferKind::BoundaryIn,
                _ => back.transfer.kind == TransferKind::GradientIn,
            };
            let same = |a: &&TransferSpan| {
                let (a, b) = (a.transfer, back.transfer);
                (a.stage, a.micro_batch) == (b.stage, b.micro_batch) && is_it(a.kind)
            };
            let left = out().find(same).expect("what comes has left");
            assert!(left.end <= back.start && left.bytes == back.bytes, "{}", back.transfer);
        }
    }
}

#[test]
fn what_fits_stays_on_the_device() {
    let mut free = Site::new(Recompute::Never);
    let (all, _) = free.steps(16);
    let mut site = Site::limited(Recompute::Never, 4 * all);
    let (most, on_host) = site.steps(16);
    assert_eq!(on_host, 0, "{most} bytes on the device");
    assert_within(&site.results(), &free.results(), 1e-12, "the same");
    // No activations were recomputed, so as much is kept as without a limit.
    assert!(most >= all, "{most} bytes with much room, {all} with no limit");
}

#[test]
fn larger_micro_batches_are_learnt_of_anew() {
    let mut site = Site::new(Recompute::Never);
    let (few, _) = Site::new(Recompute::Never).steps(4);
    site.device.set_limit(Some(2 * few)).expect("a limit");
    site.steps(64);
    site.pipe.set_micro_batches(MicroBatches::Samples(2 * SIZE));
    let (most, on_host) = site.steps(64);
    assert!(most <= 2 * few && on_host > 0, "{most} bytes here, {on_host} there");
}

/// Simulates an allocator that cannot join its free blocks.
#[test]
fn a_step_that_runs_out_of_memory_with_something_waiting_runs_again_with_nothing() {
    let mut free = Site::new(Recompute::Never);
    (0..5).for_each(|_| drop(free.step(16)));
    let (few, _) = Site::new(Recompute::Never).steps(4);
    for nth in [50, 100, 200] {
        let mut site = Site::limited(Recompute::Never, 2 * few);
        site.steps(16);
        let used = site.device.peak();
        let sent = |site: &mut Site, retries| {
            let before = site.host.allocations();
            assert_eq!(site.step(16).retries, retries, "allocation {nth}");
            site.host.allocations() - before
        };
        let usual = sent(&mut site, 0);
        site.device.fail_nth_allocation(nth);
        let sent_after = sent(&mut site, 1);
        assert!(sent_after > usual, "{nth}: {sent_after} copies to the host, usually {usual}");
        assert_within(&site.results(), &free.results(), 1e-12, &format!("allocation {nth}"));
        // From then on more memory is left free.
        let (later, _) = site.steps(16);
        assert!(later < used, "{nth}: {later} bytes afterwards, {used} before");
    }
    // Without held activations there is no memory to release.
    let mut site = Site::limited(Recompute::Never, 2 * few);
    site.device.fail_nth_allocation(50);
    let error = site.try_step(16).expect_err("the first step leaves nothing here");
    assert!(error.out_of_memory().is_some(), "{error}");
}
