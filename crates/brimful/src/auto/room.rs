//! What a step may take of a memory.

use super::sizer::MemoryRoom;
use crate::Result;
use crate::memory::{self, Usage};

/// 1 % of a device's or an arena's free memory is not planned with: allocators round up.
const DEVICE_MARGIN: f64 = 0.01;
/// 20 % of a machine's own memory, which other processes use too, and whose end kills processes
/// instead of refusing memory.
const HOST_MARGIN: f64 = 0.2;

/// What is free for a step, less what is `reserved` for later.
///
/// # Errors
/// When the memory has no limit and the system does not say what is free.
pub(crate) fn room(usage: &Usage, reserved: u64) -> Result<MemoryRoom> {
    let (available, margin) = match usage.available {
        Some(available) => (available, DEVICE_MARGIN),
        None => (memory::host()?.available, HOST_MARGIN),
    };
    let available = available.0.saturating_sub(reserved);
    Ok(MemoryRoom { available, budget: (available as f64 * (1.0 - margin)) as u64 })
}
