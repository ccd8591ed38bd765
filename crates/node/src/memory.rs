//! How much memory this machine could lend.

use std::io;

/// Where the kernel tells it.
const MEMINFO: &str = "/proc/meminfo";

/// Bytes that could be used without swapping, by the kernel's own estimate.
pub(crate) fn available_bytes() -> io::Result<u64> {
    let text = std::fs::read_to_string(MEMINFO)?;
    parse_available(&text).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{MEMINFO} does not tell MemAvailable"))
    })
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
