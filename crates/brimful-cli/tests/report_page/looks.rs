//! Appearance of pages, in light and dark, wide and narrow, and with very many actions.

use std::fs;
use std::io::Write;
use std::path::Path;

use brimful::Bytes;
use brimful::schedule::{Costs, Recompute, Schedule, StageCost, simulate};
use brimful_report::{
    Compared, Decided, Device, Ended, Run, RunOutcome, Test, TimelineRecord, Unit,
};
use serde_json::{Value, json};

use super::chromium::{Browser, Look};
use super::{PHONE, WIDE, assert_calm, assert_within, file, plan, point, run, tooltip, trained};

#[test]
fn a_real_run_is_shown_whole_in_light_and_dark_wide_and_narrow() {
    let Some(mut browser) = Browser::start("real") else { return };
    // Four stages on two devices.
    let stages = "--epochs 2 --stages 2 --schedule interleaved-2 --recompute always";
    let page = trained("real.html", &format!("{stages} --batch-size 400 --memory-limit 16MiB"));
    for look in [WIDE, Look { dark: true, ..WIDE }, PHONE] {
        browser.open(&page, look);
        let visible = browser.evaluate(
            "[...document.querySelectorAll('section')].filter((s) => s.checkVisibility()).map((s) => s.id)",
        );
        let sections = ["timeline", "idle", "memory", "sizes", "progress", "settings"];
        assert_eq!(visible, json!(sections));
        assert_eq!(browser.evaluate("document.querySelectorAll('canvas').length"), 2);
        assert_eq!(browser.evaluate("document.querySelectorAll('#idle-table tbody tr').length"), 2);
        assert_eq!(browser.evaluate("document.querySelectorAll('#memory-panels svg').length"), 2);
        assert!(browser.text("document.getElementById('ended').innerText").starts_with("Finished"));
        assert_within(&mut browser, look);
        let light = browser.text("getComputedStyle(document.body).backgroundColor");
        assert_eq!(light == "rgb(11, 17, 32)", look.dark, "{light}");
        assert_eq!(overlapping_texts(&mut browser), json!([]));
        browser.evaluate("for (const b of document.querySelectorAll('.choices button')) b.click()");
        browser.drawn();
        assert_eq!(overlapping_texts(&mut browser), json!([]));
    }
    assert_calm(&browser);
}

#[test]
fn a_run_of_one_step_shows_its_loss_and_its_rate() {
    let Some(mut browser) = Browser::start("one-step") else { return };
    browser.open(&trained("one-step.html", "--max-steps 1 --micro-batch-size 64"), WIDE);
    let dots = browser.evaluate("document.querySelectorAll('#progress circle.dot').length");
    assert_eq!(dots, 3, "loss, test loss and rate");
    assert_calm(&browser);
}

#[test]
fn a_host_link_has_a_lane_each_way_and_says_what_was_waited_for() {
    let Some(mut browser) = Browser::start("host-link") else { return };
    let offloaded = "--profile tests/data/model.toml --batch-size 8 --stages 1 --optimizer-bytes 2 \
                  --num-micro-batches 2 --memory-limit 150MiB --host-memory 4GiB --host-link 200MB";
    let page = plan("host-link.html", offloaded);
    browser.before_pages(KEEP_LABELS);
    for look in [WIDE, PHONE, Look { width: 400, ..PHONE }] {
        browser.open(&page, look);
        let cut = "(() => { const t = document.getElementById('host-link'); return t.scrollWidth - t.clientWidth; })()";
        assert_eq!(browser.evaluate(cut), 0, "the table of transfers is cut");
        let plain = "document.querySelectorAll('#legend li:not(:has(.swatch))').length";
        assert_eq!(browser.evaluate(plain), 0, "an entry of the legend has no swatch");
        let rows = browser.evaluate(
            "window.labels.filter((l) => ['in', 'out', '↓', '↑'].includes(l.text)).length",
        );
        assert_eq!(rows, 2, "a lane each way");
        assert_eq!(browser.evaluate(OVERLAPS), json!([]));
        let summary = browser.text("document.getElementById('idle-summary').textContent");
        assert!(summary.contains("Compute waited") && summary.contains("for weights"), "{summary}");
        let legend = browser.text("document.getElementById('legend').textContent");
        assert!(legend.contains("weights to the device"), "{legend}");
        assert!(legend.contains("waits for weights"), "{legend}");
        let ways =
            browser.evaluate("document.querySelectorAll('#host-link-table tbody tr').length");
        assert_eq!(ways, 2);
    }
    // The first fetch ends before the first forward, which waits for it.
    browser.open(&page, WIDE);
    let at = point(&mut browser, 1.0, 1e-6);
    browser.mouse("mouseMoved", at, json!({}));
    let shown = tooltip(&mut browser);
    assert!(shown.contains("weights to the device") && shown.contains("crossed"), "{shown}");
    assert_calm(&browser);
}

