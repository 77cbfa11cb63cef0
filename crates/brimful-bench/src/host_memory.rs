//! Host memory of this process, as Linux reports it.

use std::fs;

/// Resets the peak.
pub(crate) fn forget_peak() {
    // If the system refuses, the peak is that of the process so far, which is never less.
    let _ = fs::write("/proc/self/clear_refs", "5");
}

/// Returns the bytes in use now.
pub(crate) fn resident() -> Option<u64> {
    told("VmRSS:")
}

/// Returns the peak in bytes.
pub(crate) fn peak() -> Option<u64> {
    told("VmHWM:")
}

fn told(field: &str) -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    let kibibytes: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kibibytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_taken_for_a_while_is_in_the_peak() {
        const BYTES: usize = 64 << 20;
        let before = resident().expect("Linux tells");
        drop(std::hint::black_box(vec![1_u8; BYTES]));
        let most = peak().expect("Linux tells");
        assert!(most >= before + BYTES as u64 * 9 / 10, "{most} after {before}");
        forget_peak();
        assert!(peak().expect("Linux tells") <= most);
    }
}
