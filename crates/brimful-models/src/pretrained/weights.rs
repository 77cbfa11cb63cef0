//! A folder's weights: one safetensors file, or several with an index of what is where.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use brimful::save::OpenedFile;
use serde_json::Value;
use tch::{Kind, Tensor};

use super::PretrainedError;
use super::json;

/// The file of weights, where there is one.
pub(super) const WEIGHTS: &str = "model.safetensors";
/// What tells where each weight is, where there are several.
const INDEX: &str = "model.safetensors.index.json";
/// Of a tied head some files hold a second copy, and some hold masks and angles that nobody trains.
const PASSED_OVER: [&str; 5] =
    ["lm_head.weight", ".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", "position_ids"];

/// The files of a folder's weights, of which nothing but the headers was read.
#[derive(Debug)]
pub(super) struct Weights {
    folder: String,
    files: Vec<OpenedFile>,
    /// The file that each weight is in, under the model's own name.
    places: BTreeMap<String, WeightPlace>,
}

/// Where a weight is.
#[derive(Debug, Clone)]
struct WeightPlace {
    file: usize,
    /// Its name there.
    name: String,
}

impl Weights {
    /// Opens the files of a folder. Some leave the prefix of names out.
    pub(super) fn open(folder: &Path, prefix: &str) -> Result<Self, PretrainedError> {
        let index = folder.join(INDEX);
        let names = if index.is_file() { shards(folder, &index)? } else { vec![WEIGHTS.into()] };
        let mut files = Vec::new();
        let mut places = BTreeMap::new();
        for name in names {
            let file = OpenedFile::open(folder.join(name))?;
            for name in file.names() {
                let is_whole = name.starts_with(prefix) || name.starts_with("lm_head.");
                let own = if is_whole { name.clone() } else { format!("{prefix}{name}") };
                places.insert(own, WeightPlace { file: files.len(), name });
            }
            files.push(file);
        }
        Ok(Self { folder: folder.display().to_string(), files, places })
    }

    /// The weights must be these, all of them, in their shapes, and no others but those passed over.
    pub(super) fn check(&self, wanted: &BTreeMap<String, Vec<i64>>) -> Result<(), PretrainedError> {
        let missing = wanted.keys().filter(|name| !self.places.contains_key(*name));
        let missing = missing.map(|name| format!("{name} is missing"));
        let misshapen = wanted.iter().filter_map(|(name, wanted)| {
            let place = self.places.get(name)?;
            let found = self.files[place.file].shape(&place.name).unwrap_or_default();
            (found != *wanted).then(|| format!("{name} is {found:?}, not {wanted:?}"))
        });
        let left_over = self.places.keys().filter(|name| {
            !wanted.contains_key(*name) && !PASSED_OVER.iter().any(|end| name.ends_with(end))
        });
        let left_over = left_over.map(|name| format!("{name} belongs nowhere"));
        let differences: Vec<String> = missing.chain(misshapen).chain(left_over).collect();
        match differences.is_empty() {
            true => Ok(()),
            false => Err(PretrainedError::Tensors { folder: self.folder.clone(), differences }),
        }
    }

    /// The dtype of the first weight.
    pub(super) fn kind(&self) -> Option<Kind> {
        let place = self.places.values().next()?;
        self.files[place.file].kind(&place.name)
    }

    /// Copies a weight into the variable of its name, if there is one.
    pub(super) fn copy(&self, name: &str, into: &Tensor) -> Result<(), PretrainedError> {
        match self.places.get(name) {
            Some(place) => Ok(self.files[place.file].copy(&place.name, into)?),
            None => Ok(()),
        }
    }
}

/// The files that an index names; all of them are there.
fn shards(folder: &Path, index: &Path) -> Result<Vec<String>, PretrainedError> {
    let read = json::read(index)?;
    let map = read.get("weight_map").and_then(Value::as_object);
    let map = map.ok_or_else(|| json::unreadable(index, "it has no weight_map"))?;
    let named: BTreeSet<&str> = map.values().filter_map(Value::as_str).collect();
    let is_missing = |name: &&&str| !folder.join(name).is_file();
    let missing: Vec<String> =
        named.iter().filter(is_missing).map(|name| (*name).to_owned()).collect();
    if !missing.is_empty() {
        let folder = folder.display().to_string();
        return Err(PretrainedError::Shards { folder, named: named.len(), missing });
    }
    Ok(named.into_iter().map(str::to_owned).collect())
}
