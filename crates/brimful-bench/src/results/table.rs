//! A table of figures: for a terminal, as Markdown, as JSON.

use std::fmt::Write;

use serde_json::{Map, Value, json};

/// What stands in one place of a table.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum TableCell {
    Text(String),
    /// Samples a second, milliseconds, and what else is read as it comes.
    Number(Option<f64>),
    /// A whole number.
    Count(Option<f64>),
    /// One figure over another, with so many decimals.
    Ratio(Option<f64>, usize),
    /// Bytes, shown in MiB.
    Bytes(Option<f64>),
    /// A part of a whole.
    Percent(Option<f64>, usize),
}

impl TableCell {
    pub(super) fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }

    fn show(&self) -> String {
        let shown = match self {
            Self::Text(text) => Some(text.clone()),
            Self::Number(number) => number.map(number_text),
            Self::Count(count) => count.map(|count| grouped(count, 0)),
            Self::Ratio(ratio, decimals) => ratio.map(|ratio| format!("{ratio:.decimals$}")),
            Self::Bytes(bytes) => bytes.map(|bytes| grouped(bytes / f64::from(1 << 20), 1)),
            Self::Percent(part, decimals) => {
                part.map(|part| format!("{:.decimals$} %", 100.0 * part))
            }
        };
        shown.unwrap_or_else(|| "–".to_owned())
    }

    fn json(&self) -> Value {
        match self {
            Self::Text(text) => json!(text),
            Self::Number(number)
            | Self::Count(number)
            | Self::Ratio(number, _)
            | Self::Bytes(number)
            | Self::Percent(number, _) => json!(number),
        }
    }
}

/// One line: its figures; or its first cells, and why it has no others.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum TableLine {
    Figures(Vec<TableCell>),
    Failed(Vec<TableCell>, String),
}

/// A column: its key in JSON, and its heading.
pub(super) type TableColumn = (&'static str, &'static str);

/// The least widths of a growing table's columns: of names, of which most are shorter, and of figures.
const GROWING_NAME: usize = 30;
const GROWING_FIGURE: usize = 9;

/// A table's newest line, and what stands above it.
#[derive(Debug, PartialEq)]
pub(crate) struct Newest {
    pub(crate) title: String,
    pub(crate) heading: String,
    pub(crate) line: String,
}

/// A heading, columns, and lines.
#[derive(Debug, Clone)]
pub(super) struct Table {
    pub(super) title: String,
    pub(super) columns: Vec<TableColumn>,
    pub(super) lines: Vec<TableLine>,
}

impl Table {
    /// Aligned columns under a heading; the first one to the left.
    pub(super) fn for_terminal(&self) -> String {
        let lines: Vec<(Vec<String>, Option<&str>)> = self.lines.iter().map(show).collect();
        let widths: Vec<usize> = (self.columns.iter().enumerate())
            .map(|(place, (_, name))| {
                let cells = lines.iter().filter_map(|(cells, _)| cells.get(place));
                cells.map(|cell| width(cell)).chain([width(name)]).max().unwrap_or(0)
            })
            .collect();
        let names: Vec<String> = self.columns.iter().map(|(_, name)| (*name).to_owned()).collect();
        let mut out = format!("{}\n{}\n", self.title, aligned(&names, &widths));
        for (cells, error) in &lines {
            let error = error.map(|error| format!("  {error}")).unwrap_or_default();
            let _ = writeln!(out, "{}{error}", aligned(cells, &widths));
        }
        out
    }

    pub(super) fn for_markdown(&self) -> String {
        let escape = |text: String| text.replace('|', "\\|");
        let names: Vec<_> = self.columns.iter().map(|(_, name)| *name).collect();
        let rule = vec![" ---: |"; names.len() - 1].concat();
        let mut out = format!("{}\n\n| {} |\n| --- |{rule}\n", self.title, names.join(" | "));
        for line in &self.lines {
            let (mut cells, error) = show(line);
            cells.extend(error.map(str::to_owned));
            cells.resize(names.len(), String::new());
            let cells: Vec<_> = cells.into_iter().map(escape).collect();
            let _ = writeln!(out, "| {} |", cells.join(" | "));
        }
        out
    }

    /// The heading and the newest line, for a table that is shown while it grows: lines that come
    /// later have the same columns.
    pub(super) fn newest(&self) -> Newest {
        let lines: Vec<(Vec<String>, Option<&str>)> = self.lines.iter().map(show).collect();
        let first = lines.iter().filter_map(|(cells, _)| cells.first());
        let first = first.map(|cell| width(cell)).max().unwrap_or(0);
        let (mut names, mut widths, mut cells) = (Vec::new(), Vec::new(), Vec::new());
        let newest = lines.last();
        for (place, (_, name)) in self.columns.iter().enumerate() {
            if self.compares_with_nobody(place) {
                continue;
            }
            let least = if place == 0 { first.max(GROWING_NAME) } else { GROWING_FIGURE };
            names.push((*name).to_owned());
            widths.push(width(name).max(least));
            cells.extend(newest.and_then(|(cells, _)| cells.get(place)).cloned());
        }
        let error = newest.and_then(|(_, error)| *error);
        let error = error.map(|error| format!("  {error}")).unwrap_or_default();
        Newest {
            title: self.title.clone(),
            heading: aligned(&names, &widths),
            line: aligned(&cells, &widths) + &error,
        }
    }

