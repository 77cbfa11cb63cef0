//! Fills a card until a given number of bytes is left, so that it is as small as asked for.

use anyhow::{Result, ensure};
use brimful::Bytes;
use brimful::memory::Memory;
use tch::{Device, Kind, Tensor};

/// What fills the card, for as long as it is kept.
pub(super) fn leave(card: Device, limit: Bytes) -> Result<Tensor> {
    let memory = Memory::Accelerator(card);
    memory.empty_cache()?;
    let free = memory.usage()?.available.unwrap_or_default();
    ensure!(free >= limit, "{free} are free, so {limit} cannot be left");
    Ok(Tensor::f_empty([i64::try_from(free.0 - limit.0)?], (Kind::Uint8, card))?)
}
