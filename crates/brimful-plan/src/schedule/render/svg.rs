//! Draws simulated steps as an SVG picture to scale, several below each other for comparison.

use std::fmt::Write;

use super::super::{ActionKind, Actions, Simulation, Span, TransferKind, TransferSpan};
use crate::bytes::Bytes;

/// One schedule in the picture.
#[derive(Debug, Clone, Copy)]
pub struct Panel<'a> {
    /// Title above it.
    pub title: &'a str,
    /// Actions of the step.
    pub actions: &'a Actions,
    /// Simulation of the step.
    pub simulation: &'a Simulation,
}

const WIDTH: f64 = 1200.0;
const MARGIN: f64 = 28.0;
const LEFT: f64 = 100.0;
/// Width of the column with each device's memory.
const MEMORY: f64 = 150.0;
const ROW: f64 = 30.0;
const ROW_GAP: f64 = 5.0;
/// Height of one direction of a device's host link.
const HOST_LINK_ROW: f64 = 9.0;
const HOST_LINK_GAP: f64 = 2.0;
const HEADER: f64 = 56.0;
const TITLE: f64 = 40.0;
const AXIS: f64 = 46.0;
const LANE: f64 = WIDTH - LEFT - MEMORY - 2.0 * MARGIN;

/// Draws the panels on one scale of time, so that their lengths can be compared.
#[must_use]
pub fn svg(panels: &[Panel<'_>]) -> String {
    let picture = Picture::new(panels);
    let mut out = String::new();
    let height = HEADER + panels.iter().map(|panel| panel.height()).sum::<f64>();
    open(&mut out, height);
    legend(&mut out, panels);
    let mut top = HEADER;
    for panel in panels {
        picture.panel(&mut out, panel, top);
        top += panel.height();
    }
    out.push_str("</svg>\n");
    out
}

impl Panel<'_> {
    fn height(&self) -> f64 {
        TITLE + self.simulation.devices().len() as f64 * self.device_height() + AXIS
    }

    /// Returns the height of a device's row, including the rows of its host link if there are transfers.
    fn device_height(&self) -> f64 {
        let has_host_link = !self.simulation.host_links().is_empty();
        ROW + ROW_GAP + if has_host_link { 2.0 * (HOST_LINK_ROW + HOST_LINK_GAP) } else { 0.0 }
    }

    /// Returns the length and the label of a device's memory bar: its peak bytes if they are known, else its peak
    /// number of activations divided by the number of stages per device.
    fn memory(&self, device: usize) -> (f64, String) {
        let used = self.simulation.devices()[device];
        if used.peak_bytes > 0 {
            return (used.peak_bytes as f64, Bytes(used.peak_bytes).to_string());
        }
        let per_device = self.actions.stages() as f64 / self.actions.devices() as f64;
        let held = used.peak_held as f64 / per_device;
        (held, format!("{} A", trim(held)))
    }
}

fn open(out: &mut String, height: f64) {
    let _ = writeln!(
        out,
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="Inter, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif">
<defs><pattern id="bubble" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="6" height="6" fill="#f3f5f8"/><rect width="2" height="6" fill="#e3e8ee"/></pattern></defs>
<rect width="{WIDTH}" height="{height}" rx="12" fill="#ffffff"/>"##
    );
}

