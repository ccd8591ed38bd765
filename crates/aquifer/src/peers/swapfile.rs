//! Swap files, and the header that makes a file or a device a swap area.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::PeerError;
use super::record::{Record, Step};

const PAGE_BYTES: u64 = 4096;
/// The highest priority there is, so that the kernel fills this area before any other.
const PRIORITY_MAX: libc::c_int = 0x7fff;
const SWAP_FLAG_PREFER: libc::c_int = 0x8000;

/// Folders that are on a disk on most machines.
const FOLDERS: [&str; 4] = ["/var/tmp", "/var/lib", "/tmp", "/root"];

/// File systems that hold no swap files, by their magic numbers: tmpfs, ramfs, overlayfs, NFS, 9p, FUSE,
/// squashfs, ZFS.
const WITHOUT_SWAP: [i64; 8] =
    [0x0102_1994, 0x8584_58f6, 0x794c_7630, 0x6969, 0x0102_1997, 0x6573_5546, 0x7371_7368, 0x2fc1_2fc1];

pub(super) fn create(record: &mut Record, bytes: u64) -> Result<(), PeerError> {
    let folder = FOLDERS
        .iter()
        .map(Path::new)
        .find(|folder| can_hold_swap(folder))
        .ok_or_else(|| PeerError::NoSwapFolder { tried: FOLDERS.join(", ") })?;
    let path = folder.join(record.name());
    record.add(Step::SwapFile(path.clone()))?;
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .map_err(PeerError::io("create the swap file", &path))?;
    let pages = bytes.div_ceil(PAGE_BYTES);
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, pages * PAGE_BYTES)
        .map_err(io::Error::from)
        .map_err(PeerError::io("allocate the swap file", &path))?;
    write_header(&file, pages).map_err(PeerError::io("write the swap file", &path))?;
    match swap_on(&path) {
        // Some file systems do not take space that was allocated but never written.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            fill(&file, pages).map_err(PeerError::io("fill the swap file", &path))?;
            swap_on(&path).map_err(PeerError::io("swap on", &path))
        }
        result => result.map_err(PeerError::io("swap on", &path)),
    }
}

/// Takes the file out of use and removes it; that it is gone already is fine.
pub(super) fn remove(path: &Path) -> Result<(), PeerError> {
    swap_off(path).map_err(PeerError::io("stop swapping on", path))?;
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(PeerError::io("remove the swap file", path)(error))
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
    write_header(file, pages)?;
    file.sync_all()
}

/// Writes the first page of a swap area of `pages` pages: what mkswap does.
pub(super) fn write_header(file: &File, pages: u64) -> io::Result<()> {
    file.write_all_at(&header(pages), 0)
}

fn header(pages: u64) -> Vec<u8> {
    // linux/swap.h, union swap_header: 1024 bytes for a boot loader, then version, the last page's number,
    // the number of bad pages; the magic closes the page.
    const VERSION_AT: usize = 1024;
    const LAST_PAGE_AT: usize = 1028;
    const MAGIC: &[u8] = b"SWAPSPACE2";
    let mut page = vec![0; 4096];
    let last_page = u32::try_from(pages - 1).unwrap_or(u32::MAX);
    page[VERSION_AT..VERSION_AT + 4].copy_from_slice(&1u32.to_ne_bytes());
    page[LAST_PAGE_AT..LAST_PAGE_AT + 4].copy_from_slice(&last_page.to_ne_bytes());
    let magic_at = page.len() - MAGIC.len();
    page[magic_at..].copy_from_slice(MAGIC);
    page
}

pub(super) fn swap_on(path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    // SAFETY: the path is a C string that outlives the call.
    check(unsafe { libc::swapon(path.as_ptr(), SWAP_FLAG_PREFER | PRIORITY_MAX) })
}

/// Stops swapping on `path`; that it is not in use, or not there, is fine.
pub(super) fn swap_off(path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    // SAFETY: the path is a C string that outlives the call.
    match check(unsafe { libc::swapoff(path.as_ptr()) }) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT)) => Ok(()),
        result => result,
    }
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(PathBuf::from(path).as_os_str().as_bytes())?)
}

fn check(returned: libc::c_int) -> io::Result<()> {
    if returned == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_is_what_the_kernel_reads() {
        let page = header(256);
        assert_eq!(page.len(), 4096);
        assert_eq!(&page[4086..], b"SWAPSPACE2");
        assert_eq!(page[1024..1032], [1u32.to_ne_bytes(), 255u32.to_ne_bytes()].concat());
        assert!(page[..1024].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn memory_file_systems_hold_no_swap() {
        assert!(!can_hold_swap(Path::new("/proc/no-such-folder")));
        assert!(!can_hold_swap(Path::new("/dev/shm")) || !Path::new("/dev/shm").exists());
    }

    #[test]
    fn taking_away_what_is_not_there_is_fine() {
        let nowhere = Path::new("/var/tmp/aquifer-peer-0-0-0");
        if rustix::process::geteuid().is_root() {
            assert!(remove(nowhere).is_ok());
        } else {
            assert!(remove(nowhere).is_err());
        }
    }
}
