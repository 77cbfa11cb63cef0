//! The fields of a JSON object, each asked for as what it should be.

use std::path::Path;

use serde_json::{Map, Value};

use super::PretrainedError;

/// The fields of an object in a file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fields<'a> {
    path: &'a Path,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(path: &'a Path, map: &'a Map<String, Value>) -> Self {
        Self { path, map }
    }

    pub(super) fn path(&self) -> String {
        self.path.display().to_string()
    }

    /// What stands there; nothing where it says `null`.
    pub(super) fn value(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    pub(super) fn is_given(&self, field: &str) -> bool {
        self.value(field).is_some()
    }

    /// Whether nothing stands there, or a list or an object of nothing.
    pub(super) fn is_empty(&self, field: &str) -> bool {
        match self.value(field) {
            Some(Value::Array(list)) => list.is_empty(),
            Some(Value::Object(map)) => map.is_empty(),
            other => other.is_none(),
        }
    }

    /// The fields of an object in this one.
    pub(super) fn inner(&self, field: &str) -> Option<Self> {
        let map = self.value(field)?.as_object()?;
        Some(Self { path: self.path, map })
    }

    pub(super) fn wrong(&self, field: &str, reason: impl Into<String>) -> PretrainedError {
        let (path, field) = (self.path(), field.to_owned());
        PretrainedError::Field { path, field, reason: reason.into() }
    }

    pub(super) fn check(
        &self,
        field: &str,
        is_right: bool,
        reason: impl FnOnce() -> String,
    ) -> Result<(), PretrainedError> {
        if is_right { Ok(()) } else { Err(self.wrong(field, reason())) }
    }

    pub(super) fn text(&self, field: &str) -> Result<String, PretrainedError> {
        let text = self.value(field).and_then(Value::as_str);
        text.map(str::to_owned).ok_or_else(|| self.wrong(field, "is missing, or is no text"))
    }

    /// A word must be one of these, if it is given.
    pub(super) fn only(&self, field: &str, words: &[&str]) -> Result<(), PretrainedError> {
        if !self.is_given(field) {
            return Ok(());
        }
        let found = self.text(field)?;
        self.check(field, words.contains(&found.as_str()), || {
            format!("is '{found}': those known are {}", words.join(", "))
        })
    }

    pub(super) fn positive(&self, field: &str) -> Result<i64, PretrainedError> {
        let number = self.value(field).and_then(Value::as_i64).filter(|number| *number > 0);
        number.ok_or_else(|| self.wrong(field, "is missing, or is no whole number above 0"))
    }

    pub(super) fn positive_or(&self, field: &str, usual: i64) -> Result<i64, PretrainedError> {
        if self.is_given(field) { self.positive(field) } else { Ok(usual) }
    }

    /// A number that another is a multiple of.
    pub(super) fn divisor_of(&self, field: &str, number: i64) -> Result<i64, PretrainedError> {
        let divisor = self.positive(field)?;
        self.check(field, number % divisor == 0, || {
            format!("is {divisor}, which {number} is no multiple of")
        })?;
        Ok(divisor)
    }

    pub(super) fn number_or(&self, field: &str, usual: f64) -> Result<f64, PretrainedError> {
        let Some(value) = self.value(field) else { return Ok(usual) };
        value.as_f64().ok_or_else(|| self.wrong(field, "is no number"))
    }

    pub(super) fn above_0(&self, field: &str) -> Result<f64, PretrainedError> {
        let number = self.value(field).and_then(Value::as_f64).filter(|number| *number > 0.0);
        number.ok_or_else(|| self.wrong(field, "is missing, or is no number above 0"))
    }

    pub(super) fn flag_or(&self, field: &str, usual: bool) -> Result<bool, PretrainedError> {
        let Some(value) = self.value(field) else { return Ok(usual) };
        value.as_bool().ok_or_else(|| self.wrong(field, "is neither true nor false"))
    }
}
