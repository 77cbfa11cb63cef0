//! SVG chart of horizontal bars, with the single measurements on them.

use std::fmt::Write;

use super::row::{ResultRow, Side};

/// Bars that are compared with each other.
#[derive(Debug, Clone, Default)]
pub(super) struct BarPanel {
    pub(super) title: String,
    /// Unit of the figures.
    pub(super) unit: &'static str,
    pub(super) bars: Vec<Bar>,
    /// Meaning of the marks on bars.
    pub(super) mark: &'static str,
    /// True if figures differ too little to see from zero on: then only their range is drawn.
    pub(super) is_zoomed: bool,
}

/// Bar of a figure.
#[derive(Debug, Clone)]
pub(super) struct Bar {
    pub(super) label: String,
    pub(super) side: Side,
    /// Figure, or the reason why there is none.
    pub(super) value: Result<f64, String>,
    /// Measurements that it comes from.
    pub(super) points: Vec<f64>,
    /// Reference value.
    pub(super) mark: Option<f64>,
}

impl Bar {
    /// Returns the speed of a row, with its steps.
    pub(super) fn of_speed(row: &ResultRow, label: String) -> Self {
        let value = row.figure("samples_per_s");
        Self { label, side: row.side(), value, points: row.speeds(), mark: None }
    }

    /// Returns a figure without measurements.
    pub(super) fn of(label: impl Into<String>, side: Side, value: f64) -> Self {
        Self { label: label.into(), side, value: Ok(value), points: Vec::new(), mark: None }
    }

    /// Returns a contestant's figure under this key, if it has one.
    pub(super) fn under(key: &str, row: &ResultRow) -> Option<Self> {
        row.number(key).map(|figure| Self::of(row.contestant(), row.side(), figure))
    }
}

const WIDTH: f64 = 1080.0;
const MARGIN: f64 = 28.0;
const LABEL: f64 = 360.0;
/// Width of the column of figures.
const FIGURE: f64 = 84.0;
const LANE: f64 = WIDTH - 2.0 * MARGIN - LABEL - FIGURE;
const ROW: f64 = 22.0;
const ROW_GAP: f64 = 6.0;
const HEADER: f64 = 48.0;
const TITLE: f64 = 40.0;
const PANEL_GAP: f64 = 18.0;

/// Colours by meaning, for light and for dark pages.
const STYLE: &str = "\
.card{fill:#ffffff}.ink{fill:#0f172a}.soft{fill:#475569}.faint{fill:#64748b}.lane{fill:#f3f5f8}\
.ours{fill:#4a7dd0}.peer{fill:#94a3b8}.reference{fill:#cbd5e1}.mark{fill:#e0912f}\
.point{fill:#0f172a;opacity:.4}.fail{fill:#b4412f}\
@media(prefers-color-scheme:dark){.card{fill:#161b22}.ink{fill:#e6edf3}.soft{fill:#c3ccd6}\
.faint{fill:#9aa6b2}.lane{fill:#20272f}.ours{fill:#5b8fe3}.peer{fill:#6e7b8b}\
.reference{fill:#45505c}.point{fill:#ffffff}.fail{fill:#f08a75}}";

/// Draws the panels below each other, each on its own scale.
pub(super) fn svg(panels: &[BarPanel]) -> String {
    let height = HEADER + panels.iter().map(BarPanel::height).sum::<f64>();
    let mut out = format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="Inter, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif">
<style>{STYLE}</style>
<rect width="{WIDTH}" height="{height}" rx="12" class="card"/>
"#
    );
    legend(&mut out, panels);
    let mut top = HEADER;
    for panel in panels {
        panel.draw(&mut out, top);
        top += panel.height();
    }
    out.push_str("</svg>\n");
    out
}

/// Draws the legend of the colours that occur.
fn legend(out: &mut String, panels: &[BarPanel]) {
    let bars = || panels.iter().flat_map(|panel| &panel.bars);
    let sides = [(Side::Ours, "brimful"), (Side::Peer, "peer"), (Side::Reference, "reference")];
    let occurring = sides.into_iter().filter(|(side, _)| bars().any(|bar| bar.side == *side));
    let mut entries: Vec<(&str, &str)> =
        occurring.map(|(side, name)| (class(side), name)).collect();
    let marked = panels.iter().filter(|panel| panel.bars.iter().any(|bar| bar.mark.is_some()));
    let mut marks: Vec<&str> = marked.map(|panel| panel.mark).collect();
    marks.dedup();
    entries.extend(marks.into_iter().map(|name| ("mark", name)));
    let mut x = MARGIN;
    for (class, name) in entries {
        let width = if class == "mark" { 3.0 } else { 14.0 };
        rect(out, (x, 22.0), (width, 14.0), class);
        text(out, (x + width + 7.0, 34.0), 13.0, "soft", "start", name);
        x += width + 30.0 + 7.2 * name.len() as f64;
    }
    if bars().any(|bar| bar.points.len() > 1) {
        point(out, x + 3.0, 29.0);
        text(out, (x + 12.0, 34.0), 13.0, "soft", "start", "single measurement");
    }
}

impl BarPanel {
    fn height(&self) -> f64 {
        TITLE + self.bars.len() as f64 * (ROW + ROW_GAP) + PANEL_GAP
    }

