//! The memory that this machine has available for its daemons.

#![forbid(unsafe_code)]

mod cgroup;

use std::io;

/// The kernel's file with the available memory.
const MEMINFO: &str = "/proc/meminfo";

/// Memory that this process can use without swapping, in bytes: the kernel's estimate, or the rest
/// below the limits of the memory cgroups, whichever is smaller.
///
/// # Errors
/// If the kernel's file cannot be read or parsed.
pub fn available_bytes() -> io::Result<u64> {
    let text = std::fs::read_to_string(MEMINFO)?;
    let available = parse_available(&text).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{MEMINFO} has no valid MemAvailable"))
    })?;
    Ok(cgroup::remaining_bytes().map_or(available, |remaining| remaining.min(available)))
}

fn parse_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_parsed_and_malformed_text_is_refused() {
        let text = "MemTotal:       100 kB\nMemAvailable:   25 kB\nBuffers: 1 kB\n";
        assert_eq!(parse_available(text), Some(25 * 1024));
        for odd in ["", "MemTotal: 5 kB", "MemAvailable: 5", "MemAvailable: -5 kB", "MemAvailable: x kB"] {
            assert_eq!(parse_available(odd), None, "{odd}");
        }
        assert_eq!(parse_available("MemAvailable: 18446744073709551615 kB"), None);
        assert!(available_bytes().expect("this machine has /proc/meminfo") > 0);
    }
}
