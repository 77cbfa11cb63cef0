//! Output of rows: text or JSON lines as they come, all of them at the end, and a copy in a folder if asked.
//! `bench/tables` makes tables and pictures of them.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};
use brimful::internal::devices;
use brimful::{Bytes, device, libtorch};
use brimful_cli::output;
use brimful_cli::setting::words;
use clap::Args;
use serde::Serialize;
use serde_json::{Number, Value, json};
use tch::Device;

use crate::interrupt;

/// File of a folder's rows.
pub(crate) const OURS: &str = "ours.jsonl";

/// Destination of the rows.
#[derive(Debug, Clone, Args)]
pub(crate) struct Output {
    #[arg(long, help = words::JSON_LINES)]
    json: bool,
    /// Write rows (ours.jsonl) to this folder
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
    rows: Vec<Value>,
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
        Ok(Self { bench, json: output.json, device, environment, rows: Vec::new(), saved })
    }

    /// Enters a row: prints it, and stores it for the folder and the last line.
    pub(crate) fn enter(&mut self, row: &impl Serialize) -> Result<()> {
        let mut value = serde_json::to_value(row)?;
        let object = value.as_object_mut().context("a row is an object")?;
        object.insert("bench".into(), json!(self.bench));
        object.insert("device".into(), json!(self.device));
        self.save(&value)?;
        output::line(&if self.json { value.to_string() } else { for_people(&value) })?;
        self.rows.push(value);
        Ok(())
    }

    /// Writes the last line of JSON: all rows and their environment.
    pub(crate) fn end(mut self) -> Result<()> {
        let last = json!({ "done": true, "environment": self.environment, "rows": self.rows });
        self.save(&last)?;
        if self.json { output::line(&last.to_string()) } else { Ok(()) }
    }

    fn save(&mut self, value: &Value) -> Result<()> {
        let Some((folder, file)) = &mut self.saved else { return Ok(()) };
        // Whole lines at once: a killed run leaves no partial line.
        let written = file.write_all(format!("{value}\n").as_bytes());
        written.with_context(|| format!("cannot write {}", folder.join(OURS).display()))
    }
}

/// Formats a row: the contestant, and every setting and figure except single measurements.
fn for_people(row: &Value) -> String {
    let name = ["contestant", "model"].into_iter().find(|key| row[key].is_string());
    let mut facts = Vec::new();
    for (key, value) in row.as_object().into_iter().flatten() {
        if !["bench", "device"].contains(&key.as_str()) && name != Some(key) {
            describe(key, value, &mut facts);
        }
    }
    let name = name.and_then(|key| row[key].as_str()).unwrap_or_default();
    format!("{name}: {}", facts.join(", "))
}

fn describe(key: &str, value: &Value, facts: &mut Vec<String>) {
    let shown = match value {
        Value::Null | Value::Array(_) => return,
        Value::Object(parts) => {
            for (part, value) in parts {
                describe(&format!("{key} {part}"), value, facts);
            }
            return;
        }
        Value::Number(number) => short(key, number),
        Value::String(text) => text.clone(),
        Value::Bool(answer) => answer.to_string(),
    };
    facts.push(format!("{key} {shown}"));
}

/// Formats bytes with a unit, whole numbers as they are, and three digits or more of other figures.
fn short(key: &str, number: &Number) -> String {
    match (number.as_u64(), number.as_f64().unwrap_or_default()) {
        (Some(bytes), _) if key.ends_with("bytes") => Bytes(bytes).to_string(),
        (Some(whole), _) => whole.to_string(),
        (None, 0.0) => "0".to_owned(),
        (None, figure) => match figure.abs() {
            ..0.01 => format!("{figure:.2e}"),
            ..10.0 => format!("{figure:.3}"),
            _ => format!("{figure:.1}"),
        },
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_for_people_has_all_but_single_measurements() {
        let row = json!({
            "bench": "micro", "contestant": "brimful", "model": "mlp", "batch": 16, "cuda_graphs": false,
            "seconds": [0.5, 0.6], "samples_per_s": 29.034, "ratio": 1.0, "gradient_difference": 2e-7,
            "peak_bytes": 3 << 19, "ratio_to_resident": null, "largest": {"size": 4},
        });
        let line = "brimful: batch 16, cuda_graphs false, gradient_difference 2.00e-7, largest size 4, \
                    model mlp, peak_bytes 1.50 MiB, ratio 1.000, samples_per_s 29.0";
        assert_eq!(for_people(&row), line);
        assert_eq!(for_people(&json!({"model": "mlp", "loss": 0.0})), "mlp: loss 0");
    }
}
