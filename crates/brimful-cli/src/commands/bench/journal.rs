//! Rows as they come, as text or JSON lines, and all of them at the end.

use anyhow::{Context, Result};
use brimful::{device, libtorch};
use serde::Serialize;
use serde_json::{Value, json};
use tch::Device;

use crate::output;

/// Prints rows as they come, and keeps them for the last line.
#[derive(Debug)]
pub(super) struct Journal {
    json: bool,
    device: String,
    environment: Value,
    rows: Vec<Value>,
    title: String,
}

impl Journal {
    /// `facts` are what this benchmark's figures depend on besides what all depend on.
    pub(super) fn begin(device: Device, json: bool, facts: Value) -> Result<Self> {
        let environment = environment(device, facts)?;
        let device = device::name(device);
        if !json {
            let text = |key: &str| environment[key].as_str().unwrap_or("?").to_owned();
            output::line(&format!(
                "{device}: {}; libtorch {}, {} threads; optimizer: {}",
                text("device_model"),
                text("libtorch"),
                environment["threads"],
                text("optimizer"),
            ))?;
        }
        Ok(Self { json, device, environment, rows: Vec::new(), title: String::new() })
    }

    /// A heading where a new table begins, then the row.
    pub(super) fn write(
        &mut self,
        title: &str,
        columns: &str,
        text: &str,
        row: &impl Serialize,
    ) -> Result<()> {
        let mut value = serde_json::to_value(row)?;
        let object = value.as_object_mut().context("a row is an object")?;
        object.insert("device".into(), json!(self.device));
        if self.json {
            output::line(&value.to_string())?;
        } else {
            if self.title != title {
                output::line(&format!("\n{title}\n{columns}"))?;
                self.title = title.to_owned();
            }
            output::line(text)?;
        }
        self.rows.push(value);
        Ok(())
    }

    /// The last line of JSON: all rows, and where they come from.
    pub(super) fn end(self) -> Result<()> {
        let Self { json, environment, rows, .. } = self;
        if !json {
            return Ok(());
        }
        output::line(&json!({ "done": true, "environment": environment, "rows": rows }).to_string())
    }
}

/// What a figure depends on besides the code.
fn environment(device: Device, facts: Value) -> Result<Value> {
    let devices = device::all()?;
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
        "cuda_driver": libtorch::cuda_driver().ok(),
    });
    if let (Some(all), Value::Object(facts)) = (environment.as_object_mut(), facts) {
        all.extend(facts);
    }
    Ok(environment)
}
