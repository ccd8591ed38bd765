//! Sizes as text.

/// One mebibyte.
pub const MIB: u64 = 1 << 20;

/// A size in MiB, or in KiB below 1 MiB.
pub fn show_bytes(bytes: u64) -> String {
    let bytes = float(bytes);
    if bytes >= 1048576.0 {
        format!("{:.0} MiB", bytes / 1048576.0)
    } else {
        format!("{:.0} KiB", bytes / 1024.0)
    }
}

/// A count as a float. The conversion keeps 52 bits, which suffice for reports.
pub fn float(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_shown_in_the_unit_that_fits() {
        assert_eq!(show_bytes(4096), "4 KiB");
        assert_eq!(show_bytes(MIB - 1024), "1023 KiB");
        assert_eq!(show_bytes(MIB), "1 MiB");
        assert_eq!(show_bytes(3 << 30), "3072 MiB");
        assert_eq!(show_bytes(0), "0 KiB");
    }
}
