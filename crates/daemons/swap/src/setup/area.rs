//! Swap areas: the header of a file or device, `swapon` and `swapoff`.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

pub const PAGE_BYTES: u64 = 4096;
/// The highest priority: the kernel fills this area before any other.
const PRIORITY_MAX: libc::c_int = 0x7fff;
const SWAP_FLAG_PREFER: libc::c_int = 0x8000;
/// The kernel discards free pages: all of them at `swapon`, and others when they become free.
const SWAP_FLAG_DISCARD: libc::c_int = 0x10000;

/// Writes the first page of a swap area of `pages` pages, as mkswap does.
pub fn write_header(file: &File, pages: u64) -> io::Result<()> {
    file.write_all_at(&header(pages), 0)
}

fn header(pages: u64) -> Vec<u8> {
    // linux/swap.h, union swap_header: 1024 bytes for a boot loader, then version, the last page's
    // number, the number of bad pages; the magic closes the page.
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

/// Starts to swap on `path`, before all other areas. With `discards`, the kernel discards free
/// pages.
pub fn swap_on(path: &Path, discards: bool) -> io::Result<()> {
    let path = c_path(path)?;
    let discard = if discards { SWAP_FLAG_DISCARD } else { 0 };
    // SAFETY: the path is a C string that outlives the call.
    check(unsafe { libc::swapon(path.as_ptr(), SWAP_FLAG_PREFER | PRIORITY_MAX | discard) })
}

/// Stops swapping on `path`, if it exists and is in use.
pub fn swap_off(path: &Path) -> io::Result<()> {
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
}
