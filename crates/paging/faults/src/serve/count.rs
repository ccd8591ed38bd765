//! Counting of the resident pages of a program that count against its run's limit.
//!
//! For most programs these are all anonymous pages, which the kernel counts. A program that names
//! a range needs a scan of that range. Scans are rare; between two scans, the number of pages
//! outside the range is assumed to be constant.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use super::process::{ProgramProcess, has_ended};
use super::program::Program;
use crate::maps;
use crate::pagemap;

/// Time between two scans, as a multiple of the duration of a scan.
const SCAN_INTERVAL_FACTOR: u32 = 32;
/// Time between two scans, as a multiple of the duration of a scan, if the number of resident pages
/// has changed by more than [`RESCAN_PAGES`].
const RESCAN_INTERVAL_FACTOR: u32 = 4;
/// Change of the number of resident pages that makes the next scan due earlier.
const RESCAN_PAGES: u64 = 1024;
/// Maximum time between two scans.
const SCAN_INTERVAL_MAX: Duration = Duration::from_secs(2);

/// Maximum length of `/proc/PID/statm` in bytes: seven numbers.
const STATM_BYTES_MAX: usize = 7 * 21;

/// Memory of a program at one moment, in pages.
#[derive(Debug, Default)]
pub(super) struct MemoryUsage {
    /// Size of the address space; if it has changed, the areas may have changed.
    pub size: u64,
    /// Resident pages that count against the limit.
    pub counted: u64,
}

/// Counts the resident pages of one program.
#[derive(Debug)]
pub(super) struct ResidentCounter {
    /// Resident pages outside the range at the last scan.
    outside: u64,
    /// All resident anonymous pages at the last scan.
    anonymous: u64,
    /// Time of the next scan.
    next_scan: Instant,
    /// Time of the next scan if [`RESCAN_PAGES`] pages have changed.
    next_scan_if_changed: Instant,
    /// The open `/proc/PID/statm`, and whether it is that of the worker. Kept open, because
    /// programs near their limit are sampled every millisecond. Opened again when the worker is
    /// known, which lives longer than the process.
    statm: Option<(bool, File)>,
}

impl ResidentCounter {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self { outside: 0, anonymous: 0, next_scan: now, next_scan_if_changed: now, statm: None }
    }

    /// Returns the memory of a program now; `None` if it has ended.
    pub(super) fn usage(&mut self, program: &Program) -> Option<MemoryUsage> {
        let (size, anonymous) = self.sizes(program)?;
        let range = program.bounds().paged_range;
        if range.is_empty() {
            return Some(MemoryUsage { size, counted: anonymous });
        }
        let now = Instant::now();
        let has_changed = anonymous.abs_diff(self.anonymous) > RESCAN_PAGES;
        if now >= self.next_scan || has_changed && now >= self.next_scan_if_changed {
            // If the scan fails, all resident pages count.
            let counted = present_pages(program).unwrap_or(anonymous);
            self.outside = anonymous.saturating_sub(counted);
            self.anonymous = anonymous;
            let (cost, now) = (now.elapsed(), Instant::now());
            self.next_scan = now + (cost * SCAN_INTERVAL_FACTOR).min(SCAN_INTERVAL_MAX);
            self.next_scan_if_changed = now + (cost * RESCAN_INTERVAL_FACTOR).min(SCAN_INTERVAL_MAX);
        }
        Some(MemoryUsage { size, counted: anonymous.saturating_sub(self.outside) })
    }

    /// Returns the size of the address space and the resident anonymous pages, both in pages.
    fn sizes(&mut self, program: &Program) -> Option<(u64, u64)> {
        let process = program.process()?;
        let of_worker = process.has_worker();
        if self.statm.as_ref().is_none_or(|(of, _)| *of != of_worker) {
            self.statm = Some((of_worker, process.open("statm").ok()?));
        }
        let sizes = read_sizes(&self.statm.as_ref()?.1)?;
        if sizes.0 > 0 {
            return Some(sizes);
        }
        // The first thread has ended, and others have not.
        self.statm = Some((of_worker, process.open_of_any_thread("statm").ok()?));
        read_sizes(&self.statm.as_ref()?.1)
    }
}

/// Reads the size and the resident anonymous pages from an open `/proc/PID/statm`; `None` if the
/// process has ended.
fn read_sizes(statm: &File) -> Option<(u64, u64)> {
    let mut text = [0; STATM_BYTES_MAX];
    let length = statm.read_at(&mut text, 0).ok()?;
    sizes_in(std::str::from_utf8(&text[..length]).ok()?)
}

/// Parses the size and the resident anonymous pages in the text of `/proc/PID/statm`.
fn sizes_in(statm: &str) -> Option<(u64, u64)> {
    let mut numbers = statm.split_ascii_whitespace().filter_map(|word| word.parse::<u64>().ok());
    let (size, resident, shared) = (numbers.next()?, numbers.next()?, numbers.next()?);
    Some((size, resident.saturating_sub(shared)))
}

/// Counts the present pages of the program's paged range.
fn present_pages(program: &Program) -> Option<u64> {
    let range = program.bounds().paged_range;
    let page = aquifer_pager::PAGE_BYTES as u64;
    let mut count = 0;
    pagemap::present(program.process()?.pagemap(), range.start / page..range.end / page, u64::MAX, |pages| {
        count += pages.end - pages.start;
    })
    .ok()?;
    Some(count)
}

/// Returns the proportional set size (PSS), in pages, of the memory that counts against the limit.
/// The sum over a run counts each shared page once.
///
/// 0 if the process has ended: other processes count the pages that they shared with it. `None` if
/// the size is not known.
pub(super) fn pss_pages(program: &Program) -> Option<u64> {
    let process = program.process()?;
    pss_pages_of(process, program).or_else(|| has_ended(process.pidfd(), Duration::ZERO).then_some(0))
}

fn pss_pages_of(process: &ProgramProcess, program: &Program) -> Option<u64> {
    let range = program.bounds().paged_range;
    if !range.is_empty() {
        return Some(maps::pss_pages(&process.read("smaps")?, &range));
    }
    let text = process.read("smaps_rollup")?;
    let text = std::str::from_utf8(&text).ok()?;
    let line = text.lines().find(|line| line.starts_with("Pss_Anon:"))?;
    let kilobytes: u64 = line.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(kilobytes / 4)
}

/// Returns the resident bytes of shared memory without a file: `MAP_SHARED`, System V.
pub(super) fn shared_bytes(process: &ProgramProcess) -> Option<u64> {
    shared_bytes_in(std::str::from_utf8(&process.read("status")?).ok()?)
}

/// Parses the resident bytes of shared memory in the text of `/proc/PID/status`.
fn shared_bytes_in(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("RssShmem:"))?;
    Some(line.split_ascii_whitespace().next()?.parse::<u64>().ok()? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_pages_do_not_count() {
        assert_eq!(sizes_in("1000 300 100 7 0 200 0\n"), Some((1000, 200)));
        assert_eq!(
            sizes_in("1000 100 300 7 0 200 0\n"),
            Some((1000, 0)),
            "the two numbers may be of different moments"
        );
        assert_eq!(sizes_in(""), None);
    }

    #[test]
    fn shared_memory_is_found_in_a_status() {
        assert_eq!(shared_bytes_in("Name:\tx\nRssShmem:\t     12 kB\n"), Some(12 << 10));
        assert_eq!(shared_bytes_in("Name:\tx\n"), None);
    }
}
