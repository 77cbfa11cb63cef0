//! Number of bytes, parsed and printed with a unit: `96 MiB`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

const UNITS: [(&str, u64); 13] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
    ("B", 1),
    // A single letter is binary, as in dd, ls and containers.
    ("T", 1 << 40),
    ("G", 1 << 30),
    ("M", 1 << 20),
    ("K", 1 << 10),
];

/// Number of bytes. Printed with a binary unit and three digits; parsed with any unit: KB is 1000, KiB and
/// K are 1024.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Bytes(pub u64);

/// Error for a text that is not a number of bytes.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "'{text}' is not a number of bytes: write a number and a unit, such as 96MiB or 16 GB; units are \
     B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB or in short K, M, G, T (powers of 1024)"
)]
pub struct BytesError {
    /// Text as given.
    pub text: String,
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let binary = UNITS[..4].iter().find(|(_, size)| self.0 >= *size);
        match binary {
            None => f.pad(&format!("{} B", self.0)),
            Some((unit, size)) => {
                let value = self.0 as f64 / *size as f64;
                let decimals = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
                f.pad(&format!("{value:.decimals$} {unit}"))
            }
        }
    }
}

impl FromStr for Bytes {
    type Err = BytesError;

    fn from_str(text: &str) -> Result<Self, BytesError> {
        let bad = || BytesError { text: text.to_owned() };
        let trimmed = text.trim();
        let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.');
        let (number, unit) = trimmed.split_at(digits.unwrap_or(trimmed.len()));
        let size = unit_size(unit.trim()).ok_or_else(bad)?;
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(size).map(Bytes).ok_or_else(bad);
        }
        let bytes = number.parse::<f64>().map_err(|_| bad())? * size as f64;
        // Above 2^63 a float cannot represent single bytes.
        if bytes < i64::MAX as f64 { Ok(Bytes(bytes.round() as u64)) } else { Err(bad()) }
    }
}

fn unit_size(unit: &str) -> Option<u64> {
    if unit.is_empty() {
        return Some(1);
    }
    UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).map(|(_, size)| *size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write() {
        let cases = [
            ("96MiB", 96 << 20),
            ("1.5 GiB", 3 << 29),
            ("16gib", 16 << 30),
            ("2 GB", 2_000_000_000),
            ("0", 0),
            (" 512 ", 512),
            ("7B", 7),
            ("8M", 8 << 20),
            ("2 k", 2 << 10),
            ("1.5G", 3 << 29),
            ("1T", 1 << 40),
        ];
        for (text, bytes) in cases {
            assert_eq!(text.parse::<Bytes>().ok(), Some(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn refuses_what_it_cannot_read() {
        for text in ["", "MiB", "12 parsecs", "-1", "1.2.3", "99999999999 TiB", "1e400 TiB", "NaN"]
        {
            let error = text.parse::<Bytes>().expect_err(text).to_string();
            assert!(error.contains("such as 96MiB"), "{error}");
            let missing = UNITS.iter().find(|(unit, _)| !error.contains(unit));
            assert_eq!(missing, None, "{error}");
        }
    }

    #[test]
    fn shows_three_digits() {
        let shown = [0, 1023, 1024, 100 << 20, (3 << 29) + 5].map(|n| Bytes(n).to_string());
        assert_eq!(shown, ["0 B", "1023 B", "1.00 KiB", "100 MiB", "1.50 GiB"]);
    }
}
