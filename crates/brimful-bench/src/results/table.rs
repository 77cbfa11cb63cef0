//! Table of figures: for a terminal, as Markdown, as JSON.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use super::row::ResultRow;

/// Format of a column's cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Text,
    /// Samples per second, milliseconds and other plain numbers.
    Number,
    /// Whole number.
    Count,
    /// One figure over another, with this many decimals.
    Ratio(usize),
    /// Bytes, shown in MiB.
    Bytes,
    /// Percentage, with this many decimals.
    Percent(usize),
}

/// Cell of a table: a text, a figure, or null if there is none.
pub(super) type TableCell = Value;

impl Form {
    /// Returns the row's value under this key.
    pub(super) fn own(self, row: &ResultRow, key: &str) -> TableCell {
        match self {
            Self::Text => row.text(key).into(),
            _ => row.number(key).into(),
        }
    }

    fn show(self, cell: &TableCell) -> String {
        if let Some(text) = cell.as_str() {
            return text.to_owned();
        }
        let Some(figure) = cell.as_f64() else { return "–".to_owned() };
        match self {
            Self::Text | Self::Number => number_text(figure),
            Self::Count => grouped(figure, 0),
            Self::Ratio(decimals) => format!("{figure:.decimals$}"),
            Self::Bytes => grouped(figure / f64::from(1 << 20), 1),
            Self::Percent(decimals) => format!("{:.decimals$} %", 100.0 * figure),
        }
    }
}

/// Line of a table: its cells, and an error in place of missing ones.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TableLine {
    pub(super) cells: Vec<TableCell>,
    pub(super) error: Option<String>,
}

impl TableLine {
    /// Formats its cells, and the text that follows them on a terminal.
    fn show(&self, columns: &[TableColumn]) -> (Vec<String>, String) {
        let cells = self.cells.iter().zip(columns).map(|(cell, (.., form))| form.show(cell));
        let error = self.error.as_ref().map(|error| format!("  {error}"));
        (cells.collect(), error.unwrap_or_default())
    }
}

/// Column: its key in JSON and in rows, its heading, and its format.
pub(super) type TableColumn = (&'static str, &'static str, Form);

/// Minimum widths of the columns of a growing table: of names, and of figures. Most names are shorter.
const GROWING_NAME: usize = 30;
const GROWING_FIGURE: usize = 9;

/// Newest line of a table, and its headings.
#[derive(Debug, PartialEq)]
pub(crate) struct Newest {
    pub(crate) title: String,
    pub(crate) heading: String,
    pub(crate) line: String,
}

/// Heading, columns, and lines.
#[derive(Debug, Clone)]
pub(super) struct Table {
    pub(super) title: String,
    pub(super) columns: Vec<TableColumn>,
    pub(super) lines: Vec<TableLine>,
}

impl Table {
    /// Formats aligned columns under a heading; the first one is left-aligned.
    pub(super) fn for_terminal(&self) -> String {
        let lines: Vec<_> = self.lines.iter().map(|line| line.show(&self.columns)).collect();
        let widths: Vec<usize> = (self.columns.iter().enumerate())
            .map(|(place, (_, name, _))| {
                let cells = lines.iter().filter_map(|(cells, _)| cells.get(place));
                cells.map(|cell| width(cell)).chain([width(name)]).max().unwrap_or(0)
            })
            .collect();
        let names: Vec<_> = self.columns.iter().map(|(_, name, _)| (*name).to_owned()).collect();
        let mut out = format!("{}\n{}\n", self.title, aligned(&names, &widths));
        for (cells, error) in &lines {
            let _ = writeln!(out, "{}{error}", aligned(cells, &widths));
        }
        out
    }

    pub(super) fn for_markdown(&self) -> String {
        let escape = |text: String| text.replace('|', "\\|");
        let names: Vec<_> = self.columns.iter().map(|(_, name, _)| *name).collect();
        let rule = vec![" ---: |"; names.len() - 1].concat();
        let mut out = format!("{}\n\n| {} |\n| --- |{rule}\n", self.title, names.join(" | "));
        for line in &self.lines {
            let (mut cells, _) = line.show(&self.columns);
            cells.extend(line.error.clone());
            cells.resize(names.len(), String::new());
            let cells: Vec<_> = cells.into_iter().map(escape).collect();
            let _ = writeln!(out, "| {} |", cells.join(" | "));
        }
        out
    }

    /// Returns the headings and the newest line, for a table that is printed while it grows. The columns stay the
    /// same for later lines.
    pub(super) fn newest(&self) -> Newest {
        let lines: Vec<_> = self.lines.iter().map(|line| line.show(&self.columns)).collect();
        let first = lines.iter().filter_map(|(cells, _)| cells.first());
        let first = first.map(|cell| width(cell)).max().unwrap_or(0);
        let (mut names, mut widths, mut cells) = (Vec::new(), Vec::new(), Vec::new());
        let (newest, error) = lines.last().cloned().unwrap_or_default();
        for (place, (_, name, _)) in self.columns.iter().enumerate() {
            if self.compares_with_nobody(place) {
                continue;
            }
            let least = if place == 0 { first.max(GROWING_NAME) } else { GROWING_FIGURE };
            names.push((*name).to_owned());
            widths.push(width(name).max(least));
            cells.extend(newest.get(place).cloned());
        }
        Newest {
            title: self.title.clone(),
            heading: aligned(&names, &widths),
            line: aligned(&cells, &widths) + &error,
        }
    }

    /// Returns whether a column holds ratios to a peer that has no row, as in a run of ours alone.
    fn compares_with_nobody(&self, place: usize) -> bool {
        let has_figure =
            |line: &TableLine| line.cells.get(place).is_some_and(|cell| !cell.is_null());
        self.columns[place].0.starts_with("over_") && !self.lines.iter().any(has_figure)
    }

    /// Returns an object for each line, with the table's heading in it.
    pub(super) fn rows(&self) -> Vec<Value> {
        let row = |line: &TableLine| {
            let mut row = Map::from_iter([("table".to_owned(), json!(self.title))]);
            let keys = self.columns.iter().map(|(key, ..)| (*key).to_owned());
            row.extend(keys.zip(line.cells.iter().cloned()));
            row.extend(line.error.iter().map(|error| ("error".to_owned(), json!(error))));
            Value::Object(row)
        };
        self.lines.iter().map(row).collect()
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

/// Formats about three digits, with thousands separated.
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
        let ours = vec!["ours".into(), 1234.5.into(), Value::Null];
        let peer = vec!["peer".into()];
        Table {
            title: "a model".into(),
            columns: vec![
                ("contestant", "who", Form::Text),
                ("samples_per_s", "samples/s", Form::Number),
                ("peak", "MiB", Form::Bytes),
            ],
            lines: vec![
                TableLine { cells: ours, error: None },
                TableLine { cells: peer, error: Some("it | broke".into()) },
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
        grown.columns.insert(1, ("over_peer", ": peer", Form::Ratio(3)));
        for line in &mut grown.lines {
            line.cells.insert(1, Value::Null);
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