/// The measured step of an offloaded run shows its transfers as a plan's page does.
#[test]
fn an_offloaded_run_shows_its_host_link_as_a_plan_does() {
    let Some(mut browser) = Browser::start("offload") else { return };
    let on_host = "--epochs 1 --offload all --num-micro-batches 4 --batch-size 400";
    let page = trained("offload.html", on_host);
    browser.before_pages(KEEP_LABELS);
    for look in [WIDE, Look { dark: true, ..WIDE }, PHONE] {
        browser.open(&page, look);
        // The simulated step, which is drawn last, has no transfers.
        let rows = "[...document.querySelectorAll('canvas')].map((c) => c.clientHeight)";
        let heights = browser.evaluate(rows);
        assert!(heights[0].as_f64() > heights[1].as_f64(), "{heights}");
        assert_eq!(browser.evaluate(OVERLAPS), json!([]));
        let summary = browser.text("document.getElementById('idle-summary').textContent");
        for said in [" for weights", " for boundaries", " for gradient memory", "as it ran"] {
            assert!(summary.contains(said), "{said}: {summary}");
        }
        let table = browser.text("document.getElementById('host-link-table').innerText");
        assert!(table.contains("device 0, in") && table.contains("iB/s"), "{table}");
        assert_eq!(browser.evaluate(SHARED_COLOURS), 0, "two kinds have one colour");
        let settings = browser.text("document.getElementById('settings-list').textContent");
        assert!(settings.contains("recomputechosen for each stage"), "{settings}");
        assert_within(&mut browser, look);
    }
    assert_calm(&browser);
}

/// Returns the pairs of texts in one chart that overlap.
fn overlapping_texts(browser: &mut Browser) -> Value {
    browser.evaluate(
        "(() => { const apart = (a, b) => a.right <= b.left || b.right <= a.left \
         || a.bottom <= b.top || b.bottom <= a.top; const pairs = []; \
         for (const svg of document.querySelectorAll('svg')) { \
         const texts = [...svg.querySelectorAll('text')].map((t) => [t.textContent, t.getBoundingClientRect()]); \
         texts.forEach(([a, x], i) => texts.slice(i + 1).forEach(([b, y]) => { \
         if (!apart(x, y)) pairs.push([a, b]); })); } return pairs; })()",
    )
}

/// Counts the kinds of actions that share a colour in the legend.
const SHARED_COLOURS: &str = "(() => {
const swatches = [...document.querySelectorAll('#legend .swatch:not(.wait, .idle, .shades)')];
const colours = swatches.map((swatch) => getComputedStyle(swatch).backgroundColor);
return colours.length - new Set(colours).size; })()";

/// Records the boxes of all texts drawn on a canvas since it was last cleared.
const KEEP_LABELS: &str = "
window.labels = [];
const P = CanvasRenderingContext2D.prototype;
const { clearRect, fillText } = P;
P.clearRect = function (...all) { window.labels = []; return clearRect.apply(this, all); };
P.fillText = function (text, x, y) {
  const { width } = this.measureText(text);
  const size = parseFloat(this.font);
  const left = this.textAlign === 'center' ? x - width / 2 : x;
  const top = this.textBaseline === 'middle' ? y - size * 0.4 : y - size * 0.8;
  window.labels.push({ text, left, right: left + width, top, bottom: top + size * 0.8 });
  return fillText.call(this, text, x, y);
};";
const OVERLAPS: &str = "(() => { const pairs = []; const l = window.labels; \
    for (let i = 0; i < l.length; i++) for (let j = i + 1; j < l.length; j++) { \
    const [a, b] = [l[i], l[j]]; if (a.left < b.right && b.left < a.right && a.top < b.bottom \
    && b.top < a.bottom) pairs.push([a.text, b.text]); } return pairs.slice(0, 5); })()";

#[test]
fn labels_of_64_stages_and_256_micro_batches_do_not_overlap() {
    let Some(mut browser) = Browser::start("labels") else { return };
    browser.before_pages(KEEP_LABELS);
    let page = plan("labels.html", "-s 64 -m 256 --schedule 1f1b");
    for look in [WIDE, PHONE] {
        browser.open(&page, look);
        for zooms in [0, 2, 3, 5] {
            let press = "document.getElementById('zoom-in').click()";
            browser.evaluate(&format!("for (let i = 0; i < {zooms}; i++) {press}"));
            browser.drawn();
            assert_eq!(browser.evaluate(OVERLAPS), json!([]), "zoomed by {zooms}");
        }
        // Zoomed in, boxes show their numbers; zoomed out, some stages show their names.
        let count = browser.evaluate("window.labels.length").as_u64();
        assert!(count > Some(200), "{count:?} labels");
        browser.evaluate("document.getElementById('zoom-all').click()");
        browser.drawn();
        let names =
            browser.evaluate("window.labels.filter((l) => /\\b0$|\\b32$/.test(l.text)).length");
        assert!(names.as_u64() >= Some(2), "{names} of the names");
    }
    assert_calm(&browser);
}

