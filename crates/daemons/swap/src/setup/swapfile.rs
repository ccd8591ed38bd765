//! Swap files, as peers of benches.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::SetupError;
use super::area::{self, PAGE_BYTES};
use super::record::{SetupRecord, SetupStep};

/// Folders that are on a disk of most machines.
const FOLDERS: [&str; 4] = ["/var/tmp", "/var/lib", "/tmp", "/root"];

/// Magic numbers of file systems without swap files: tmpfs, ramfs, overlayfs, NFS, 9p, FUSE,
/// squashfs, ZFS.
const WITHOUT_SWAP: [i64; 8] =
    [0x0102_1994, 0x8584_58f6, 0x794c_7630, 0x6969, 0x0102_1997, 0x6573_5546, 0x7371_7368, 0x2fc1_2fc1];

/// Creates a swap file of this size, and starts to swap on it. Adds the file to the record first.
pub fn create(record: &mut SetupRecord, bytes: u64) -> Result<(), SetupError> {
    let folder = FOLDERS
        .iter()
        .map(Path::new)
        .find(|folder| can_hold_swap(folder))
        .ok_or_else(|| SetupError::NoSwapFolder { tried: FOLDERS.join(", ") })?;
    let path = folder.join(record.name());
    record.add(SetupStep::SwapFile(path.clone()))?;
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .map_err(SetupError::io("create the swap file", &path))?;
    let pages = bytes.div_ceil(PAGE_BYTES);
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, pages * PAGE_BYTES)
        .map_err(io::Error::from)
        .map_err(SetupError::io("allocate the swap file", &path))?;
    area::write_header(&file, pages).map_err(SetupError::io("write the swap file", &path))?;
    match area::swap_on(&path, false) {
        // Some file systems cannot swap on blocks that were allocated and never written.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            fill(&file, pages).map_err(SetupError::io("fill the swap file", &path))?;
            area::swap_on(&path, false).map_err(SetupError::io("start swapping on", &path))
        }
        result => result.map_err(SetupError::io("start swapping on", &path)),
    }
}

/// Stops swapping on the file and removes it, if it exists.
pub(super) fn remove(path: &Path) -> Result<(), SetupError> {
    area::swap_off(path).map_err(SetupError::io("stop swapping on", path))?;
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(SetupError::io("remove the swap file", path)(error))
        }
        _ => Ok(()),
    }
}

fn can_hold_swap(folder: &Path) -> bool {
    rustix::fs::statfs(folder).is_ok_and(|stat| !WITHOUT_SWAP.contains(&stat.f_type))
}

fn fill(file: &File, pages: u64) -> io::Result<()> {
    let zeros = vec![0; 1 << 20];
    let mut left = pages * PAGE_BYTES;
    let mut writer: &File = file;
    while left > 0 {
        let now = usize::try_from(left).unwrap_or(zeros.len()).min(zeros.len());
        writer.write_all(&zeros[..now])?;
        left -= now as u64;
    }
    area::write_header(file, pages)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_file_systems_hold_no_swap() {
        assert!(!can_hold_swap(Path::new("/proc/no-such-folder")));
        assert!(!can_hold_swap(Path::new("/dev/shm")) || !Path::new("/dev/shm").exists());
    }

    #[test]
    fn removing_a_missing_file_succeeds_for_root() {
        let nowhere = Path::new("/var/tmp/aquifer-setup-0-0-0");
        if rustix::process::geteuid().is_root() {
            assert!(remove(nowhere).is_ok());
        } else {
            assert!(remove(nowhere).is_err());
        }
    }
}