    /// Whether a column is of ratios to somebody who has no row: a peer, in a run of ours alone.
    fn compares_with_nobody(&self, place: usize) -> bool {
        let has_figure = |line: &TableLine| {
            let (TableLine::Figures(cells) | TableLine::Failed(cells, _)) = line;
            !matches!(cells.get(place), None | Some(TableCell::Ratio(None, _)))
        };
        self.columns[place].0.starts_with("over_") && !self.lines.iter().any(has_figure)
    }

    /// An object for each line, with the table's heading in it.
    pub(super) fn rows(&self) -> Vec<Value> {
        let row = |line: &TableLine| {
            let (TableLine::Figures(cells) | TableLine::Failed(cells, _)) = line;
            let mut row = Map::from_iter([("table".to_owned(), json!(self.title))]);
            let keys = self.columns.iter().map(|(key, _)| (*key).to_owned());
            row.extend(keys.zip(cells.iter().map(TableCell::json)));
            if let TableLine::Failed(_, error) = line {
                row.insert("error".to_owned(), json!(error));
            }
            Value::Object(row)
        };
        self.lines.iter().map(row).collect()
    }
}

fn show(line: &TableLine) -> (Vec<String>, Option<&str>) {
    match line {
        TableLine::Figures(cells) => (cells.iter().map(TableCell::show).collect(), None),
        TableLine::Failed(cells, error) => {
            (cells.iter().map(TableCell::show).collect(), Some(error))
        }
    }
}

fn aligned(cells: &[String], widths: &[usize]) -> String {
    let cells = cells.iter().zip(widths).enumerate().map(|(place, (cell, &full))| {
        let space = " ".repeat(full.saturating_sub(width(cell)));
        if place == 0 { format!("  {cell}{space}") } else { format!("  {space}{cell}") }
    });
    cells.collect::<String>().trim_end().to_owned()
}

fn width(text: &str) -> usize {
    text.chars().count()
}

/// Three digits or so, and thousands apart.
pub(super) fn number_text(number: f64) -> String {
    let decimals = match number.abs() {
        0.0..1.0 => 3,
        1.0..10.0 => 2,
        10.0..100.0 => 1,
        _ => 0,
    };
    grouped(number, decimals)
}

fn grouped(number: f64, decimals: usize) -> String {
    let text = format!("{number:.decimals$}");
    let (whole, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    let digits = whole.len();
    let comma = |place: usize| place > 0 && (digits - place).is_multiple_of(3);
    let whole = whole.char_indices().flat_map(|(place, digit)| {
        let after_a_digit = place > 0 && !whole[..place].ends_with('-');
        (comma(place) && after_a_digit).then_some(',').into_iter().chain([digit])
    });
    whole.chain(rest.chars()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let figures =
            vec![TableCell::text("ours"), TableCell::Number(Some(1234.5)), TableCell::Bytes(None)];
        Table {
            title: "a model".into(),
            columns: vec![("contestant", "who"), ("samples_per_s", "samples/s"), ("peak", "MiB")],
            lines: vec![
                TableLine::Figures(figures),
                TableLine::Failed(vec![TableCell::text("peer")], "it | broke".into()),
            ],
        }
    }

    #[test]
    fn people_see_columns_and_why_a_line_has_none() {
        let expected =
            "a model\n  who   samples/s  MiB\n  ours      1,234    –\n  peer  it | broke\n";
        assert_eq!(table().for_terminal(), expected);
    }

    #[test]
    fn a_growing_table_has_its_columns_before_its_lines_and_none_for_those_who_are_not_there() {
        let mut grown = table();
        grown.columns.insert(1, ("over_peer", ": peer"));
        for line in &mut grown.lines {
            let (TableLine::Figures(cells) | TableLine::Failed(cells, _)) = line;
            cells.insert(1, TableCell::Ratio(None, 3));
        }
        let Newest { title, heading, line } = grown.newest();
        assert_eq!(title, "a model");
        let [heading_start, line_start] = [&heading, &line].map(|text| text.trim_start());
        assert_eq!(
            heading_start.split_whitespace().collect::<Vec<_>>(),
            ["who", "samples/s", "MiB"]
        );
        assert!(line_start.starts_with("peer") && line_start.ends_with("it | broke"), "{line}");
        let mut first = grown.clone();
        first.lines.truncate(1);
        assert_eq!(first.newest().heading, heading);
        assert_eq!(first.newest().line.chars().count(), heading.chars().count());
    }

    #[test]
    fn markdown_has_every_cell_of_every_line() {
        let expected = "a model\n\n| who | samples/s | MiB |\n| --- | ---: | ---: |\n\
                        | ours | 1,234 | – |\n| peer | it \\| broke |  |\n";
        assert_eq!(table().for_markdown(), expected);
    }

    #[test]
    fn json_has_the_numbers_themselves() {
        let rows = table().rows();
        assert_eq!(
            rows[0],
            json!({"table": "a model", "contestant": "ours", "samples_per_s": 1234.5, "peak": null})
        );
        assert_eq!(rows[1]["error"], "it | broke");
    }

    #[test]
    fn thousands_are_apart_and_small_numbers_keep_their_digits() {
        let shown = [1_234_567.0, -1234.0, 999.4, 12.34, 0.1234].map(number_text);
        assert_eq!(shown, ["1,234,567", "-1,234", "999", "12.3", "0.123"]);
    }
}