/// Draws the legend: the kinds that occur, and the bubble.
fn legend(out: &mut String, panels: &[Panel<'_>]) {
    let occurs = |kind: &ActionKind| {
        let mut spans = panels.iter().flat_map(|panel| panel.simulation.timeline()).flatten();
        spans.any(|span| span.action.kind == *kind)
    };
    let kinds = ActionKind::ALL.into_iter().filter(occurs);
    let entries = kinds.map(|kind| (color(kind, 0), kind.name()));
    let transfers = |kind: &TransferKind| {
        let host_links = panels.iter().flat_map(|panel| panel.simulation.host_links());
        host_links
            .flat_map(|host_link| &host_link.transfers)
            .any(|span| span.transfer.kind == *kind)
    };
    let transfers = TransferKind::ALL.into_iter().filter(transfers);
    let transfers = transfers.map(|kind| (transfer_color(kind).to_owned(), kind.name()));
    let mut x = MARGIN;
    for (fill, name) in entries.chain(transfers).chain([("url(#bubble)".to_owned(), "bubble")]) {
        rect(out, x, 24.0, 16.0, 16.0, &fill);
        text(out, x + 23.0, 36.5, 13.0, "#475569", "start", name);
        x += 48.0 + 7.2 * name.len() as f64;
    }
}

/// Scales shared by all panels.
struct Picture {
    makespan: f64,
    memory: f64,
}

impl Picture {
    fn new(panels: &[Panel<'_>]) -> Self {
        let makespan = panels.iter().map(|panel| panel.simulation.makespan()).fold(0.0, f64::max);
        let memories = panels.iter().flat_map(|panel| {
            (0..panel.simulation.devices().len()).map(|device| panel.memory(device).0)
        });
        // No scale is 0, to avoid divisions by zero.
        Self {
            makespan: makespan.max(f64::MIN_POSITIVE),
            memory: memories.fold(f64::MIN_POSITIVE, f64::max),
        }
    }

    fn x(&self, time: f64) -> f64 {
        MARGIN + LEFT + time / self.makespan * LANE
    }

    fn panel(&self, out: &mut String, panel: &Panel<'_>, top: f64) {
        heading(out, panel, top);
        let rows = top + TITLE;
        for (device, spans) in panel.simulation.timeline().iter().enumerate() {
            let y = rows + device as f64 * panel.device_height();
            self.row(out, panel, device, spans, y);
            if let Some(host_link) = panel.simulation.host_links().get(device) {
                self.host_link(out, panel, &host_link.transfers, y + ROW + HOST_LINK_GAP);
            }
        }
        let bottom = rows + panel.simulation.devices().len() as f64 * panel.device_height();
        self.axis(out, panel.simulation.makespan(), bottom);
    }

    fn row(&self, out: &mut String, panel: &Panel<'_>, device: usize, spans: &[Span], y: f64) {
        let word =
            if panel.actions.stages() == panel.actions.devices() { "stage" } else { "device" };
        let label = format!("{word} {device}");
        text(out, MARGIN, y + ROW / 2.0 + 5.0, 14.0, "#334155", "start", &label);
        let end = self.x(panel.simulation.makespan());
        rect(out, self.x(0.0), y, end - self.x(0.0), ROW, "url(#bubble)");
        for span in spans {
            self.span(out, panel, span, y);
        }
        self.memory(out, panel.memory(device), y);
    }

    /// Draws two thin rows: transfers to the device, and transfers to the host.
    fn host_link(&self, out: &mut String, panel: &Panel<'_>, transfers: &[TransferSpan], y: f64) {
        let end = self.x(panel.simulation.makespan());
        for (way, label) in ["in", "out"].into_iter().enumerate() {
            let y = y + way as f64 * (HOST_LINK_ROW + HOST_LINK_GAP);
            text(out, MARGIN + LEFT - 8.0, y + HOST_LINK_ROW - 1.0, 9.0, "#64748b", "end", label);
            rect(out, self.x(0.0), y, end - self.x(0.0), HOST_LINK_ROW, "#f3f5f8");
            for span in transfers.iter().filter(|span| span.transfer.kind.is_inward() == (way == 0))
            {
                let (x, end) = (self.x(span.start), self.x(span.end));
                rect(out, x, y, end - x, HOST_LINK_ROW, transfer_color(span.transfer.kind));
            }
        }
    }

    fn span(&self, out: &mut String, panel: &Panel<'_>, span: &Span, y: f64) {
        let (x, end) = (self.x(span.start), self.x(span.end));
        let turn = span.action.stage.index() / panel.actions.devices();
        // A hairline of white between neighbours, if it fits.
        let width = end - x - if end - x > 4.0 { 1.0 } else { 0.0 };
        rect(out, x, y, width, ROW, &color(span.action.kind, turn));
        let name = span.action.micro_batch.to_string();
        let size = 13.0_f64.min((width - 2.0) / (0.62 * name.len() as f64));
        if size >= 7.0 {
            let (x, y) = (x + width / 2.0, y + ROW / 2.0 + 0.36 * size);
            text(out, x, y, size, "#ffffff", "middle", &name);
        }
    }

    fn memory(&self, out: &mut String, (value, label): (f64, String), y: f64) {
        let x = WIDTH - MARGIN - MEMORY + 20.0;
        let longest = MEMORY - 20.0 - 66.0;
        let width = value / self.memory * longest;
        rect(out, x, y + 9.0, longest, ROW - 18.0, "#eef1f5");
        rect(out, x, y + 9.0, width, ROW - 18.0, "#64748b");
        text(out, x + longest + 8.0, y + ROW / 2.0 + 5.0, 13.0, "#334155", "start", &label);
    }

    fn axis(&self, out: &mut String, makespan: f64, y: f64) {
        let unit = unit(self.makespan);
        let ticks = (makespan / unit) as usize;
        for tick in 0..=ticks {
            let time = tick as f64 * unit;
            rect(out, self.x(time) - 0.5, y, 1.0, 5.0, "#94a3b8");
            text(out, self.x(time), y + 18.0, 11.0, "#64748b", "middle", &trim(time));
        }
    }
}

fn heading(out: &mut String, panel: &Panel<'_>, top: f64) {
    let y = top + 24.0;
    let _ = writeln!(
        out,
        r##"<text x="{MARGIN}" y="{y}" font-size="17" font-weight="600" fill="#0f172a">{}<tspan dx="14" font-size="13" font-weight="400" fill="#64748b">makespan {} · bubble {:.1} %</tspan></text>"##,
        escape(panel.title),
        trim(panel.simulation.makespan()),
        100.0 * panel.simulation.bubble(),
    );
    let x = WIDTH - MARGIN - MEMORY + 20.0;
    let has_bytes = panel.simulation.devices().iter().any(|device| device.peak_bytes > 0);
    let what = if has_bytes { "peak memory" } else { "activations held" };
    text(out, x, y, 13.0, "#64748b", "start", what);
}

fn rect(out: &mut String, x: f64, y: f64, width: f64, height: f64, fill: &str) {
    let radius = if width > 6.0 && height > 6.0 { 3 } else { 0 };
    let _ = writeln!(
        out,
        r#"<rect x="{x:.2}" y="{y:.2}" width="{width:.2}" height="{height:.2}" rx="{radius}" fill="{fill}"/>"#
    );
}

fn text(out: &mut String, x: f64, y: f64, size: f64, fill: &str, anchor: &str, text: &str) {
    let _ = writeln!(
        out,
        r#"<text x="{x:.2}" y="{y:.2}" font-size="{size:.1}" fill="{fill}" text-anchor="{anchor}">{}</text>"#,
        escape(text)
    );
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Returns a colour for each kind, darker for each further stage of the device.
fn color(kind: ActionKind, turn: usize) -> String {
    let [r, g, b] = match kind {
        ActionKind::Forward => [74, 125, 208],
        ActionKind::Backward => [52, 150, 104],
        ActionKind::InputGradient => [38, 148, 150],
        ActionKind::WeightGradient => [147, 108, 190],
        ActionKind::Recompute => [224, 145, 47],
    };
    let shade = 0.74_f64.powi(turn.min(4) as i32);
    let part = |value: u8| (f64::from(value) * shade) as u8;
    format!("#{:02x}{:02x}{:02x}", part(r), part(g), part(b))
}

fn transfer_color(kind: TransferKind) -> &'static str {
    match kind {
        TransferKind::Fetch | TransferKind::Release => "#7c9fd6",
        TransferKind::OffloadGradients => "#7fbf9d",
        TransferKind::FetchState => "#b79fd6",
        TransferKind::OffloadState => "#9a84b8",
        TransferKind::BoundaryOut => "#b9a37e",
        TransferKind::BoundaryIn => "#d3c19c",
        TransferKind::GradientOut => "#c98f8f",
        TransferKind::GradientIn => "#e0b3b3",
    }
}

/// Returns a round step for about ten ticks on the axis: 1, 2 or 5 times a power of ten.
fn unit(makespan: f64) -> f64 {
    let rough = makespan / 12.0;
    let power = 10.0_f64.powf(rough.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
    steps.into_iter().find(|step| *step >= rough).unwrap_or(rough)
}

/// Formats a number with at most four significant digits.
fn trim(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return "0".to_owned();
    }
    let digits = (3 - value.abs().log10().floor() as i32).clamp(0, 9) as usize;
    let text = format!("{value:.digits$}");
    if text.contains('.') {
        return text.trim_end_matches('0').trim_end_matches('.').to_owned();
    }
    text
}
