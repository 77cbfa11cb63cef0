//! Headless Chromium, driven through its debugging pipe, with just what the tests of pages need.

use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

/// The pipe uses descriptors 3 and 4; a shell assigns ours to them.
const LAUNCH: &str = r#"exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1"#;
/// Timeout that nothing here reaches, even on a busy machine.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(120);
/// JavaScript that waits for two frames, after which everything is drawn.
const DRAWN: &str = "new Promise((done) => requestAnimationFrame(() => \
                     requestAnimationFrame(() => done(performance.now()))))";

/// A browser with one page.
pub struct Browser {
    process: Child,
    to: Option<ChildStdin>,
    from: Receiver<Value>,
    calls: u64,
    session: Option<String>,
    events: Vec<Value>,
    profile: PathBuf,
}

/// Size and colour scheme of the window.
#[derive(Clone, Copy)]
pub struct Look {
    pub width: u32,
    pub dark: bool,
}

impl Browser {
    /// Starts a browser. Without one, says so, and the test is skipped.
    pub fn start(test: &str) -> Option<Self> {
        let Some(program) = find() else {
            // Bypasses the test harness, which captures what is printed.
            let _ = writeln!(std::io::stderr(), "skipped: {test}: no chromium (make chromium)");
            return None;
        };
        let profile = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("chromium-{test}"));
        let mut process = Command::new("sh")
            .args(["-c", LAUNCH, "sh"])
            .arg(program)
            .args(["--headless", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"])
            // The browser's own sandbox does not work as root, nor in most containers.
            .arg("--no-sandbox")
            .arg(format!("--user-data-dir={}", profile.display()))
            .arg("about:blank")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("chromium");
        let (to, out) = (process.stdin.take(), process.stdout.take().expect("a pipe"));
        let (send, from) = mpsc::channel();
        thread::spawn(move || {
            let messages = BufReader::new(out).split(0).map_while(Result::ok);
            let mut read = messages.filter_map(|text| serde_json::from_slice(&text).ok());
            let _ = read.try_for_each(|message: Value| send.send(message));
        });
        let (session, events) = (None, Vec::new());
        let mut browser = Self { process, to, from, calls: 0, session, events, profile };
        browser.attach();
        Some(browser)
    }

    fn attach(&mut self) {
        let page = self.call("Target.createTarget", json!({ "url": "about:blank" }));
        let page = json!({ "targetId": page["targetId"], "flatten": true });
        let attached = self.call("Target.attachToTarget", page);
        self.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            self.call(&format!("{domain}.enable"), json!({}));
        }
    }

    /// Runs a script in every page opened from now on, before the page's own scripts.
    pub fn before_pages(&mut self, script: &str) {
        self.call("Page.addScriptToEvaluateOnNewDocument", json!({ "source": script }));
    }

    /// Opens a page, and returns the milliseconds until it was drawn.
    pub fn open(&mut self, page: &Path, look: Look) -> f64 {
        let (width, height) = (look.width, 900);
        let metrics = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500 });
        self.call("Emulation.setDeviceMetricsOverride", metrics);
        let scheme = if look.dark { "dark" } else { "light" };
        let media = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.call("Emulation.setEmulatedMedia", media);
        // Drops events of the previous page.
        self.events.retain(|event| !is_load(event));
        self.call("Page.navigate", json!({ "url": format!("file://{}", page.display()) }));
        while !self.events.iter().any(is_load) {
            let event = self.receive();
            self.events.push(event);
        }
        self.drawn()
    }

    /// Waits until everything is drawn.
    pub fn drawn(&mut self) -> f64 {
        self.evaluate(DRAWN).as_f64().expect("a time")
    }

    /// Evaluates a JavaScript expression.
    pub fn evaluate(&mut self, expression: &str) -> Value {
        let answer = self.call(
            "Runtime.evaluate",
            json!({ "expression": expression, "awaitPromise": true, "returnByValue": true }),
        );
        assert!(answer.get("exceptionDetails").is_none(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    pub fn text(&mut self, expression: &str) -> String {
        self.evaluate(expression).as_str().unwrap_or_default().to_owned()
    }

    /// Transfers, presses or releases the mouse, or turns its wheel, at a point of the window.
    pub fn mouse(&mut self, kind: &str, (x, y): (f64, f64), more: Value) {
        let mut event = json!({ "type": kind, "x": x, "y": y });
        let more = more.as_object().cloned().unwrap_or_default();
        event.as_object_mut().expect("an object").extend(more);
        self.call("Input.dispatchMouseEvent", event);
        self.drawn();
    }

    /// Presses a key; 8 is Shift among the modifiers.
    pub fn key(&mut self, key: &str, modifiers: u32) {
        // The browser itself handles Tab, which it recognises only by its key code.
        let code = if key == "Tab" { 9 } else { 0 };
        for kind in ["keyDown", "keyUp"] {
            let event = json!({ "type": kind, "key": key, "modifiers": modifiers, "windowsVirtualKeyCode": code });
            self.call("Input.dispatchKeyEvent", event);
        }
        self.drawn();
    }

    /// Returns the page's errors and messages, and all requests beyond the page itself.
    pub fn complaints(&self) -> Vec<String> {
        let is_complaint = |event: &&Value| {
            let (params, method) = (&event["params"], event["method"].as_str().unwrap_or_default());
            match method {
                "Runtime.exceptionThrown" | "Runtime.consoleAPICalled" | "Log.entryAdded" => true,
                "Network.requestWillBeSent" => {
                    let address = params["request"]["url"].as_str().unwrap_or_default();
                    !["file:", "data:"].iter().any(|scheme| address.starts_with(scheme))
                }
                _ => false,
            }
        };
        self.events.iter().filter(is_complaint).map(ToString::to_string).collect()
    }

    fn call(&mut self, method: &str, params: Value) -> Value {
        self.calls += 1;
        let mut message = json!({ "id": self.calls, "method": method, "params": params });
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let to = self.to.as_mut().expect("it is open until it is dropped");
        to.write_all(format!("{message}\0").as_bytes()).expect("chromium listens");
        loop {
            let answer = self.receive();
            if answer["id"] == self.calls {
                assert!(answer.get("error").is_none(), "{method}: {answer}");
                return answer["result"].clone();
            }
            self.events.push(answer);
        }
    }

    fn receive(&self) -> Value {
        self.from.recv_timeout(HEARTBEAT_TIMEOUT).expect("chromium answers")
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The browser exits once the pipe is closed.
        self.to = None;
        let _ = self.process.wait();
        let _ = fs::remove_dir_all(&self.profile);
    }
}

fn is_load(event: &Value) -> bool {
    event["method"] == "Page.loadEventFired"
}

/// Finds the browser: `CHROMIUM`, or the first of its usual names.
fn find() -> Option<PathBuf> {
    if let Some(named) = env::var_os("CHROMIUM") {
        return Some(named.into());
    }
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let folders: Vec<PathBuf> = env::split_paths(&env::var_os("PATH")?).collect();
    let places = folders.iter().flat_map(|folder| names.map(|name| folder.join(name)));
    places.into_iter().find(|place| place.is_file())
}
