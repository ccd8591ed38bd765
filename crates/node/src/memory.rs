//! How much memory this machine has, and could lend.

mod cgroup;

use std::io;

/// Where the kernel tells it.
const MEMINFO: &str = "/proc/meminfo";

/// Bytes that this process could use without swapping: the kernel's own estimate, or what its memory cgroup leaves, whichever is less.
///
/// # Errors
/// If the kernel does not tell.
pub fn available_bytes() -> io::Result<u64> {
    let text = std::fs::read_to_string(MEMINFO)?;
    let available = parse_available(&text).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{MEMINFO} does not tell MemAvailable"))
    })?;
    Ok(cgroup::left_bytes().map_or(available, |left| left.min(available)))
}

/// What can be lent in all: pages that the lent memory has already are taken from what is available, and the rest of it is promised. `keep_free` is left to the machine.
pub(crate) const fn affordable_bytes(allocated: u64, available: u64, keep_free: u64) -> u64 {
    allocated.saturating_add(available).saturating_sub(keep_free)
}

/// What to lend, if `wanted` is asked for and `lent` is lent. What can be afforded goes up and down all the time: what it makes different must be worth a `step`, or it
/// stays as it is.
pub(crate) fn settled_bytes(wanted: u64, lent: u64, affordable: u64, step: u64) -> u64 {
    let settled = wanted.min(affordable);
    let is_wish = wanted < lent || settled == wanted && lent < wanted;
    if is_wish || settled.abs_diff(lent) >= step { settled } else { lent }
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
    fn what_is_promised_is_counted() {
        assert_eq!(affordable_bytes(1, 6, 2), 5);
        assert_eq!(affordable_bytes(1, 2, 9), 0);
        assert_eq!(affordable_bytes(u64::MAX, 2, 0), u64::MAX);
    }

    #[test]
    fn lending_follows_what_is_there_but_not_every_breath() {
        assert_eq!(settled_bytes(8, 8, 20, 4), 8, "there is plenty");
        assert_eq!(settled_bytes(8, 0, 8, 4), 8);
        for (affordable, settled) in [(46, 46), (47, 50), (50, 50), (53, 50), (54, 54)] {
            assert_eq!(
                settled_bytes(100, 50, affordable, 4),
                settled,
                "only if it is worth it: {affordable}"
            );
        }
        assert_eq!(settled_bytes(50, 50, 47, 4), 50, "all that is wanted is lent");
        assert_eq!(settled_bytes(50, 50, 46, 4), 46);
        assert_eq!(settled_bytes(51, 50, 51, 4), 51, "the whole wish is worth it");
        assert_eq!(settled_bytes(30, 50, 40, 4), 30, "a wish for less is heeded");
        assert_eq!(settled_bytes(49, 50, 48, 4), 48);
    }

    #[test]
    fn meminfo_is_read_and_odd_ones_are_not() {
        let text = "MemTotal:       100 kB\nMemAvailable:   25 kB\nBuffers: 1 kB\n";
        assert_eq!(parse_available(text), Some(25 * 1024));
        for odd in ["", "MemTotal: 5 kB", "MemAvailable: 5", "MemAvailable: -5 kB", "MemAvailable: x kB"] {
            assert_eq!(parse_available(odd), None, "{odd}");
        }
        assert_eq!(parse_available("MemAvailable: 18446744073709551615 kB"), None);
        assert!(available_bytes().expect("this machine tells") > 0);
    }
}
