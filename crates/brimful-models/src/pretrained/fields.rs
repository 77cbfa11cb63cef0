//! Typed access to the fields of a JSON object.

use std::path::Path;

use serde_json::{Map, Value};

use super::PretrainedError;
use super::keys::{self, Table, Treatment};

/// Limit on the sizes in a config: sixteen times the largest vocabularies and widths in use.
const LARGEST_SIZE: i64 = 1 << 24;

/// Fields of an object in a file, or of one nested in it.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    path: &'a Path,
    /// Name of the nested object with a dot; empty for the file's own object.
    within: &'a str,
    map: &'a Map<String, Value>,
    table: Table,
}

impl<'a> Fields<'a> {
    pub(super) fn new(path: &'a Path, map: &'a Map<String, Value>, table: Table) -> Self {
        Self { path, within: "", map, table }
    }

    /// Returns the fields of the same object, with another table.
    pub(super) fn held_to(self, table: Table) -> Self {
        Self { table, ..self }
    }

    pub(super) fn path(&self) -> String {
        self.path.display().to_string()
    }

    /// Refuses keys that are neither in the table nor switched off.
    pub(super) fn check_known(&self) -> Result<(), PretrainedError> {
        let is_known = |key: &str| keys::treatment(self.table, key).is_some();
        match self.map.iter().find(|(key, value)| !is_known(key) && !is_off(value)) {
            None => Ok(()),
            Some((key, _)) => Err(self.wrong(
                key,
                "is not known here, and may change what is computed: remove it from the file if it does not",
            )),
        }
    }

