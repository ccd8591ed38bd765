//! The canary: a page that is missing in each forked child, and that identifies a program's memory.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use aquifer_pager::{PAGE_BYTES, PageNumber};

use crate::kernel::FillOutcome;
use crate::uffd::Userfaultfd;

/// Random bytes that no program can know before they are in its canary.
pub(crate) type Nonce = [u8; 16];

/// A new nonce.
///
/// # Errors
/// If the system gives no random bytes.
pub(crate) fn new_nonce() -> io::Result<Nonce> {
    let mut nonce = [0; 16];
    rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty())?;
    Ok(nonce)
}

/// The canary of one program.
///
/// A forked child reads its canary before anything else, and says hello with the number in it. The
/// nonce behind the number proves which process has the memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Canary {
    /// The page, in the memory of the program.
    pub page: PageNumber,
    /// The number of the program.
    pub number: u64,
    pub nonce: Nonce,
}

impl Canary {
    /// The first bytes of the page.
    fn bytes(self) -> [u8; 24] {
        let mut bytes = [0; 24];
        bytes[..8].copy_from_slice(&self.number.to_ne_bytes());
        bytes[8..].copy_from_slice(&self.nonce);
        bytes
    }

    /// Fills the canary, if it is missing.
    pub fn fill(self, uffd: &Userfaultfd) -> FillOutcome {
        let mut page = [0; PAGE_BYTES];
        let bytes = self.bytes();
        page[..bytes.len()].copy_from_slice(&bytes);
        uffd.copy_page(self.page, &page)
    }

    /// Whether the memory of a process, its `/proc/PID/mem`, has this canary.
    ///
    /// The kernel does not wait for a page that is missing in it, but reports an error.
    pub fn is_in(self, memory: &File) -> bool {
        let mut found = [0; 24];
        memory.read_exact_at(&mut found, self.page * PAGE_BYTES as u64).is_ok() && found == self.bytes()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::fd::{FromRawFd, OwnedFd};

    use super::*;
    use crate::kernel::FillStop;

    /// A userfaultfd of this process.
    fn own_uffd() -> Option<Userfaultfd> {
        // SAFETY: creates a descriptor.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0)?;
        // SAFETY: nothing else owns the descriptor.
        let uffd = Userfaultfd::from(unsafe { OwnedFd::from_raw_fd(fd) });
        uffd.enable().ok()?;
        Some(uffd)
    }

    /// A page of this process that is missing and registered.
    pub(crate) fn registered_page(uffd: &Userfaultfd) -> PageNumber {
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
        uffd.register(page, page + 1).unwrap();
        page
    }

    /// A canary in this process.
    pub(crate) fn filled_canary() -> Option<(Userfaultfd, Canary)> {
        let uffd = own_uffd()?;
        let page = registered_page(&uffd);
        let canary = Canary { page, number: 0x0123_4567_89ab_cdef, nonce: new_nonce().unwrap() };
        assert_eq!(canary.fill(&uffd).stop, None);
        Some((uffd, canary))
    }

    #[test]
    fn a_waiting_thread_reads_the_number_that_identifies_its_process() {
        let Some(uffd) = own_uffd() else {
            return aquifer_tests_support::skip("no userfaultfd that reports forks");
        };
        let page = registered_page(&uffd);
        let memory = File::open("/proc/self/mem").unwrap();
        let canary = Canary { page, number: 0x0123_4567_89ab_cdef, nonce: [7; 16] };
        assert!(!canary.is_in(&memory), "a missing canary is not waited for");
        let address = page as usize * PAGE_BYTES;
        // SAFETY: the address is mapped as long as the process lives.
        let reader = std::thread::spawn(move || unsafe { (address as *const u64).read_volatile() });
        assert_eq!(canary.fill(&uffd).stop, None);
        assert_eq!(reader.join().unwrap(), canary.number);
        assert!(canary.is_in(&memory));
        let others = [Canary { number: 1, ..canary }, Canary { nonce: [8; 16], ..canary }];
        for other in others {
            assert_eq!(other.fill(&uffd).stop, Some(FillStop::Exists), "the first fill stays");
            assert!(!other.is_in(&memory));
        }
    }
}
