//! Weights of a folder: one safetensors file, or shards with an index.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};

use brimful::internal::OpenedFile;
use serde_json::Value;
use tch::{Kind, Tensor};

use super::fields::Fields;
use super::{PretrainedError, json, keys};

/// The file of weights, unless there are shards.
pub(super) const WEIGHTS: &str = "model.safetensors";
/// Index of the shards: the file of each weight.
const INDEX: &str = "model.safetensors.index.json";
/// Pickled files, which run code when they are read.
const OF_PYTHON: [&str; 2] = ["pytorch_model.bin", "pytorch_model.bin.index.json"];
/// Name of the head's weight.
const HEAD: &str = "lm_head.weight";

/// Files of a folder's weights; only their headers are read.
#[derive(Debug)]
pub(super) struct Weights {
    folder: String,
    files: Vec<OpenedFile>,
    /// Place of each weight, by the model's own name.
    places: BTreeMap<String, WeightPlace>,
}

/// File of a weight, and its name there.
#[derive(Debug, Clone)]
struct WeightPlace {
    file: usize,
    /// Name in the file.
    name: String,
}

impl Weights {
    /// Opens the files of a folder: a single file takes precedence over shards, as in transformers. Adds the prefix to
    /// names that lack it, because some files leave it out.
    pub(super) fn open(folder: &Path, prefix: &str) -> Result<Self, PretrainedError> {
        let index = folder.join(INDEX);
        let is_one = folder.join(WEIGHTS).is_file() || !index.is_file();
        if is_one {
            OF_PYTHON.iter().try_for_each(|other| check_not_of_python(folder, WEIGHTS, other))?;
        }
        let names = if is_one { vec![WEIGHTS.into()] } else { shards(folder, &index)? };
        let mut files = Vec::new();
        let mut places = BTreeMap::new();
        let mut twice = Vec::new();
        for name in names {
            let file = OpenedFile::open(folder.join(name))?;
            for name in file.names() {
                let is_whole = name.starts_with(prefix) || name.starts_with("lm_head.");
                let own = if is_whole { name.clone() } else { format!("{prefix}{name}") };
                let place = WeightPlace { file: files.len(), name };
                if places.insert(own.clone(), place).is_some() {
                    twice.push(format!("{own} is there twice"));
                }
            }
            files.push(file);
        }
        let folder = folder.display().to_string();
        match twice.is_empty() {
            true => Ok(Self { folder, files, places }),
            false => Err(PretrainedError::Tensors { folder, differences: twice }),
        }
    }

    /// Refuses more blocks than tensors, before any block is described.
    pub(super) fn check_blocks(&self, blocks: usize) -> Result<(), PretrainedError> {
        let tensors = self.places.len();
        if blocks <= tensors {
            return Ok(());
        }
        let differences = vec![format!("{tensors} tensors are too few for {blocks} layers")];
        Err(PretrainedError::Tensors { folder: self.folder.clone(), differences })
    }

    /// Makes the head and this table share one tensor if the files have only one of them, or equal ones. Returns
    /// whether they share it.
    pub(super) fn tie(&mut self, table: &str) -> Result<bool, PretrainedError> {
        let Some(head) = self.places.get(HEAD) else { return Ok(true) };
        let is_one = match self.places.get(table) {
            None => true,
            Some(own) => {
                let (of_head, of_table) = (&self.files[head.file], &self.files[own.file]);
                of_head.holds_same(&head.name, of_table, &own.name)?
            }
        };
        if is_one && let Some(head) = self.places.remove(HEAD) {
            self.places.insert(table.to_owned(), head);
        }
        Ok(is_one)
    }

