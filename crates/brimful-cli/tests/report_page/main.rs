//! The report's page in a real browser.

mod chromium;
mod looks;
mod moving;
#[path = "../suite/program/mod.rs"]
mod program;

use std::path::PathBuf;

use chromium::{Browser, Look};
use program::run;

const WIDE: Look = Look { width: 1280, dark: false };
const PHONE: Look = Look { width: 360, dark: true };

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// Makes a page of simulated steps, whose times are known.
fn plan(name: &str, arguments: &str) -> PathBuf {
    let page = file(name);
    run(&format!("plan {arguments} --report {}", page.display())).success();
    page
}

/// Makes a page of a training on a CPU.
fn trained(name: &str, arguments: &str) -> PathBuf {
    let page = file(name);
    run(&format!("train --device cpu {arguments} --overwrite --report {}", page.display()))
        .success();
    page
}

/// Asserts that the page is no wider than the window.
fn assert_within(browser: &mut Browser, look: Look) {
    let width = browser.evaluate("document.documentElement.scrollWidth");
    assert!(width.as_u64() <= Some(look.width.into()), "it scrolls sideways: {width}");
}

fn assert_calm(browser: &Browser) {
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

/// Returns the point of the window that shows a device at a given time, in the first timeline.
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

fn tooltip(browser: &mut Browser) -> String {
    browser.text(
        "(() => { const t = document.getElementById('tooltip'); \
                  return t.hidden ? '' : t.innerText.replace(/\\s+/g, ' '); })()",
    )
}
