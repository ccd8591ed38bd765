//! The canary: a page that is missing in each forked child, and that identifies a program's memory.

use std::fs::File;
use std::os::unix::fs::FileExt;

use aquifer_pager::{PAGE_BYTES, PageNumber};

use crate::kernel::FillOutcome;
use crate::uffd::Userfaultfd;

/// The canary of one program.
///
/// A forked child reads its canary before anything else, and says hello with the number in it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Canary {
    /// The page, in the memory of the program.
    pub page: PageNumber,
    /// The number of the program.
    pub number: u64,
}

impl Canary {
    /// Fills the canary, if it is missing, with the number of the program.
    pub fn fill(self, uffd: &Userfaultfd) -> FillOutcome {
        let mut bytes = [0; PAGE_BYTES];
        bytes[..8].copy_from_slice(&self.number.to_ne_bytes());
        uffd.copy_page(self.page, &bytes)
    }

    /// Whether a process has the memory of the program. The canary must be filled.
    pub fn is_in(self, pid: u32) -> bool {
        let mut bytes = [0; 8];
        let at = self.page * PAGE_BYTES as u64;
        let found =
            File::open(format!("/proc/{pid}/mem")).and_then(|memory| memory.read_exact_at(&mut bytes, at));
        found.is_ok() && bytes == self.number.to_ne_bytes()
    }
}
