//! The memory that this machine has available and can lend.

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

/// Memory that can be lent in all. `available` does not include the pages that the lent memory has
/// already allocated. `keep_free` stays with the machine.
pub(crate) const fn affordable_bytes(allocated: u64, available: u64, keep_free: u64) -> u64 {
    allocated.saturating_add(available).saturating_sub(keep_free)
}

/// Memory to lend next, if `requested` is requested and `lent` is lent.
///
/// `affordable` changes all the time, so a change because of it is made only if it is at least
/// `step`.
pub(crate) fn next_lent_bytes(requested: u64, lent: u64, affordable: u64, step: u64) -> u64 {
    let next = requested.min(affordable);
    let fulfils_request = requested < lent || next == requested && lent < requested;
    if fulfils_request || next.abs_diff(lent) >= step { next } else { lent }
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
    fn allocated_pages_of_the_lent_memory_count_as_available() {
        assert_eq!(affordable_bytes(1, 6, 2), 5);
        assert_eq!(affordable_bytes(1, 2, 9), 0);
        assert_eq!(affordable_bytes(u64::MAX, 2, 0), u64::MAX);
    }

    #[test]
    fn lending_follows_the_available_memory_in_steps() {
        assert_eq!(next_lent_bytes(8, 8, 20, 4), 8, "the request is fulfilled");
        assert_eq!(next_lent_bytes(8, 0, 8, 4), 8);
        for (affordable, next) in [(46, 46), (47, 50), (50, 50), (53, 50), (54, 54)] {
            assert_eq!(
                next_lent_bytes(100, 50, affordable, 4),
                next,
                "a change smaller than a step is not made: {affordable}"
            );
        }
        assert_eq!(
            next_lent_bytes(50, 50, 47, 4),
            50,
            "the request is fulfilled, and the change is smaller than a step"
        );
        assert_eq!(next_lent_bytes(50, 50, 46, 4), 46);
        assert_eq!(next_lent_bytes(51, 50, 51, 4), 51, "a change that fulfils the request may be small");
        assert_eq!(next_lent_bytes(30, 50, 40, 4), 30, "a request for less is fulfilled");
        assert_eq!(next_lent_bytes(49, 50, 48, 4), 48);
    }

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
