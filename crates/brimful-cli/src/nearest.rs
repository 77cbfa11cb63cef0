//! Suggestion of the known name nearest to an unknown one.

/// Returns `; did you mean 'gpt2'?`, or nothing if no name is similar.
pub(crate) fn did_you_mean<'a>(text: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    nearest(text, known).map_or_else(String::new, |name| format!("; did you mean '{name}'?"))
}

/// Returns the known name with the fewest typos, if they are few.
pub(crate) fn nearest<'a>(text: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // Writing `_` for `-` does not count as a typo.
    let text = text.replace('_', "-");
    let slips = |name: &str| (strsim::damerau_levenshtein(&text, name), name.len());
    let nearest = known.into_iter().min_by_key(|name| slips(name))?;
    (slips(nearest).0 <= 1 + text.len() / 4).then_some(nearest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_is_recognised_and_a_stranger_is_not() {
        let known = ["gpipe", "1f1b", "interleaved"];
        assert_eq!(did_you_mean("gpip", known), "; did you mean 'gpipe'?");
        assert_eq!(did_you_mean("1b1f", known), "; did you mean '1f1b'?");
        assert_eq!(nearest("micro_batchs", ["micro-batches", "micro-batch"]), Some("micro-batch"));
        assert_eq!(did_you_mean("pony", known), "");
    }
}
