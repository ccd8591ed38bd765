//! The memory that this machine has, and how much of it is available for its daemons.

#![forbid(unsafe_code)]

mod cgroup;
mod pressure;

pub use cgroup::CgroupMemory;
pub use pressure::PressureWatch;

use std::io;
use std::path::PathBuf;

/// The kernel's file with the sizes of memory.
const MEMINFO: &str = "/proc/meminfo";
/// Environment variable with the path of a file that is read in place of [`MEMINFO`]. Tests have
/// memory run short by it.
const MEMINFO_VARIABLE: &str = "AQUIFER_MEMINFO";

/// Memory that this process can use without swapping, in bytes: the kernel's estimate, or the rest
/// below the limits of the memory cgroups, whichever is smaller.
///
/// # Errors
/// If the kernel's file cannot be read or parsed.
pub fn available_bytes() -> io::Result<u64> {
    let available = available_bytes_of_machine()?;
    let remaining = CgroupMemory::of_this_process().and_then(|cgroup| cgroup.remaining_bytes());
    Ok(remaining.map_or(available, |remaining| remaining.min(available)))
}

/// Memory that the processes of this machine can use without swapping, in bytes, by the kernel's
/// estimate.
///
/// # Errors
/// If the kernel's file cannot be read or parsed.
pub fn available_bytes_of_machine() -> io::Result<u64> {
    read("MemAvailable:")
}

/// The memory of this machine in bytes, or the smallest limit of the memory cgroups of this
/// process if that is less.
///
/// # Errors
/// If the kernel's file cannot be read or parsed.
pub fn total_bytes() -> io::Result<u64> {
    let total = read("MemTotal:")?;
    let limit = CgroupMemory::of_this_process().and_then(|cgroup| cgroup.limit_bytes());
    Ok(limit.map_or(total, |limit| limit.min(total)))
}

/// The kernel's files that say how long processes wait for memory (PSI): that of the machine, and
/// that of the memory cgroup of this process, as far as they exist.
#[must_use]
pub fn pressure_files() -> Vec<PathBuf> {
    let of_machine = PathBuf::from("/proc/pressure/memory");
    let of_cgroup = CgroupMemory::of_this_process().and_then(|cgroup| cgroup.pressure_file());
    [Some(of_machine), of_cgroup].into_iter().flatten().filter(|path| path.exists()).collect()
}

fn read(name: &str) -> io::Result<u64> {
    let path = std::env::var_os(MEMINFO_VARIABLE).unwrap_or_else(|| MEMINFO.into());
    let text = std::fs::read_to_string(path)?;
    parse(&text, name)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("{MEMINFO} has no valid {name}")))
}

/// Parses a line such as `MemTotal:  100 kB`, and returns the bytes.
fn parse(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_parsed_and_malformed_text_is_refused() {
        let text = "MemTotal:       100 kB\nMemAvailable:   25 kB\nBuffers: 1 kB\n";
        let available = |text: &str| parse(text, "MemAvailable:");
        assert_eq!((available(text), parse(text, "MemTotal:")), (Some(25 * 1024), Some(100 * 1024)));
        for odd in ["", "MemTotal: 5 kB", "MemAvailable: 5", "MemAvailable: -5 kB", "MemAvailable: x kB"] {
            assert_eq!(available(odd), None, "{odd}");
        }
        assert_eq!(available("MemAvailable: 18446744073709551615 kB"), None);
        let available = available_bytes().expect("this machine has /proc/meminfo");
        assert!(available > 0 && available <= total_bytes().expect("this machine has /proc/meminfo"));
    }
}
