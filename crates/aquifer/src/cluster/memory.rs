//! How much memory this machine has to spare.

use std::io;

const MEMINFO: &str = "/proc/meminfo";

/// What could be used without swapping, as the kernel estimates it.
pub fn available_bytes() -> io::Result<u64> {
    let text = std::fs::read_to_string(MEMINFO)?;
    parse_available(&text).ok_or_else(|| io::Error::other(format!("{MEMINFO} says nothing of MemAvailable")))
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
    fn the_kernels_estimate_is_read() {
        assert_eq!(parse_available("MemFree:  1 kB\nMemAvailable:   2048 kB\n"), Some(2 << 20));
        for text in [
            "",
            "MemAvailable:",
            "MemAvailable: x kB",
            "MemAvailable: 5",
            "MemAvailable: 18446744073709551615 kB",
        ] {
            assert_eq!(parse_available(text), None, "{text}");
        }
        assert!(available_bytes().unwrap() > 0);
    }
}
