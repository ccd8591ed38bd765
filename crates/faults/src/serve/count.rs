//! How much of a program is resident and counts against its run's limit.
//!
//! Of most programs that is all anonymous memory, of which the kernel keeps a count. Of one that names a range, what is present there must be
//! counted page by page, so it is done now and then, and between two counts what else the program has is taken to be as it was.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use super::program::Program;
use crate::maps;
use crate::pagemap;

/// A count may take this share of the time between two.
const COUNT_REST: u32 = 32;
/// And this share, when what the program has resident has changed by so many pages since.
const RECOUNT_REST: u32 = 4;
const RECOUNT_PAGES: u64 = 1024;
/// However costly a count is, the next is not later than this.
const COUNT_WAIT_MAX: Duration = Duration::from_secs(2);

/// Seven numbers.
const STATM_BYTES_MAX: usize = 7 * 21;

/// What is seen of a program.
#[derive(Debug, Default)]
pub(super) struct MemoryUsage {
    /// All its address space, in pages: if it has changed, its areas may have.
    pub size: u64,
    /// Resident pages that count.
    pub counted: u64,
}

/// The counts of a program that names a range.
#[derive(Debug)]
pub(super) struct ResidentCounter {
    /// Resident pages outside the range, by the last count; and all that there were then.
    others: u64,
    anonymous: u64,
    /// The next count, if nothing has changed, and if much has.
    next: Instant,
    next_if_changed: Instant,
    /// Where the kernel tells its sizes, open: runs near their limit are looked at every millisecond.
    statm: Option<(Asked, File)>,
}

/// A process, and a thread that lives as long as it does.
type Asked = (u32, u32);

impl ResidentCounter {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self { others: 0, anonymous: 0, next: now, next_if_changed: now, statm: None }
    }

    /// Look at a program.
    pub(super) fn usage(&mut self, program: &Program) -> Option<MemoryUsage> {
        let (size, anonymous) = self.sizes(program)?;
        let range = program.bounds().paged_range;
        if range.is_empty() {
            return Some(MemoryUsage { size, counted: anonymous });
        }
        let now = Instant::now();
        let has_changed = anonymous.abs_diff(self.anonymous) > RECOUNT_PAGES;
        if now >= self.next || has_changed && now >= self.next_if_changed {
            // Of a program that does not let itself be counted all counts.
            let counted = present(program).unwrap_or(anonymous);
            self.others = anonymous.saturating_sub(counted);
            self.anonymous = anonymous;
            let (cost, now) = (now.elapsed(), Instant::now());
            self.next = now + (cost * COUNT_REST).min(COUNT_WAIT_MAX);
            self.next_if_changed = now + (cost * RECOUNT_REST).min(COUNT_WAIT_MAX);
        }
        Some(MemoryUsage { size, counted: anonymous.saturating_sub(self.others) })
    }

    /// Its size and its resident anonymous pages.
    fn sizes(&mut self, program: &Program) -> Option<(u64, u64)> {
        let asked = program.identity();
        if self.statm.as_ref().is_none_or(|(of, _)| *of != asked) {
            self.statm = Some((asked, program.proc_file("statm").ok()?));
        }
        let (_, file) = self.statm.as_ref()?;
        let mut text = [0; STATM_BYTES_MAX];
        // Once it has ended there is nothing to be read.
        let length = file.read_at(&mut text, 0).ok()?;
        sizes_in(std::str::from_utf8(&text[..length]).ok()?)
    }
}

/// Size and resident anonymous pages in the text of `/proc/PID/statm`.
fn sizes_in(statm: &str) -> Option<(u64, u64)> {
    let mut numbers = statm.split_ascii_whitespace().filter_map(|word| word.parse::<u64>().ok());
    let (size, resident, shared) = (numbers.next()?, numbers.next()?, numbers.next()?);
    Some((size, resident.saturating_sub(shared)))
}

/// Present pages of the range that it names.
fn present(program: &Program) -> Option<u64> {
    let range = program.bounds().paged_range;
    let page = aquifer_pager::PAGE_BYTES as u64;
    let mut count = 0;
    let file = program.proc_file("pagemap").ok()?;
    pagemap::present(&file, range.start / page..range.end / page, u64::MAX, |pages| {
        count += pages.end - pages.start;
    })
    .ok()?;
    Some(count)
}

/// Pages that count, those shared with relatives in part, so that the sum over a run is right.
pub(super) fn shared_pages(program: &Program) -> Option<u64> {
    let range = program.bounds().paged_range;
    if !range.is_empty() {
        return Some(maps::shared_pages(&program.read_proc("smaps")?, &range));
    }
    let text = program.read_proc("smaps_rollup")?;
    let text = std::str::from_utf8(&text).ok()?;
    let line = text.lines().find(|line| line.starts_with("Pss_Anon:"))?;
    let kilobytes: u64 = line.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(kilobytes / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shared_does_not_count() {
        assert_eq!(sizes_in("1000 300 100 7 0 200 0\n"), Some((1000, 200)));
        assert_eq!(sizes_in("1000 100 300 7 0 200 0\n"), Some((1000, 0)), "two numbers of different moments");
        assert_eq!(sizes_in(""), None);
    }
}
