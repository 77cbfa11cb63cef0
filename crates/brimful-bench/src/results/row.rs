//! Row of results, ours or a peer's.

use serde::Serialize;
use serde_json::Value;

/// Name of the library's own contestants, alone or followed by a variant.
const OURS: &str = "brimful";
/// Contestants that others are measured against, in the same program.
const REFERENCES: [&str; 5] =
    ["tch loop", "one thread", "PyTorch, one thread", "libtorch", "libtorch, logits in f32"];

/// JSON object with a contestant's figures, or with its error.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ResultRow(pub(crate) Value);

/// Origin of the figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Ours,
    Peer,
    Reference,
}

impl ResultRow {
    /// Returns the value under this key as text; empty if there is none.
    pub(super) fn text(&self, key: &str) -> String {
        match &self.0[key] {
            Value::String(text) => text.clone(),
            Value::Null => String::new(),
            other => other.to_string(),
        }
    }

    /// Returns the texts under these keys.
    pub(super) fn texts<const N: usize>(&self, keys: [&str; N]) -> [String; N] {
        keys.map(|key| self.text(key))
    }

    pub(super) fn number(&self, key: &str) -> Option<f64> {
        self.0[key].as_f64()
    }

    pub(super) fn milliseconds(&self, key: &str) -> Option<f64> {
        self.number(key).map(|seconds| 1e3 * seconds)
    }

    /// Returns the number under this key, or why there is none.
    pub(super) fn figure(&self, key: &str) -> Result<f64, String> {
        self.number(key).ok_or_else(|| self.error().unwrap_or("no figures").to_owned())
    }

    pub(super) fn numbers(&self, key: &str) -> Vec<f64> {
        self.0[key].as_array().into_iter().flatten().filter_map(Value::as_f64).collect()
    }

    /// Returns why it has no figures.
    pub(super) fn error(&self) -> Option<&str> {
        self.0["error"].as_str()
    }

    pub(super) fn has(&self, key: &str) -> bool {
        !self.0[key].is_null()
    }

    pub(super) fn contestant(&self) -> String {
        self.text("contestant")
    }

    pub(super) fn side(&self) -> Side {
        let contestant = self.contestant();
        if contestant.starts_with(OURS) {
            Side::Ours
        } else if REFERENCES.contains(&contestant.as_str()) {
            Side::Reference
        } else {
            Side::Peer
        }
    }

    pub(super) fn speed(&self) -> Option<f64> {
        self.number("samples_per_s")
    }

    /// Returns the speeds of single steps.
    pub(super) fn speeds(&self) -> Vec<f64> {
        let batch = self.number("batch").unwrap_or_default();
        self.numbers("seconds").into_iter().map(|seconds| batch / seconds).collect()
    }

    /// Returns the seconds of the first warm-up step.
    pub(super) fn first_step(&self) -> Option<f64> {
        self.numbers("warm_up_seconds").first().copied()
    }

    /// Returns the relative difference of its gradients from the reference's; empty if they were not compared.
    pub(super) fn gradients_apart(&self) -> String {
        let apart = self.number("gradient_difference");
        apart.map(|apart| format!("{apart:.0e}")).unwrap_or_default()
    }

    /// Returns ` within 8 GiB`, or nothing without a memory limit.
    pub(super) fn within(&self) -> String {
        let limit = self.text("memory_limit");
        if limit.is_empty() { limit } else { format!(" within {limit}") }
    }

    /// Returns model, sample and dtype: `ResNet-50 224×224, TF32`.
    pub(super) fn model(&self) -> String {
        let model = self.text("model");
        let name = match model.strip_prefix("resnet") {
            Some(depth) => format!("ResNet-{depth}"),
            None if model == "llama" => "Llama".to_owned(),
            None if model.starts_with("gpt") => model.replacen("gpt", "GPT", 1),
            None => model,
        };
        let dtype = self.text("dtype").replace("tf32", "TF32");
        format!("{name} {}, {dtype}", self.text("shape"))
    }
}

/// Groups rows by heading, in the order in which headings appear.
pub(super) fn grouped<'a>(
    rows: &[&'a ResultRow],
    heading: impl Fn(&ResultRow) -> String,
) -> Vec<(String, Vec<&'a ResultRow>)> {
    let mut groups: Vec<(String, Vec<&ResultRow>)> = Vec::new();
    for row in rows {
        let name = heading(row);
        match groups.iter_mut().find(|(known, _)| *known == name) {
            Some((_, group)) => group.push(row),
            None => groups.push((name, vec![row])),
        }
    }
    groups
}

/// Returns the best speed among these rows.
pub(super) fn best<'a>(rows: impl IntoIterator<Item = &'a ResultRow>) -> Option<f64> {
    rows.into_iter().filter_map(ResultRow::speed).reduce(f64::max)
}

/// Divides one figure by another, if both exist.
pub(super) fn over(a: Option<f64>, b: Option<f64>) -> Option<f64> {
    Some(a? / b?)
}
