//! Conversion of a TOML key and value to a word of the command line.

use std::any::TypeId;
use std::path::PathBuf;

use clap::{Arg, ArgAction};
use toml::de::DeValue;

/// Returns a key and its value as a word of the command line, or none for a switch that is off. The error says
/// which value is expected.
pub(super) fn word(arg: &Arg, value: &DeValue) -> Result<Option<String>, String> {
    let name = arg.get_long().unwrap_or_default();
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        let is_on = value.as_bool().ok_or("true or false")?;
        return Ok(is_on.then(|| format!("--{name}")));
    }
    let text = match (arg.get_value_delimiter(), value.as_array()) {
        (Some(delimiter), Some(values)) => {
            let parts = values.iter().map(|value| scalar(arg, value.get_ref()));
            parts.collect::<Result<Vec<_>, _>>()?.join(&delimiter.to_string())
        }
        _ => scalar(arg, value)?,
    };
    Ok(Some(format!("--{name}={text}")))
}

/// Formats a single value for the command line.
fn scalar(arg: &Arg, value: &DeValue) -> Result<String, String> {
    let taken = Taken::by(arg);
    match value {
        DeValue::String(text) if taken.text => Ok(text.to_string()),
        DeValue::Integer(number) if taken.whole_number => Ok(number.to_string()),
        DeValue::Float(number) if taken.number => Ok(number.to_string()),
        _ => Err(taken.in_words(arg)),
    }
}

/// TOML types that a flag accepts, derived from the type of its value parser.
struct Taken {
    text: bool,
    whole_number: bool,
    number: bool,
}

impl Taken {
    fn by(arg: &Arg) -> Self {
        let read_as = arg.get_value_parser().type_id();
        let is = |types: &[TypeId]| types.iter().any(|known| read_as == *known);
        let is_whole = is(&[
            TypeId::of::<usize>(),
            TypeId::of::<u64>(),
            TypeId::of::<u32>(),
            TypeId::of::<u16>(),
            TypeId::of::<i64>(),
        ]);
        let is_number = is(&[TypeId::of::<f64>()]);
        let is_text = is(&[TypeId::of::<String>(), TypeId::of::<PathBuf>()])
            || !arg.get_possible_values().is_empty();
        // Types of our own, such as `Bytes`, parse from text and numbers.
        let is_ours = !is_whole && !is_number && !is_text;
        Self {
            text: is_text || is_ours,
            whole_number: is_whole || is_number || is_ours,
            number: is_number || is_ours,
        }
    }

    fn in_words(&self, arg: &Arg) -> String {
        let one = match self {
            Self { text: true, number: true, .. } => "a text or a number",
            Self { text: true, .. } => "a text, in quotes",
            Self { number: true, .. } => "a number",
            _ => "a whole number",
        };
        let list = if arg.get_value_delimiter().is_some() { ", or a list of them" } else { "" };
        format!("{one}{list}")
    }
}
