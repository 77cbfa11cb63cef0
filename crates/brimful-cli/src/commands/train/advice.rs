//! The flag that mends a step that ran out of memory.

use std::error::Error as StdError;
use std::fmt;

use brimful::{Error, Size};

/// The library's error, with the flag that mends it where there is one.
pub(super) fn on(cause: Error, size: Size, batch_size: usize) -> anyhow::Error {
    let remedy = match size {
        Size::Fixed(size) if size > 1 => format!("try --micro-batch {}", size.div_ceil(2)),
        Size::Count(count) if count < batch_size => {
            format!("try --micro-batches {}", (2 * count).min(batch_size))
        }
        _ => return cause.into(),
    };
    match cause.out_of_memory() {
        Some(_) => Advised { cause, remedy }.into(),
        None => cause.into(),
    }
}

#[derive(Debug)]
struct Advised {
    cause: Error,
    remedy: String,
}

impl fmt::Display for Advised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.cause, self.remedy)
    }
}

impl StdError for Advised {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&self.cause)
    }
}