    /// Returns the value of a field; none for `null`.
    pub(super) fn value(&self, field: &str) -> Option<&'a Value> {
        let treatment = keys::treatment(self.table, field);
        debug_assert!(
            matches!(treatment, Some(Treatment::Used | Treatment::Checked)),
            "{field} is read, and its table says {treatment:?}"
        );
        self.map.get(field).filter(|value| !value.is_null())
    }

    pub(super) fn is_given(&self, field: &str) -> bool {
        self.value(field).is_some()
    }

    /// Refuses a field with any value that is not off: `null`, `false`, 0, or an empty text, list or object.
    pub(super) fn off(&self, field: &str, remedy: &str) -> Result<(), PretrainedError> {
        self.check(field, self.value(field).is_none_or(is_off), || {
            format!("is given, which is not known here: {remedy}")
        })
    }

    /// Returns the fields of a nested object.
    pub(super) fn inner(
        &self,
        field: &'a str,
        table: Table,
    ) -> Result<Option<Self>, PretrainedError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        let map = value.as_object().ok_or_else(|| self.wrong(field, "is no object of fields"))?;
        Ok(Some(Self { within: field, map, table, ..*self }))
    }

    pub(super) fn wrong(&self, field: &str, reason: impl Into<String>) -> PretrainedError {
        let field = match self.within {
            "" => field.to_owned(),
            within => format!("{within}.{field}"),
        };
        PretrainedError::Field { path: self.path(), field, reason: reason.into() }
    }

    pub(super) fn check(
        &self,
        field: &str,
        is_right: bool,
        reason: impl FnOnce() -> String,
    ) -> Result<(), PretrainedError> {
        if is_right { Ok(()) } else { Err(self.wrong(field, reason())) }
    }

    pub(super) fn text(&self, field: &str) -> Result<&'a str, PretrainedError> {
        let text = self.value(field).and_then(Value::as_str);
        text.ok_or_else(|| self.wrong(field, "is missing, or is no text"))
    }

    /// Checks that a word is one of these, if it is given.
    pub(super) fn only(&self, field: &str, words: &[&str]) -> Result<(), PretrainedError> {
        if !self.is_given(field) {
            return Ok(());
        }
        let found = self.text(field)?;
        self.check(field, words.contains(&found), || {
            format!("is '{found}': supported are {}", words.join(", "))
        })
    }

    /// Checks that a switch has its usual value, if it is given.
    pub(super) fn usual(&self, field: &str, usual: bool) -> Result<(), PretrainedError> {
        let set = self.flag_or(field, usual)?;
        self.check(field, set == usual, || format!("is {set}: only {usual} is supported"))
    }

    /// Returns the texts of a list, or a single one.
    pub(super) fn texts(&self, field: &str) -> Result<Vec<&'a str>, PretrainedError> {
        let list = match self.value(field) {
            None => return Ok(Vec::new()),
            Some(Value::String(one)) => return Ok(vec![one]),
            Some(value) => value.as_array().map(|list| list.iter().map(Value::as_str).collect()),
        };
        list.flatten().ok_or_else(|| self.wrong(field, "is neither a text nor a list of texts"))
    }

    /// Returns the integers of a list, or a single one.
    pub(super) fn whole_numbers(&self, field: &str) -> Result<Vec<i64>, PretrainedError> {
        let list = match self.value(field) {
            None => return Ok(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(Value::as_i64).collect(),
            Some(one) => one.as_i64().map(|one| vec![one]),
        };
        list.ok_or_else(|| self.wrong(field, "is neither an integer nor a list of integers"))
    }

    pub(super) fn positive(&self, field: &str, most: i64) -> Result<i64, PretrainedError> {
        let number = self.value(field).and_then(Value::as_i64).filter(|number| *number > 0);
        let number =
            number.ok_or_else(|| self.wrong(field, "is missing, or is no whole number above 0"))?;
        self.check(field, number <= most, || format!("is {number}: it can be {most} at most"))?;
        Ok(number)
    }

    /// Returns a number that determines shapes of tensors.
    pub(super) fn size(&self, field: &str) -> Result<i64, PretrainedError> {
        self.positive(field, LARGEST_SIZE)
    }

    /// Returns a size that divides `number`.
    pub(super) fn divisor_of(&self, field: &str, number: i64) -> Result<i64, PretrainedError> {
        let divisor = self.size(field)?;
        self.check(field, number % divisor == 0, || {
            format!("is {divisor}, which does not divide {number}")
        })?;
        Ok(divisor)
    }

    pub(super) fn number_or(&self, field: &str, usual: f64) -> Result<f64, PretrainedError> {
        let Some(value) = self.value(field) else { return Ok(usual) };
        value.as_f64().ok_or_else(|| self.wrong(field, "is no number"))
    }

    /// Returns a number from 0 to below `end`.
    pub(super) fn number_below(
        &self,
        field: &str,
        end: f64,
        usual: f64,
    ) -> Result<f64, PretrainedError> {
        let number = self.number_or(field, usual)?;
        self.check(field, (0.0..end).contains(&number), || {
            format!("is {number}: give a number from 0 to below {end}")
        })?;
        Ok(number)
    }

    pub(super) fn above_0(&self, field: &str) -> Result<f64, PretrainedError> {
        let number = self.value(field).and_then(Value::as_f64).filter(|number| *number > 0.0);
        number.ok_or_else(|| self.wrong(field, "is missing, or is no number above 0"))
    }

    pub(super) fn above_0_or(&self, field: &str, usual: f64) -> Result<f64, PretrainedError> {
        if self.is_given(field) { self.above_0(field) } else { Ok(usual) }
    }

    pub(super) fn flag_or(&self, field: &str, usual: bool) -> Result<bool, PretrainedError> {
        let Some(value) = self.value(field) else { return Ok(usual) };
        value.as_bool().ok_or_else(|| self.wrong(field, "is neither true nor false"))
    }

    /// Returns whether there are no fields.
    pub(super) fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Returns whether a field exists, even as `null`.
    pub(super) fn has(&self, field: &str) -> bool {
        self.map.contains_key(field)
    }
}

/// Returns whether a value switches a feature off, whatever its key.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}
