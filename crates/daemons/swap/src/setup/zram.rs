//! Zram devices as swap areas, as peers of benches.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use super::record::{SetupRecord, SetupStep};
use super::{SetupError, area};

const PAGE_BYTES: u64 = 4096;
const HOT_ADD: &str = "/sys/class/zram-control/hot_add";
const HOT_REMOVE: &str = "/sys/class/zram-control/hot_remove";
/// Compression algorithms, the fastest to decompress first.
const ALGORITHMS: [&str; 3] = ["lz4", "lzo-rle", "lzo"];
/// Index of the store's largest size in mm_stat.
const MEM_USED_MAX_FIELD: usize = 4;

/// Sets up a device of `bytes` bytes, and starts to swap on it. Returns the device's number.
pub fn create(record: &mut SetupRecord, bytes: u64) -> Result<u32, SetupError> {
    let (number, added) = claim().ok_or(SetupError::NoZram)?;
    record.add(SetupStep::Zram { number, added })?;
    let offered = fs::read_to_string(attribute(number, "comp_algorithm")).unwrap_or_default();
    if let Some(algorithm) = choose_algorithm(&offered) {
        set(number, "comp_algorithm", algorithm)?;
    }
    let pages = bytes.div_ceil(PAGE_BYTES);
    set(number, "disksize", &(pages * PAGE_BYTES).to_string())?;
    let device = device(number);
    let file =
        OpenOptions::new().write(true).open(&device).map_err(SetupError::io("open the device", &device))?;
    area::write_header(&file, pages)
        .and_then(|()| file.sync_all())
        .map_err(SetupError::io("write the swap header to", &device))?;
    drop(file);
    area::swap_on(&device, false).map_err(SetupError::io("start swapping on", &device))?;
    Ok(number)
}

/// Stops swapping on a device and resets it, if it exists. Removes it if this setup has added it.
pub(super) fn remove(number: u32, added: bool) -> Result<(), SetupError> {
    let device = device(number);
    area::swap_off(&device).map_err(SetupError::io("stop swapping on", &device))?;
    if !device.exists() {
        return Ok(());
    }
    set(number, "reset", "1")?;
    if added {
        let path = Path::new(HOT_REMOVE);
        fs::write(path, number.to_string()).map_err(SetupError::io("remove the zram device by", path))?;
    }
    Ok(())
}

/// The peak memory of the device's compressed pages, in bytes.
pub fn store_peak_bytes(number: u32) -> Result<u64, SetupError> {
    let path = attribute(number, "mm_stat");
    let stat = fs::read_to_string(&path).map_err(SetupError::io("read", &path))?;
    parse_store_peak(&stat).ok_or_else(|| {
        SetupError::io("read the store's size from", &path)(io::Error::from(io::ErrorKind::InvalidData))
    })
}

/// Returns an unused device, and whether it was added. Adds one if the kernel permits, so that two
/// setups cannot claim the same device.
fn claim() -> Option<(u32, bool)> {
    if !Path::new("/sys/block/zram0").exists() && !Path::new(HOT_ADD).exists() {
        // The module may exist and not be loaded yet.
        let _ = std::process::Command::new("modprobe").arg("zram").output();
    }
    if let Some(number) = fs::read_to_string(HOT_ADD).ok().and_then(|text| text.trim().parse().ok()) {
        return Some((number, true));
    }
    (0..16)
        .find(|&number| {
            fs::read_to_string(attribute(number, "disksize")).is_ok_and(|size| size.trim() == "0")
        })
        .map(|number| (number, false))
}

/// The fastest of the algorithms in a comp_algorithm such as `[lzo-rle] lzo lz4`.
fn choose_algorithm(offered: &str) -> Option<&'static str> {
    ALGORITHMS
        .into_iter()
        .find(|wanted| offered.split_whitespace().any(|name| name.trim_matches(['[', ']']) == *wanted))
}

fn parse_store_peak(mm_stat: &str) -> Option<u64> {
    mm_stat.split_whitespace().nth(MEM_USED_MAX_FIELD)?.parse().ok()
}

fn set(number: u32, name: &str, value: &str) -> Result<(), SetupError> {
    let path = attribute(number, name);
    fs::write(&path, value).map_err(SetupError::io("set", &path))
}

fn attribute(number: u32, name: &str) -> PathBuf {
    PathBuf::from(format!("/sys/block/zram{number}/{name}"))
}

fn device(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/zram{number}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chooses_the_fastest_algorithm_offered() {
        assert_eq!(choose_algorithm("[lzo-rle] lzo lz4 zstd\n"), Some("lz4"));
        assert_eq!(choose_algorithm("lzo [lzo-rle]"), Some("lzo-rle"));
        assert_eq!(choose_algorithm("[zstd] lz4hc"), None);
        assert_eq!(choose_algorithm(""), None);
    }

    #[test]
    fn reads_the_stores_peak() {
        assert_eq!(parse_store_peak("  8192 4096 16384 0 20480 1 2 3 4\n"), Some(20480));
        assert_eq!(parse_store_peak("1 2 3 4"), None);
        assert_eq!(parse_store_peak("1 2 3 4 x"), None);
    }
}
