//! The report's page in a real browser: what it shows, and what pointer and keys do to it.

mod chromium;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use brimful::Bytes;
use brimful::report::{Compared, Device, Run, Timeline, Unit};
use brimful::schedule::{Costs, Recompute, Schedule, StageCost, simulate};
use chromium::{Browser, Look};
use serde_json::{Value, json};

const WIDE: Look = Look { width: 1280, dark: false };
const PHONE: Look = Look { width: 360, dark: true };

fn brimful() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_brimful"));
    command.env_remove("LD_LIBRARY_PATH").env_remove("LIBTORCH");
    command
}

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// A page of simulated steps, whose times are known.
fn plan(name: &str, arguments: &str) -> PathBuf {
    let page = file(name);
    let arguments = arguments.split(' ');
    brimful().arg("plan").args(arguments).arg("--report").arg(&page).assert().success();
    page
}

/// A page of a run in four stages.
fn trained(name: &str) -> PathBuf {
    let page = file(name);
    let arguments = "train --epochs 2 --stages 4 --schedule interleaved-2 --recompute always \
                     --batch-size 400 --stage-memory 16MiB --device cpu";
    brimful().args(arguments.split_whitespace()).arg("--report").arg(&page).assert().success();
    page
}

/// Where on the window a device is at some time, in the first timeline.
fn point(browser: &mut Browser, device: f64, time: f64) -> (f64, f64) {
    let view = browser.evaluate(
        "(() => { const c = document.querySelector('canvas'); const b = c.getBoundingClientRect(); \
         return { x: b.left, y: b.top, ...Object.fromEntries(Object.entries(c.dataset) \
         .map(([k, v]) => [k, Number(v)])) }; })()",
    );
    let of = |name: &str| view[name].as_f64().expect("a number");
    let share = (time - of("from")) / (of("to") - of("from"));
    let x = of("x") + of("left") + share * (of("right") - of("left"));
    (x, of("y") + (device + 0.4) * of("pitch"))
}

/// How much of the time the timeline shows.
fn shown(browser: &mut Browser) -> (f64, f64) {
    let end = |browser: &mut Browser, name: &str| {
        let value = browser.text(&format!("document.querySelector('canvas').dataset.{name}"));
        value.parse::<f64>().expect("a number")
    };
    (end(browser, "from"), end(browser, "to"))
}

fn tooltip(browser: &mut Browser) -> String {
    browser.text(
        "(() => { const t = document.getElementById('tooltip'); \
                  return t.hidden ? '' : t.innerText.replace(/\\s+/g, ' '); })()",
    )
}

