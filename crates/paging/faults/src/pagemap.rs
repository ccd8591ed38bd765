//! Reads of `/proc/PID/pagemap`: the pages of a program that are present, and those that it shares.
//!
//! `PAGEMAP_SCAN` skips holes without a check of each page.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

use aquifer_pager::{PAGE_BYTES, PageNumber};
use aquifer_uffd::{PAGE_IS_FILE, PAGE_IS_PRESENT, PAGEMAP_SCAN, page_region, pm_scan_arg};

const PAGE: u64 = PAGE_BYTES as u64;
/// Maximum number of regions that one call reports.
const REGIONS_MAX: usize = 512;

/// Calls `report` with each range of consecutive present private pages in `range`, in ascending
/// order.
///
/// Stops after `max` pages, and returns the page at which the scan ended.
///
/// # Errors
/// If the process has ended, or Linux is older than 6.7.
pub fn present(
    pagemap: BorrowedFd<'_>,
    range: Range<PageNumber>,
    max: u64,
    mut report: impl FnMut(Range<PageNumber>),
) -> io::Result<PageNumber> {
    let mut regions = [page_region { start: 0, end: 0, categories: 0 }; REGIONS_MAX];
    let (mut at, mut left) = (range.start, max);
    while at < range.end && left > 0 {
        let mut argument = pm_scan_arg {
            size: size_of::<pm_scan_arg>() as u64,
            flags: 0,
            start: at * PAGE,
            end: range.end * PAGE,
            walk_end: 0,
            vec: regions.as_mut_ptr() as u64,
            vec_len: REGIONS_MAX as u64,
            max_pages: left,
            category_inverted: PAGE_IS_FILE,
            category_mask: PAGE_IS_PRESENT | PAGE_IS_FILE,
            category_anyof_mask: 0,
            return_mask: PAGE_IS_PRESENT,
        };
        // SAFETY: the argument has the layout that this request reads and writes, and names memory
        // for as many regions as it says.
        let count = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut argument) };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        for region in &regions[..count.min(REGIONS_MAX)] {
            let pages = region.start / PAGE..region.end / PAGE;
            left = left.saturating_sub(pages.end - pages.start);
            report(pages);
        }
        let next = argument.walk_end / PAGE;
        if next <= at {
            break;
        }
        at = next;
    }
    Ok(at)
}

/// Whether no process has the memory of the file any more.
///
/// Checked by a read at an odd offset: the kernel refuses it if the memory exists, before it waits
/// for a lock.
pub fn is_memory_gone(file: BorrowedFd<'_>) -> bool {
    rustix::io::pread(file, &mut [0; 8], 1) != Err(rustix::io::Errno::INVAL)
}

/// Maximum number of entries of the file in one read.
const ENTRIES_MAX: usize = 8192;
/// Bit of an entry whose page is present.
const ENTRY_IS_PRESENT: u64 = 1 << 63;
const ENTRY_IS_FILE: u64 = 1 << 61;
const ENTRY_IS_EXCLUSIVE: u64 = 1 << 56;

/// Appends the pages of a range that are present and that no other process shares.
///
/// # Errors
/// If the file cannot be read.
pub fn exclusive(
    file: BorrowedFd<'_>,
    range: Range<PageNumber>,
    out: &mut Vec<PageNumber>,
) -> io::Result<()> {
    const WANTED: u64 = ENTRY_IS_PRESENT | ENTRY_IS_EXCLUSIVE;
    let mut buffer = vec![0; ENTRIES_MAX * 8];
    let mut page = range.start;
    while page < range.end {
        let entries = ENTRIES_MAX.min(usize::try_from(range.end - page).unwrap_or(usize::MAX));
        let length = rustix::io::pread(file, &mut buffer[..entries * 8], page * 8)?;
        if length < 8 {
            break;
        }
        for entry in buffer[..length].chunks_exact(8) {
            let entry = u64::from_ne_bytes(entry.try_into().expect("8 bytes"));
            if entry & (WANTED | ENTRY_IS_FILE) == WANTED {
                out.push(page);
            }
            page += 1;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    const PAGES: usize = 2000;

    /// Untouched memory, and the number of its first page.
    fn memory() -> (*mut u8, PageNumber) {
        // SAFETY: a new mapping, which is never unmapped.
        let address = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let address = libc::mmap(
                std::ptr::null_mut(),
                PAGES * PAGE_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            );
            assert_ne!(address, libc::MAP_FAILED);
            libc::madvise(address, PAGES * PAGE_BYTES, libc::MADV_NOHUGEPAGE);
            address.cast::<u8>()
        };
        (address, address as u64 / PAGE)
    }

    fn scan(first: PageNumber, pages: Range<u64>, max: u64) -> (Vec<u64>, u64) {
        let mut found = Vec::new();
        let file = std::fs::File::open("/proc/self/pagemap").unwrap();
        let end = present(file.as_fd(), first + pages.start..first + pages.end, max, |pages| {
            found.extend(pages.map(|page| page - first));
        });
        (found, end.unwrap() - first)
    }

    #[test]
    fn exactly_the_pages_that_were_touched_are_present() {
        let (memory, first) = memory();
        assert_eq!(scan(first, 0..PAGES as u64, u64::MAX), (vec![], PAGES as u64));
        // More ranges than one call reports.
        let touched: Vec<u64> = (0..PAGES as u64).filter(|page| page % 3 == 1).collect();
        for page in &touched {
            // SAFETY: inside the mapping.
            unsafe { memory.add(usize::try_from(page * PAGE).unwrap()).write_volatile(1) };
        }
        assert_eq!(scan(first, 0..PAGES as u64, u64::MAX), (touched.clone(), PAGES as u64));
        let (some, end) = scan(first, 0..PAGES as u64, 100);
        assert_eq!(some, touched[..100]);
        assert!(end > touched[99] && end <= touched[100], "{end}");
        assert_eq!(scan(first, end..PAGES as u64, u64::MAX).0, touched[100..]);
        assert_eq!(scan(first, 4..4, u64::MAX), (vec![], 4));
    }
}
