//! Effects of pointer and keys on the timeline, and its tooltips.

use serde_json::json;

use super::chromium::Browser;
use super::{WIDE, assert_calm, plan, point, tooltip};

/// Returns the range of time that the timeline shows.
fn shown(browser: &mut Browser) -> (f64, f64) {
    let end = |browser: &mut Browser, name: &str| {
        let value = browser.text(&format!("document.querySelector('canvas').dataset.{name}"));
        value.parse::<f64>().expect("a number")
    };
    (end(browser, "from"), end(browser, "to"))
}

#[test]
fn hover_shows_the_action_under_the_pointer() {
    let Some(mut browser) = Browser::start("hover") else { return };
    browser.open(&plan("hover.html", "-s 4 -m 8 --schedule 1f1b --activations 1GiB"), WIDE);
    // The first forward reaches stage 2 at time 2; stage 3 runs it at 3, starts its backward at 4, and is done at 6.
    for (device, time, words) in [
        (2.0, 2.5, "2F0 forward stage 2 micro-batch 0 took 1 began at 2 idle before 2"),
        (3.0, 5.0, "3B0 backward stage 3 micro-batch 0 took 2 began at 4 idle before 0"),
        (0.0, 0.5, "0F0 forward stage 0 micro-batch 0 took 1 began at 0"),
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
        assert!(said.starts_with(&format!("Simulated: {name}, forward")), "{key}: {said}");
    }
    browser.key("Escape", 0);
    assert_eq!(tooltip(&mut browser), "");
    assert_calm(&browser);
}
