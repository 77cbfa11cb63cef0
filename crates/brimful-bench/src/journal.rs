//! Output of rows: text or JSON lines as they come, all of them at the end, and a copy in a folder if asked.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};
use brimful::internal::devices;
use brimful::{device, libtorch};
use brimful_cli::output;
use brimful_cli::setting::words;
use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};
use tch::Device;

use crate::interrupt;
use crate::results::{self, Newest, OURS, ResultRow, Results};

/// Destination of the rows.
#[derive(Debug, Clone, Args)]
pub(crate) struct Output {
    #[arg(long, help = words::JSON_LINES)]
    json: bool,
    /// Write rows (ours.jsonl), tables and a plot to this folder
    #[arg(long, value_name = "FOLDER")]
    into: Option<PathBuf>,
}

/// Prints rows as they come, and keeps them for the last line.
#[derive(Debug)]
pub(crate) struct Journal {
    bench: &'static str,
    json: bool,
    device: String,
    environment: Value,
    rows: Vec<ResultRow>,
    title: String,
    saved: Option<(PathBuf, File)>,
}

impl Journal {
    /// Starts a journal. `facts` are the settings that this benchmark's figures depend on, besides the common
    /// ones.
    pub(crate) fn begin(
        bench: &'static str,
        device: Device,
        output: &Output,
        facts: Value,
    ) -> Result<Self> {
        let saved = output.into.as_ref().map(open).transpose()?;
        interrupt::keep_rows(output.into.clone())?;
        let environment = environment(device, facts)?;
        let device = device::name(device);
        if !output.json {
            let text = |key: &str| environment[key].as_str().unwrap_or("?").to_owned();
            output::line(&format!(
                "{device}: {}; libtorch {}, {} threads; optimizer: {}",
                text("device_model"),
                text("libtorch"),
                environment["threads"],
                text("optimizer"),
            ))?;
        }
        let (rows, title) = (Vec::new(), String::new());
        Ok(Self { bench, json: output.json, device, environment, rows, title, saved })
    }

    /// Enters a row, and prints its line of the joined table.
    pub(crate) fn enter(&mut self, row: &impl Serialize) -> Result<()> {
        self.keep(row)?;
        let newest = results::newest(self.bench, &self.rows);
        let Newest { title, heading, line } = newest.context("the row is in no table")?;
        self.show(&title, &heading, &line)
    }

    /// Enters a row with its own text, for rows that show more than the joined table does, or a summary of it.
    pub(crate) fn enter_as(
        &mut self,
        title: &str,
        columns: &str,
        text: &str,
        row: &impl Serialize,
    ) -> Result<()> {
        self.keep(row)?;
        self.show(title, columns, text)
    }

    /// Stores a row for the folder, the last line, and programs that read lines as they come.
    fn keep(&mut self, row: &impl Serialize) -> Result<()> {
        let mut value = serde_json::to_value(row)?;
        let object = value.as_object_mut().context("a row is an object")?;
        object.insert("bench".into(), json!(self.bench));
        object.insert("device".into(), json!(self.device));
        self.save(&value)?;
        if self.json {
            output::line(&value.to_string())?;
        }
        self.rows.push(ResultRow(value));
        Ok(())
    }

    /// Prints a line, with its heading when a new table begins.
    fn show(&mut self, title: &str, columns: &str, text: &str) -> Result<()> {
        if self.json {
            return Ok(());
        }
        if self.title != title {
            output::line(&format!("\n{title}\n{columns}"))?;
            self.title = title.to_owned();
        }
        output::line(text)
    }

    /// Writes the last line of JSON: all rows and their environment.
    pub(crate) fn end(mut self) -> Result<()> {
        let last = json!({ "done": true, "environment": self.environment, "rows": self.rows });
        self.save(&last)?;
        if let Some((folder, _)) = &self.saved {
            Results::read_folder(folder)?.illustrate(folder)?;
        }
        if self.json { output::line(&last.to_string()) } else { Ok(()) }
    }

    fn save(&mut self, value: &Value) -> Result<()> {
        let Some((folder, file)) = &mut self.saved else { return Ok(()) };
        // Whole lines at once: a killed run leaves no partial line.
        let written = file.write_all(format!("{value}\n").as_bytes());
        written.with_context(|| format!("cannot write {}", folder.join(OURS).display()))
    }
}

/// Creates the folder and its new file of rows.
fn open(folder: &PathBuf) -> Result<(PathBuf, File)> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let path = folder.join(OURS);
    let file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok((folder.clone(), file))
}

/// Describes the environment that figures depend on besides the code.
fn environment(device: Device, facts: Value) -> Result<Value> {
    let devices = devices()?;
    let model = |wanted| devices.iter().find(|info| info.device == wanted).map(|info| &info.model);
    let mut environment = json!({
        "program": "brimful",
        "brimful": env!("CARGO_PKG_VERSION"),
        "libtorch": libtorch::version(),
        "device": device::name(device),
        "device_model": model(device),
        "cpu_model": model(Device::Cpu),
        "cpu_capability": libtorch::cpu_capability(),
        "threads": libtorch::threads(),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "cuda_driver": libtorch::cuda_driver().ok(),
    });
    if let (Some(all), Value::Object(facts)) = (environment.as_object_mut(), facts) {
        all.extend(facts);
    }
    Ok(environment)
}
