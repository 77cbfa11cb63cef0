//! Rows as they come, as text or JSON lines, and all of them at the end.

use anyhow::{Context, Result};
use brimful::{Bytes, device, libtorch};
use serde::Serialize;
use serde_json::{Value, json};
use tch::Device;

use super::contest::{Figures, Tuning};
use super::work::{Dtype, ModelName, Work, name};
use crate::output;

/// A contestant's figures.
#[derive(Debug, Serialize)]
pub(super) struct SpeedRow {
    contestant: &'static str,
    #[serde(flatten)]
    work: WorkColumns,
    replay: bool,
    channels_last: bool,
    samples_per_s: f64,
    /// Speed over that of the hand-written loop in the same run.
    ratio: f64,
    /// Speed over that of the library with the mini-batch on the device; 1 hides every copy.
    ratio_to_resident: Option<f64>,
    /// (Longest − shortest) / median of the steps.
    spread: f64,
    seconds: Vec<f64>,
    /// Of the steps before, in which kernels are chosen and micro-batches captured.
    warm_up_seconds: Vec<f64>,
    peak_bytes: Option<Bytes>,
    loss: f64,
}

/// A mini-batch's peak.
#[derive(Debug, Serialize)]
pub(super) struct MemoryRow {
    contestant: &'static str,
    #[serde(flatten)]
    work: WorkColumns,
    micro_batches: usize,
    peak_bytes: Bytes,
    /// The mini-batch that it is compared with, in micro-batches.
    compared_with: Option<usize>,
    /// Its peak over that one's.
    ratio: Option<f64>,
}

/// The columns that say what was run.
#[derive(Debug, Serialize)]
struct WorkColumns {
    model: ModelName,
    shape: String,
    dtype: Dtype,
    batch: usize,
    micro_batch: usize,
    stages: usize,
    schedule: Option<&'static str>,
    recompute: Option<&'static str>,
}

/// Prints rows as they come, and keeps them for the last line.
#[derive(Debug)]
pub(super) struct Journal {
    json: bool,
    device: String,
    environment: Value,
    rows: Vec<Value>,
    title: String,
}

impl SpeedRow {
    pub(super) fn new(
        work: &Work,
        figures: &Figures,
        ratio: f64,
        ratio_to_resident: Option<f64>,
    ) -> Self {
        let Figures { contestant, warm_up, times, peak, loss } = figures;
        let Tuning { replay, channels_last } = contestant.tuning();
        Self {
            contestant: contestant.name(),
            work: WorkColumns::new(work),
            replay,
            channels_last,
            samples_per_s: work.batch as f64 / times.median(),
            ratio,
            ratio_to_resident,
            spread: times.spread(),
            seconds: times.0.clone(),
            warm_up_seconds: warm_up.clone(),
            peak_bytes: *peak,
            loss: *loss,
        }
    }

    fn text(&self) -> String {
        let peak = self.peak_bytes.map_or_else(String::new, |peak| peak.to_string());
        let hidden = self.ratio_to_resident.map_or_else(String::new, |r| format!("{r:.3}"));
        format!(
            "  {:<32}{:>11.1}{:>8.3}{hidden:>11}{:>8.1} %{peak:>12}",
            self.contestant,
            self.samples_per_s,
            self.ratio,
            self.spread * 100.0
        )
    }
}

impl MemoryRow {
    pub(super) fn new(
        work: &Work,
        micro_batches: usize,
        peak_bytes: Bytes,
        compared_with: Option<usize>,
        ratio: Option<f64>,
    ) -> Self {
        let work = WorkColumns::new(work);
        Self { contestant: "brimful", work, micro_batches, peak_bytes, compared_with, ratio }
    }

    fn text(&self) -> String {
        let Self { micro_batches, peak_bytes, .. } = self;
        let growth = match (self.ratio, self.compared_with) {
            (Some(ratio), Some(base)) => format!("{:+.2} % against {base}", (ratio - 1.0) * 100.0),
            _ => String::new(),
        };
        let samples = self.work.batch;
        format!("  {micro_batches:>13}{samples:>10}{peak_bytes:>12}   {growth}")
    }
}

impl WorkColumns {
    fn new(work: &Work) -> Self {
        Self {
            model: work.model,
            shape: work.shape(),
            dtype: work.dtype,
            batch: work.batch,
            micro_batch: work.micro_batch,
            stages: 1,
            schedule: None,
            recompute: None,
        }
    }

    /// What a table's heading says of its rows.
    fn title(&self) -> String {
        let Self { model, shape, dtype, micro_batch, .. } = self;
        format!("{} {shape}, {}, micro-batch {micro_batch}", name(model), name(dtype))
    }
}

impl Journal {
    pub(super) fn begin(device: Device, json: bool) -> Result<Self> {
        let environment = environment(device)?;
        let device = device::name(device);
        if !json {
            let text = |key: &str| environment[key].as_str().unwrap_or("?").to_owned();
            output::line(&format!(
                "{device}: {}; libtorch {}, {} threads; a step without its optimizer",
                text("device_model"),
                text("libtorch"),
                environment["threads"],
            ))?;
        }
        Ok(Self { json, device, environment, rows: Vec::new(), title: String::new() })
    }

    pub(super) fn speed(&mut self, row: SpeedRow) -> Result<()> {
        let title = format!("{}, mini-batch {}", row.work.title(), row.work.batch);
        let columns = format!(
            "  {:<32}{:>11}{:>8}{:>11}{:>10}{:>12}",
            "", "samples/s", "ratio", "streaming", "spread", "peak"
        );
        self.write(&title, &columns, &row.text(), &row)
    }

    pub(super) fn memory(&mut self, row: MemoryRow) -> Result<()> {
        let columns = format!("  {:>13}{:>10}{:>12}", "micro-batches", "samples", "peak");
        self.write(&row.work.title(), &columns, &row.text(), &row)
    }

    /// A heading where a new table begins, then the row.
    fn write(
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
fn environment(device: Device) -> Result<Value> {
    let devices = device::all()?;
    let model = |wanted| devices.iter().find(|info| info.device == wanted).map(|info| &info.model);
    let cuda = device != Device::Cpu;
    Ok(json!({
        "program": "brimful",
        "brimful": env!("CARGO_PKG_VERSION"),
        "libtorch": libtorch::version(),
        "device": device::name(device),
        "device_model": model(device),
        "cpu_model": model(Device::Cpu),
        "cpu_capability": libtorch::cpu_capability(),
        "threads": libtorch::threads(),
        "cuda_driver": libtorch::cuda_driver().ok(),
        "cudnn_benchmark": cuda,
        "optimizer": "none",
        "batch_norm": "deferred; the loop's per micro-batch",
        "host_batch": if cuda { "pageable; the loop's page-locked" } else { "pageable" },
    }))
}

#[cfg(test)]
mod tests {
    use crate::commands::bench::times::Times;

    #[test]
    fn the_median_of_an_even_number_is_between_its_middle_two() {
        let times = |list: &[f64]| Times(list.to_vec());
        assert_eq!(times(&[3.0, 1.0, 2.0]).median(), 2.0);
        assert_eq!(times(&[4.0, 1.0, 2.0, 3.0]).median(), 2.5);
        assert_eq!(times(&[4.0, 1.0, 2.0, 3.0]).spread(), 3.0 / 2.5);
    }
}
