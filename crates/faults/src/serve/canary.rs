//! The canary: a page that is missing in each forked child, and that identifies a program's memory.

use std::fs::File;
use std::os::unix::fs::FileExt;

use aquifer_pager::{PAGE_BYTES, PageNumber};

use crate::kernel::FillOutcome;
use crate::uffd::Userfaultfd;

/// Bit of an entry of `/proc/PID/pagemap`: the page is present.
const PRESENT: u64 = 1 << 63;
/// Bit of an entry: the page is in the host's swap.
const SWAPPED: u64 = 1 << 62;

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

    /// Whether a process has the memory of the program.
    ///
    /// Must not read a canary that is missing: the read would wait for the monitor of that process,
    /// which may be the caller.
    pub fn is_in(self, pid: u32) -> bool {
        let read = |file: &str, at: u64| {
            let mut bytes = [0; 8];
            let file = File::open(format!("/proc/{pid}/{file}")).ok()?;
            file.read_exact_at(&mut bytes, at).ok()?;
            Some(u64::from_ne_bytes(bytes))
        };
        let entry = read("pagemap", self.page * 8).unwrap_or(0);
        entry & (PRESENT | SWAPPED) != 0 && read("mem", self.page * PAGE_BYTES as u64) == Some(self.number)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{FromRawFd, OwnedFd};

    use super::*;
    use crate::kernel::FillStop;

    /// A userfaultfd of this process, and the address of a page that is registered with it.
    fn registered_page() -> Option<(Userfaultfd, usize)> {
        // SAFETY: creates a descriptor.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0)?;
        // SAFETY: nothing else owns the descriptor.
        let uffd = Userfaultfd::from(unsafe { OwnedFd::from_raw_fd(fd) });
        uffd.enable().ok()?;
        // SAFETY: a new mapping, which is never unmapped.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(address, libc::MAP_FAILED);
        let page = address as u64 / PAGE_BYTES as u64;
        uffd.register(page, page + 1).ok()?;
        Some((uffd, address as usize))
    }

    #[test]
    fn a_waiting_thread_reads_the_number_that_identifies_its_process() {
        let Some((uffd, address)) = registered_page() else {
            return aquifer_tests_support::skip("no userfaultfd that reports forks");
        };
        let own = std::process::id();
        let canary = Canary { page: address as u64 / PAGE_BYTES as u64, number: 0x0123_4567_89ab_cdef };
        assert!(!canary.is_in(own), "a missing canary is not read");
        // SAFETY: the address is mapped as long as the process lives.
        let reader = std::thread::spawn(move || unsafe { (address as *const u64).read_volatile() });
        assert_eq!(canary.fill(&uffd).stop, None);
        assert_eq!(reader.join().unwrap(), canary.number);
        assert!(canary.is_in(own));
        let other = Canary { number: 1, ..canary };
        assert_eq!(other.fill(&uffd).stop, Some(FillStop::Exists), "the first number stays");
        assert!(!other.is_in(own));
    }
}