fn assert_calm(browser: &Browser) {
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn hover_shows_the_action_under_the_pointer() {
    let Some(mut browser) = Browser::start("hover") else { return };
    browser.open(&plan("hover.html", "-s 4 -m 8 --schedule 1f1b --activations 1GiB"), WIDE);
    // The first forward reaches stage 2 at time 2; stage 3 turns it round at 3, and is done at 6.
    for (device, time, words) in [
        (2.0, 2.5, "2F0 kind forward stage 2 micro-batch 0 took 1 began at 2 idle before 2"),
        (3.0, 5.0, "3B0 kind backward stage 3 micro-batch 0 took 2 began at 4 idle before 0"),
        (0.0, 0.5, "0F0 kind forward stage 0 micro-batch 0 took 1 began at 0"),
    ] {
        let at = point(&mut browser, device, time);
        browser.mouse("mouseMoved", at, json!({}));
        let shown = tooltip(&mut browser);
        assert!(shown.starts_with(words) && shown.contains("in use 1.00 GiB"), "{shown}");
    }
    let at = point(&mut browser, 3.0, 1.5);
    browser.mouse("mouseMoved", at, json!({}));
    assert_eq!(tooltip(&mut browser), "", "idle time has no figures");
    assert_calm(&browser);
}

#[test]
fn wheel_drag_and_keys_zoom_and_move() {
    let Some(mut browser) = Browser::start("zoom") else { return };
    browser.open(&plan("zoom.html", "-s 4 -m 8 --schedule gpipe"), WIDE);
    let whole = shown(&mut browser);
    assert_eq!(whole, (0.0, 33.0));

    let at = point(&mut browser, 1.0, 10.0);
    browser.mouse("mouseWheel", at, json!({ "deltaX": 0, "deltaY": -100, "modifiers": 2 }));
    let (from, to) = shown(&mut browser);
    assert!((to - from - 22.0).abs() < 1e-9, "{from} to {to}");
    let there = point(&mut browser, 1.0, 10.0);
    assert!((there.0 - at.0).abs() < 1.0, "what is under the pointer stays there");

    let (left, right) = (point(&mut browser, 1.0, 8.0), point(&mut browser, 1.0, 12.0));
    let button = json!({ "button": "left", "clickCount": 1 });
    browser.mouse("mousePressed", left, button.clone());
    browser.mouse("mouseMoved", right, json!({ "buttons": 1 }));
    browser.mouse("mouseReleased", right, button);
    let (from, to) = shown(&mut browser);
    assert!((from - 8.0).abs() < 0.1 && (to - 12.0).abs() < 0.1, "{from} to {to}");

    browser.evaluate("document.querySelector('canvas').focus()");
    browser.key("ArrowRight", 0);
    let moved = shown(&mut browser);
    assert!((moved.0 - from - 0.2 * (to - from)).abs() < 1e-9, "{moved:?}");
    browser.key("ArrowLeft", 0);
    browser.key("+", 0);
    let closer = shown(&mut browser);
    assert!(closer.1 - closer.0 < to - from, "{closer:?}");
    browser.key("-", 0);
    browser.key("0", 0);
    assert_eq!(shown(&mut browser), whole);
    browser.evaluate("document.getElementById('zoom-in').click()");
    browser.drawn();
    assert_eq!(shown(&mut browser), (5.5, 27.5));
    assert_calm(&browser);
}

#[test]
fn keys_go_from_action_to_action_and_say_so() {
    let Some(mut browser) = Browser::start("keys") else { return };
    browser.open(&plan("keys.html", "-s 4 -m 8 --schedule 1f1b"), WIDE);
    let place = "document.activeElement.tagName + ' ' + document.activeElement.id";
    let mut visited = Vec::new();
    for _ in 0..12 {
        browser.key("Tab", 0);
        visited.push(browser.text(place));
    }
    for wanted in ["BUTTON zoom-in", "BUTTON zoom-all", "CANVAS "] {
        assert!(visited.iter().any(|place| place == wanted), "{wanted} is not in {visited:?}");
    }
    browser.evaluate("document.querySelector('canvas').focus()");
    let spoken = "document.getElementById('selected').textContent";
    for (key, name) in
        [("ArrowRight", "0F0"), ("ArrowRight", "0F1"), ("ArrowDown", "1F0"), ("ArrowLeft", "1F0")]
    {
        browser.key(key, 8);
        let said = browser.text(spoken);
        assert!(said.starts_with(&format!("Simulated: {name}, kind forward")), "{key}: {said}");
    }
    browser.key("Escape", 0);
    assert_eq!(tooltip(&mut browser), "");
    assert_calm(&browser);
}

#[test]
fn a_real_run_is_shown_whole_in_light_and_dark_wide_and_narrow() {
    let Some(mut browser) = Browser::start("real") else { return };
    let page = trained("real.html");
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
        let width = browser.evaluate("document.documentElement.scrollWidth");
        assert!(width.as_u64() <= Some(look.width.into()), "it scrolls sideways: {width}");
        let light = browser.text("getComputedStyle(document.body).backgroundColor");
        assert_eq!(light == "rgb(11, 17, 32)", look.dark, "{light}");
        assert_eq!(overlapping_texts(&mut browser), json!([]));
        browser.evaluate("for (const b of document.querySelectorAll('.choices button')) b.click()");
        browser.drawn();
        assert_eq!(overlapping_texts(&mut browser), json!([]));
    }
    assert_calm(&browser);
}

/// Pairs of words of one chart that lie on each other.
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

/// Keeps the box of every word that is drawn on a canvas since it was last cleared.
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
        // Close enough, boxes have their numbers; far away, some of the stages have their names.
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

/// A run file with one step of 100,096 actions, as it ran and simulated, with bytes.
fn many_actions(path: &Path) {
    let actions = Schedule::OneFOneB.actions(64, 782, Recompute::Never).expect("a schedule");
    let cost = |stage: usize| StageCost {
        parameter_bytes: 123_456_789,
        activation_bytes: 12_345_678 + stage as u64,
        ..StageCost::new(0.001_234_567 + stage as f64 * 1e-6, 0.001_111_111, 0.000_987_654)
    };
    let costs = Costs { stages: (0..64).map(cost).collect(), ..Costs::ticks(64) };
    let step = simulate(&actions, &costs).expect("costs");
    let timeline = Timeline::new(&actions, &step, Unit::Seconds);
    let mut run = Run::new("many actions");
    let device = |number| Device { name: format!("device {number}"), limit: Some(Bytes(1 << 30)) };
    run.devices = (0..64).map(device).collect();
    let (measured, simulated) = (Some(timeline.clone()), Some(timeline));
    run.timelines.push(Compared { title: "step 1".into(), measured, simulated });
    run.write(path).expect("written");
}

#[test]
fn a_hundred_thousand_actions_are_one_small_page() {
    let (run, page) = (file("many.json"), file("many.html"));
    many_actions(&run);
    brimful().arg("report").arg(&run).arg("-o").arg(&page).assert().success();
    let size = fs::metadata(&page).expect("a page").len();
    assert!(size < 10_000_000, "{size} bytes");
    let Some(mut browser) = Browser::start("many") else { return };
    let opened = browser.open(&page, WIDE);
    // Where people see it: times are told, not asserted.
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