/// Makes a run of `steps` steps on 64 devices, with every oddity that a run may have.
fn odd(steps: usize) -> Run {
    let mut run = Run::new("</script><b>odd</b>");
    run.settings.push(("data".into(), "a/very/long/path/without/a/space/".repeat(8)));
    run.ended = Ended::Failed("<i>out of memory</i>".into());
    let device = |number| Device { name: format!("device {number}"), limit: Some(Bytes(1 << 40)) };
    run.devices = (0..64).map(device).collect();
    run.steps.every = 1;
    run.steps.number = (1..=steps).collect();
    run.steps.seconds = vec![1.0; steps];
    run.steps.loss = (0..steps).map(|i| (i % 7 > 0).then_some(1.0 / (1.0 + i as f64))).collect();
    run.steps.samples_per_s = vec![1e6; steps];
    run.steps.micro_batch = vec![1; steps];
    run.steps.retries = vec![2; steps];
    let peaks = (0..steps).map(|i| (i % 5 > 0).then_some(Bytes(i as u64))).collect();
    run.steps.peaks = vec![peaks; 64];
    run.tests.extend((steps > 0).then_some(Test { step: steps, loss: None, accuracy: None }));
    let outcomes = [RunOutcome::Tried, RunOutcome::Failed, RunOutcome::Chosen].into_iter().cycle();
    let decided = |(i, outcome): (usize, RunOutcome)| Decided {
        step: i + 1,
        size: 1 << (i % 20),
        outcome,
        why: "memory ran out at a larger one".into(),
        predicted: None,
        measured: None,
        available: Bytes(0),
    };
    run.decisions = outcomes.take(steps.min(1000)).enumerate().map(decided).collect();
    run
}

#[test]
fn odd_runs_are_shown_as_well_as_they_can_be() {
    let Some(mut browser) = Browser::start("odd") else { return };
    let (path, page) = (file("odd.json"), file("odd.html"));
    for steps in [0, 1, 2, 4096] {
        odd(steps).write(&path).expect("written");
        run(&format!("report {} -o {}", path.display(), page.display())).success();
        for look in [WIDE, PHONE] {
            browser.open(&page, look);
            assert_eq!(
                browser.text("document.querySelector('h1').innerText"),
                "</script><b>odd</b>"
            );
            assert!(
                browser.text("document.getElementById('ended').innerText").ends_with("memory</i>")
            );
            assert_eq!(overlapping_texts(&mut browser), json!([]), "{steps} steps");
            assert_within(&mut browser, look);
        }
    }
    for nothing in ["-s 1 -m 1", "-s 3 -m 2 --forward 0 --backward 0"] {
        browser.open(&plan("nothing.html", &format!("{nothing} --schedule gpipe")), WIDE);
        browser.evaluate("document.getElementById('zoom-in').click()");
        browser.drawn();
    }
    assert_calm(&browser);
}

/// Writes a run file with one step of 100,096 actions, measured and simulated, with bytes.
fn many_actions(path: &Path) {
    let actions = Schedule::OneFOneB.actions(64, 782, Recompute::Never).expect("a schedule");
    let cost = |stage: usize| StageCost {
        parameter_bytes: 123_456_789,
        activation_bytes: 12_345_678 + stage as u64,
        ..StageCost::new(0.001_234_567 + stage as f64 * 1e-6, 0.001_111_111, 0.000_987_654)
    };
    let costs = Costs { stages: (0..64).map(cost).collect(), ..Costs::ticks(64) };
    let step = simulate(&actions, &costs).expect("costs");
    let timeline = TimelineRecord::new(&actions, &step, Unit::Seconds);
    let mut run = Run::new("many actions");
    let device = |number| Device { name: format!("device {number}"), limit: Some(Bytes(1 << 30)) };
    run.devices = (0..64).map(device).collect();
    let (measured, simulated) = (Some(timeline.clone()), Some(timeline));
    run.timelines.push(Compared { title: "step 1".into(), measured, simulated });
    run.write(path).expect("written");
}

#[test]
fn a_hundred_thousand_actions_are_one_small_page() {
    let (path, page) = (file("many.json"), file("many.html"));
    many_actions(&path);
    run(&format!("report {} -o {}", path.display(), page.display())).success();
    let size = fs::metadata(&page).expect("a page").len();
    assert!(size < 10_000_000, "{size} bytes");
    let Some(mut browser) = Browser::start("many") else { return };
    let opened = browser.open(&page, WIDE);
    // Times are printed for people, not asserted.
    let _ = writeln!(
        std::io::stderr(),
        "a page of 2 × 100,096 actions, {:.1} MB, was drawn {opened:.0} ms after it was opened",
        size as f64 / 1e6
    );
    let at = point(&mut browser, 5.0, 0.5);
    browser.mouse("mouseMoved", at, json!({}));
    assert!(tooltip(&mut browser).contains("stage 5 micro-batch"));
    assert_calm(&browser);
}