    /// Checks that the files have exactly the wanted weights, in their shapes and as floats. Ignores names with the
    /// suffixes `passed_over`.
    pub(super) fn check(
        &self,
        wanted: &BTreeMap<String, Vec<i64>>,
        passed_over: &[&str],
    ) -> Result<(), PretrainedError> {
        let missing = wanted.keys().filter(|name| !self.places.contains_key(*name));
        let missing = missing.map(|name| format!("{name} is missing"));
        let misshapen = wanted.iter().filter_map(|(name, wanted)| {
            let place = self.places.get(name)?;
            let found = self.files[place.file].shape(&place.name).unwrap_or_default();
            (found != *wanted).then(|| format!("{name} is {found:?}, not {wanted:?}"))
        });
        let mistyped = wanted.keys().filter_map(|name| {
            let place = self.places.get(name)?;
            mistyped(name, self.files[place.file].kind(&place.name))
        });
        let left_over = self.places.keys().filter(|name| {
            !wanted.contains_key(*name) && !passed_over.iter().any(|end| name.ends_with(end))
        });
        let left_over = left_over.map(|name| format!("{name} belongs nowhere"));
        let differences: Vec<String> =
            missing.chain(misshapen).chain(mistyped).chain(left_over).collect();
        match differences.is_empty() {
            true => Ok(()),
            false => Err(PretrainedError::Tensors { folder: self.folder.clone(), differences }),
        }
    }

    /// Returns the dtype of the first weight.
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

/// Returns the reason why a tensor of this dtype cannot be a weight, if there is one. Integers and f8 belong to
/// quantized models, and mean nothing without their scales.
pub(super) fn mistyped(name: &str, kind: Option<Kind>) -> Option<String> {
    let found = match kind {
        Some(Kind::Double | Kind::Float | Kind::Half | Kind::BFloat16) => return None,
        Some(other) => format!("{other:?}"),
        None => "a dtype that libtorch lacks".to_owned(),
    };
    Some(format!("{name} is of {found}, not of floats: give the model that was not quantized"))
}

/// Refuses a folder with a pickled file and without the wanted one.
pub(super) fn check_not_of_python(
    folder: &Path,
    wanted: &str,
    other: &str,
) -> Result<(), PretrainedError> {
    match folder.join(wanted).is_file() || !folder.join(other).is_file() {
        true => Ok(()),
        false => Err(json::unreadable(
            &folder.join(wanted),
            format!(
                "there is {other} alone, which runs code when it is read: if you trust it, load it in Python and \
                 save it with save_pretrained"
            ),
        )),
    }
}

/// Returns the files that an index names, and checks that they exist.
fn shards(folder: &Path, index: &Path) -> Result<Vec<String>, PretrainedError> {
    let read = json::read(index)?;
    let fields = Fields::new(index, &read, keys::INDEX);
    let map = fields.value("weight_map").and_then(Value::as_object);
    let map = map.ok_or_else(|| fields.wrong("weight_map", "is missing, or is no object"))?;
    let named: Option<BTreeSet<&str>> = map.values().map(Value::as_str).collect();
    let named = named.ok_or_else(|| fields.wrong("weight_map", "has a value that is no text"))?;
    if let Some(name) = named.iter().find(|name| !is_file_name(name)) {
        return Err(
            fields.wrong("weight_map", format!("names '{name}', which is no file of this folder"))
        );
    }
    let is_missing = |name: &&&str| !folder.join(name).is_file();
    let missing: Vec<String> =
        named.iter().filter(is_missing).map(|name| (*name).to_owned()).collect();
    if !missing.is_empty() {
        let folder = folder.display().to_string();
        return Err(PretrainedError::Shards { folder, named: named.len(), missing });
    }
    if let Some(name) = named.iter().find(|name| !stays_inside(folder, name)) {
        let reason = format!(
            "names '{name}', which is a link to outside of this folder: copy the file here"
        );
        return Err(fields.wrong("weight_map", reason));
    }
    Ok(named.into_iter().map(str::to_owned).collect())
}

/// Returns whether a name is that of a file directly in its folder.
fn is_file_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(only)), None) if only == name)
}

/// Returns whether a file is within its folder, or in the Hugging Face cache that the folder links to.
fn stays_inside(folder: &Path, name: &str) -> bool {
    let real = |path: &Path| path.canonicalize().ok();
    let Some((file, folder)) = real(&folder.join(name)).zip(real(folder)) else { return false };
    // models--…/snapshots/REVISION is a folder of links to models--…/blobs.
    let snapshots = folder.parent().filter(|parent| parent.ends_with("snapshots"));
    let blobs = snapshots.and_then(Path::parent).map(|model| model.join("blobs"));
    file.starts_with(&folder) || blobs.is_some_and(|blobs| file.starts_with(blobs))
}
