//! Joined results of several runs, ours and the peers': tables with ratios, and pictures.

mod arena;
mod auto;
mod by_work;
mod chart;
mod convergence;
mod finetune;
mod kernels;
mod loader;
mod memory;
mod micro;
mod norms;
mod offload;
mod pipeline;
mod ragged;
mod ranks;
mod row;
mod split_backward;
mod table;

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

pub(crate) use convergence::Comparison;
pub(crate) use row::ResultRow;
pub(crate) use table::Newest;

use chart::BarPanel;
use table::Table;

/// File names of a result folder.
pub(crate) const OURS: &str = "ours.jsonl";
const PEERS: &str = "peers.jsonl";
const TABLE: &str = "table.md";
const PLOT: &str = "plot.svg";

/// Functions that make tables and panels from a benchmark's rows.
type Views = (fn(&[&ResultRow]) -> Vec<Table>, fn(&[&ResultRow]) -> Vec<BarPanel>);

/// Benchmarks, by the name in each of their rows.
const BENCHES: [(&str, Views); 15] = [
    ("arena", (arena::tables, arena::panels)),
    ("micro", (micro::tables, micro::panels)),
    ("auto", (auto::tables, auto::panels)),
    ("finetune", (finetune::tables, finetune::panels)),
    ("split_backward", (split_backward::tables, split_backward::panels)),
    ("kernels", (kernels::tables, kernels::panels)),
    ("loader", (loader::tables, loader::panels)),
    ("norms", (norms::tables, norms::panels)),
    ("offload", (offload::tables, offload::panels)),
    ("pipeline", (pipeline::tables, pipeline::panels)),
    ("ragged", (ragged::tables, ragged::panels)),
    ("ranks", (|rows| ranks::DATA.tables(rows), |rows| ranks::DATA.panels(rows))),
    ("world", (|rows| ranks::PIPELINE.tables(rows), |rows| ranks::PIPELINE.panels(rows))),
    ("memory", (memory::tables, memory::panels)),
    ("convergence", (convergence::tables, convergence::panels)),
];

/// Returns the newest row of a benchmark as a line of its table; none if it is in no table.
pub(crate) fn newest(bench: &str, rows: &[ResultRow]) -> Option<Newest> {
    let (_, (tables, _)) = BENCHES.iter().find(|(name, _)| *name == bench)?;
    Some(tables(&rows.iter().collect::<Vec<_>>()).last()?.newest())
}

/// Rows of any number of runs.
#[derive(Debug, Default)]
pub(crate) struct Results {
    rows: Vec<ResultRow>,
    environments: Vec<Value>,
    /// Runs that were stopped before their last row.
    partial: Vec<PathBuf>,
}

impl Results {
    /// Reads JSON lines. Each row counts on its own, so that a stopped run contributes its rows.
    pub(crate) fn read(paths: &[PathBuf]) -> Result<Self> {
        let mut results = Self::default();
        for path in paths {
            let text = fs::read_to_string(path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            results.take(&text, path)?;
        }
        let known = |row: &ResultRow| BENCHES.iter().any(|(name, _)| row.text("bench") == *name);
        let strange = results.rows.iter().find(|row| !known(row));
        ensure!(
            strange.is_none(),
            "a row is of no benchmark that is known: {}",
            strange.map(|row| row.0.to_string()).unwrap_or_default()
        );
        ensure!(!results.rows.is_empty(), "there is no row in what was given");
        Ok(results)
    }

    /// Reads all results of a folder, ours and the peers'.
    pub(crate) fn read_folder(folder: &Path) -> Result<Self> {
        let paths = [OURS, PEERS].map(|name| folder.join(name));
        Self::read(&paths.into_iter().filter(|path| path.exists()).collect::<Vec<_>>())
    }

    fn take(&mut self, text: &str, path: &Path) -> Result<()> {
        let mut is_whole = true;
        for (number, line) in text.lines().enumerate() {
            let value: Value = serde_json::from_str(line).with_context(|| {
                format!("{}:{}: this is no line of JSON", path.display(), number + 1)
            })?;
            is_whole = value["done"] == true;
            if !is_whole {
                self.rows.push(ResultRow(value));
                continue;
            }
            let environment = &value["environment"];
            // A file without measurements has an environment with only the name of the program.
            let tells = environment.as_object().is_some_and(|facts| facts.len() > 1);
            if tells && !self.environments.contains(environment) {
                self.environments.push(environment.clone());
            }
        }
        self.partial.extend((!is_whole).then(|| path.to_owned()));
        Ok(())
    }

    /// Returns the number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows.len()
    }

    fn tables(&self) -> Vec<Table> {
        self.of_each(|(tables, _), rows| tables(rows))
    }

    fn of_each<T>(&self, view: impl Fn(&Views, &[&ResultRow]) -> Vec<T>) -> Vec<T> {
        let each = BENCHES.iter().flat_map(|(name, views)| {
            let rows: Vec<&ResultRow> =
                self.rows.iter().filter(|row| row.text("bench") == *name).collect();
            if rows.is_empty() { Vec::new() } else { view(views, &rows) }
        });
        each.collect()
    }

    pub(crate) fn for_terminal(&self) -> String {
        let tables = self.tables().iter().map(Table::for_terminal).collect::<Vec<_>>().join("\n");
        tables + &self.notes()
    }

    pub(crate) fn for_markdown(&self) -> String {
        let tables = self.tables().iter().map(Table::for_markdown).collect::<Vec<_>>().join("\n");
        tables + &self.notes()
    }

    pub(crate) fn json(&self) -> Value {
        let rows: Vec<Value> = self.tables().iter().flat_map(Table::rows).collect();
        json!({ "done": true, "rows": rows, "environments": self.environments,
                "partial": self.partial })
    }

    pub(crate) fn svg(&self) -> String {
        chart::svg(&self.of_each(|(_, panels), rows| panels(rows)))
    }

    /// Writes tables and a picture beside the rows of a folder.
    pub(crate) fn illustrate(&self, folder: &Path) -> Result<()> {
        for (name, text) in [(TABLE, self.for_markdown()), (PLOT, self.svg())] {
            let path = folder.join(name);
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }

    /// Lists the environments of the figures, and the runs that were stopped before their last row.
    fn notes(&self) -> String {
        let mut out = String::new();
        for environment in &self.environments {
            let facts = environment.as_object().into_iter().flatten();
            let facts = facts.filter(|(key, value)| *key != "program" && !value.is_null());
            let facts: Vec<_> =
                facts.map(|(key, value)| format!("{key} {}", plain(value))).collect();
            let _ = write!(out, "\n- {}: {}", plain(&environment["program"]), facts.join(", "));
        }
        for path in &self.partial {
            let _ = write!(out, "\n- {}: stopped before its last row", path.display());
        }
        out + "\n"
    }
}

/// Formats a value for people.
fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
