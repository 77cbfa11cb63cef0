//! Free bytes of a memory that a step may plan with.

use super::sizer::FreeMemory;
use crate::Result;
use crate::memory::{self, Usage};

/// Part of a device's or an arena's free memory that is not planned with: allocators round up.
const DEVICE_MARGIN: f64 = 0.01;
/// Part of a machine's own free memory that is not planned with: other processes use it too, and at its end
/// the system kills processes instead of refusing memory.
const HOST_MARGIN: f64 = 0.2;

/// Returns the bytes free for a step, less those `reserved` for later.
///
/// # Errors
/// When the memory has no limit and the system does not report its free bytes.
pub(crate) fn free_memory(usage: &Usage, reserved: u64) -> Result<FreeMemory> {
    let (available, margin) = match usage.available {
        Some(available) => (available, DEVICE_MARGIN),
        None => (memory::host()?.available, HOST_MARGIN),
    };
    let available = available.0.saturating_sub(reserved);
    Ok(FreeMemory { available, budget: (available as f64 * (1.0 - margin)) as u64 })
}