    fn draw(&self, out: &mut String, top: f64) {
        let y = top + 24.0;
        let _ = writeln!(
            out,
            r#"<text x="{MARGIN}" y="{y}" font-size="16" font-weight="600" class="ink">{}<tspan dx="12" font-size="13" font-weight="400" class="faint">{}</tspan></text>"#,
            escape(&self.title),
            escape(self.unit)
        );
        let scale = BarScale::new(self);
        for (place, bar) in self.bars.iter().enumerate() {
            let y = top + TITLE + place as f64 * (ROW + ROW_GAP);
            text(out, (MARGIN, y + 15.5), 13.0, "soft", "start", &shortened(&bar.label, 54));
            match &bar.value {
                Ok(value) => self.figure(out, &scale, bar, *value, y),
                Err(error) => {
                    let at = (MARGIN + LABEL, y + 15.5);
                    text(out, at, 13.0, "fail", "start", &shortened(error, 90));
                }
            }
        }
    }

    fn figure(&self, out: &mut String, scale: &BarScale, bar: &Bar, value: f64, y: f64) {
        let left = MARGIN + LABEL;
        rect(out, (left, y), (LANE, ROW), "lane");
        if self.is_zoomed {
            rect(out, (scale.x(value) - 2.0, y + 2.0), (4.0, ROW - 4.0), class(bar.side));
        } else {
            rect(out, (left, y), (scale.x(value) - left, ROW), class(bar.side));
        }
        for &measured in bar.points.iter().filter(|_| bar.points.len() > 1) {
            point(out, scale.x(measured), y + ROW / 2.0);
        }
        if let Some(mark) = bar.mark {
            rect(out, (scale.x(mark) - 1.5, y - 2.0), (3.0, ROW + 4.0), "mark");
        }
        let at = (WIDTH - MARGIN, y + 15.5);
        text(out, at, 13.0, "ink", "end", &super::table::number_text(value));
    }
}

/// Scale that maps figures to positions in a lane.
struct BarScale {
    from: f64,
    to: f64,
}

impl BarScale {
    fn new(panel: &BarPanel) -> Self {
        let figures = panel.bars.iter().flat_map(|bar| {
            let value = bar.value.as_ref().ok().copied();
            bar.points.iter().copied().chain(value).chain(bar.mark)
        });
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for figure in figures {
            (low, high) = (low.min(figure), high.max(figure));
        }
        if !panel.is_zoomed {
            return Self { from: 0.0, to: high.max(f64::MIN_POSITIVE) };
        }
        let edge = f64::max((high - low) / 20.0, high.abs() * 1e-6 + f64::MIN_POSITIVE);
        Self { from: low - edge, to: high + edge }
    }

    fn x(&self, figure: f64) -> f64 {
        MARGIN + LABEL + (figure - self.from) / (self.to - self.from) * LANE
    }
}

fn class(side: Side) -> &'static str {
    match side {
        Side::Ours => "ours",
        Side::Peer => "peer",
        Side::Reference => "reference",
    }
}

fn rect(out: &mut String, (x, y): (f64, f64), (width, height): (f64, f64), class: &str) {
    let radius = if width > 6.0 { 3 } else { 0 };
    let width = width.max(0.0);
    let _ = writeln!(
        out,
        r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" rx="{radius}" class="{class}"/>"#
    );
}

fn point(out: &mut String, x: f64, y: f64) {
    let _ = writeln!(out, r#"<circle cx="{x:.1}" cy="{y:.1}" r="3" class="point"/>"#);
}

fn text(out: &mut String, (x, y): (f64, f64), size: f64, class: &str, anchor: &str, text: &str) {
    let _ = writeln!(
        out,
        r#"<text x="{x:.1}" y="{y:.1}" font-size="{size}" class="{class}" text-anchor="{anchor}">{}</text>"#,
        escape(text)
    );
}

/// Truncates a text that is too long.
fn shortened(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most - 1).chain(['…']).collect()
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_for_each_figure_and_an_error_where_there_is_none() {
        let bars = vec![
            Bar { points: vec![9.0, 11.0], ..Bar::of("ours", Side::Ours, 10.0) },
            Bar { value: Err("no <such> card".into()), ..Bar::of("theirs", Side::Peer, 0.0) },
        ];
        let panel = BarPanel { title: "a & b".into(), bars, ..BarPanel::default() };
        let picture = svg(&[panel]);
        assert!(picture.contains("a &amp; b") && picture.contains("no &lt;such&gt; card"));
        // One on the bar for each measurement, and one in the legend.
        assert_eq!(picture.matches("<circle").count(), 3);
        assert_eq!(picture.matches(r#"class="ours""#).count(), 2);
    }

    #[test]
    fn a_zoomed_scale_holds_every_figure_and_no_more_than_needed() {
        let bars = [0.912, 0.908].map(|value| Bar::of("", Side::Ours, value)).into();
        let scale = BarScale::new(&BarPanel { bars, is_zoomed: true, ..BarPanel::default() });
        assert!(scale.from < 0.908 && scale.from > 0.9 && scale.to > 0.912 && scale.to < 0.92);
    }
}
