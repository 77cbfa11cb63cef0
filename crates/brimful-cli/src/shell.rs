//! Shell quoting of command lines.

use std::env;

/// Returns the command line that started this process.
pub(crate) fn command() -> String {
    let words = env::args_os().map(|word| quoted(&word.to_string_lossy()));
    words.collect::<Vec<_>>().join(" ")
}

/// Quotes a word for a shell.
pub(crate) fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_=+./,:@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_where_a_shell_would_read_more_than_a_word() {
        let quoted = ["plain-1.txt", "it's", "a b", ""].map(quoted);
        assert_eq!(quoted, ["plain-1.txt", r"'it'\''s'", "'a b'", "''"]);
    }
}
