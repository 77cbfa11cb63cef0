//! Tokens a second of contestants, as bars.

use super::chart::{Bar, BarPanel};
use super::row::{ResultRow, grouped};

/// A panel for each piece of work, by its name.
pub(super) fn panels(rows: &[&ResultRow], name: fn(&ResultRow) -> String) -> Vec<BarPanel> {
    let panel = |(title, of_work): (String, Vec<&ResultRow>)| {
        let bar = |row: &&ResultRow| {
            Some(Bar::of(row.contestant(), row.side(), row.number("tokens_per_s")?))
        };
        let bars = of_work.iter().filter_map(bar).collect();
        BarPanel { title, unit: "tokens a second", bars, mark: "", is_zoomed: false }
    };
    grouped(rows, name).into_iter().map(panel).collect()
}
