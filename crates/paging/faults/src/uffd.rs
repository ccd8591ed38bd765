//! The userfaultfd requests that the agent makes. Debian's headers lack half of them.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use aquifer_pager::{PAGE_BYTES, PageNumber};
use aquifer_uffd::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;

use crate::areas::Areas;
use crate::kernel::{FillOutcome, FillStop, PageFault, UffdMessage};

/// Write protection, the events fork, remap, remove and unmap, thread ids, poison, move.
const FEATURES: u64 = UFFD_FEATURE_PAGEFAULT_FLAG_WP
    | UFFD_FEATURE_EVENT_FORK
    | UFFD_FEATURE_EVENT_REMAP
    | UFFD_FEATURE_EVENT_REMOVE
    | UFFD_FEATURE_EVENT_UNMAP
    | UFFD_FEATURE_THREAD_ID
    | UFFD_FEATURE_POISON
    | UFFD_FEATURE_MOVE;

const EVENT_PAGEFAULT: u8 = 0x12;
const EVENT_FORK: u8 = 0x13;
const EVENT_REMAP: u8 = 0x14;
const EVENT_REMOVE: u8 = 0x15;
const EVENT_UNMAP: u8 = 0x16;

/// Bytes of one message of the kernel.
pub const MESSAGE_BYTES: usize = 32;
/// Maximum number of messages that [`Userfaultfd::read_messages`] reads at once.
const MESSAGES_MAX: usize = 16;
/// Range of the addresses of programs.
const USER_START: u64 = 1 << 16;
const USER_END: u64 = (1 << 47) - 4096;

/// The userfaultfd of one program; clones share the descriptor.
#[derive(Clone, Debug)]
pub struct Userfaultfd(Arc<OwnedFd>);

impl Userfaultfd {
    /// The descriptor, for another owner.
    #[must_use]
    pub fn shared_fd(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.0)
    }
}

impl From<OwnedFd> for Userfaultfd {
    fn from(fd: OwnedFd) -> Self {
        Self(Arc::new(fd))
    }
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Userfaultfd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Userfaultfd {
    /// Opens a userfaultfd of this process, and enables the features that the monitor needs.
    ///
    /// # Errors
    /// If this user lacks the permission, or the kernel lacks a feature.
    pub fn create() -> io::Result<Self> {
        use rustix::mm::{UserfaultfdFlags, userfaultfd};
        // SAFETY: the descriptor changes no memory before a range is registered.
        let own = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK) }?;
        let own = Self::from(own);
        own.enable().map(|()| own)
    }

    /// Enables the features that the monitor needs, unless that was done before.
    ///
    /// Must come before any other request. Fork events require CAP_SYS_PTRACE, which the agent may
    /// have when its programs have not.
    ///
    /// # Errors
    /// If the agent lacks that right, or the kernel lacks a feature.
    pub fn enable(&self) -> io::Result<()> {
        // A userfaultfd that is not enabled polls as an error.
        let mut fds = [PollFd::new(self, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default()))?;
        if !fds[0].revents().contains(PollFlags::ERR) {
            return Ok(());
        }
        let mut argument = uffdio_api { api: UFFD_API, features: FEATURES, ioctls: 0 };
        self.request(UFFDIO_API, &raw mut argument)
    }

    /// Reads pending messages into `buffer`, and returns the number of bytes.
    ///
    /// Does not wait, even if the program has changed the flags of the descriptor, which it shares.
    pub fn read(&self, buffer: &mut [u8]) -> usize {
        let part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        // SAFETY: the kernel writes at most the length of the buffer, which this call borrows.
        let done = unsafe { libc::preadv2(self.as_raw_fd(), &raw const part, 1, -1, libc::RWF_NOWAIT) };
        if done < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EOPNOTSUPP) {
            // The userfaultfd of a forked child, or any before Linux 6.10.
            return self.read_by_flag(buffer);
        }
        usize::try_from(done).unwrap_or(0)
    }

    /// Sets the non-blocking flag, which the program may have cleared, and reads. A program that
    /// clears the flag in between blocks the calling thread, which therefore must serve no other
    /// program.
    fn read_by_flag(&self, buffer: &mut [u8]) -> usize {
        if let Err(error) = rustix::fs::fcntl_setfl(self, rustix::fs::OFlags::NONBLOCK) {
            tracing::warn!(%error, "cannot make a userfaultfd non-blocking");
            return 0;
        }
        // SAFETY: the kernel writes at most the length of the buffer, which this call borrows.
        let done = unsafe { libc::read(self.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) };
        usize::try_from(done).unwrap_or(0)
    }

    /// Reads pending messages, without waiting.
    pub(crate) fn read_messages(&self) -> Vec<UffdMessage<OwnedFd>> {
        let mut buffer = [[0; MESSAGE_BYTES]; MESSAGES_MAX];
        let length = self.read(buffer.as_flattened_mut());
        let messages = buffer[..length / MESSAGE_BYTES].iter().filter_map(parse);
        // SAFETY: the kernel has created each descriptor for this read.
        messages.map(|message| message.map_child(|fd| unsafe { OwnedFd::from_raw_fd(fd) })).collect()
    }

    /// Registers a range: its missing pages and writes to its protected pages become faults.
    ///
    /// # Errors
    /// If nothing is mapped there, or the memory cannot be registered.
    pub fn register(&self, start: PageNumber, end: PageNumber) -> io::Result<()> {
        let mut argument = uffdio_register {
            range: range(start, end),
            mode: UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP,
            ioctls: 0,
        };
        self.request(UFFDIO_REGISTER, &raw mut argument)
    }

    /// Unregisters a range: the kernel reports no more faults in it, and wakes the threads that
    /// wait there.
    ///
    /// # Errors
    /// If something in the range cannot be registered at all.
    pub fn unregister(&self, start: PageNumber, end: PageNumber) -> io::Result<()> {
        let mut argument = range(start, end);
        self.request(UFFDIO_UNREGISTER, &raw mut argument)
    }

    /// Sets the non-blocking flag of the descriptor again.
    pub(crate) fn make_nonblocking(&self) {
        let flags = rustix::fs::fcntl_getfl(&self.0);
        let set = flags.and_then(|flags| rustix::fs::fcntl_setfl(&self.0, flags | OFlags::NONBLOCK));
        if let Err(error) = set {
            tracing::debug!(%error, "cannot make a userfaultfd non-blocking");
        }
    }

    /// Fills missing pages with a copy of this process' memory.
    ///
    /// # Safety
    /// `pages` pages at `source` must be readable.
    pub unsafe fn copy(&self, page: PageNumber, source: *const u8, pages: usize) -> FillOutcome {
        let mut argument = uffdio_copy {
            dst: address(page),
            src: source as u64,
            len: (pages * PAGE_BYTES) as u64,
            mode: 0,
            copy: 0,
        };
        let result = self.request(UFFDIO_COPY, &raw mut argument);
        outcome(result, argument.copy, pages)
    }

    /// Fills a missing page.
    pub(crate) fn copy_page(&self, page: PageNumber, bytes: &[u8; PAGE_BYTES]) -> FillOutcome {
        // SAFETY: `bytes` is one page.
        unsafe { self.copy(page, bytes.as_ptr(), 1) }
    }

    /// Maps the shared zero page at missing pages.
    pub fn zero(&self, page: PageNumber, pages: usize) -> FillOutcome {
        let mut argument = uffdio_zeropage { range: range(page, page + pages as u64), mode: 0, zeropage: 0 };
        let result = self.request(UFFDIO_ZEROPAGE, &raw mut argument);
        outcome(result, argument.zeropage, pages)
    }

    /// Poisons a missing page: each access to it raises SIGBUS.
    pub fn poison(&self, page: PageNumber) -> FillOutcome {
        let mut argument = uffdio_poison { range: range(page, page + 1), mode: 0, updated: 0 };
        let result = self.request(UFFDIO_POISON, &raw mut argument);
        outcome(result, argument.updated, 1)
    }

    /// Whether a page is in a registered area; `None` while an event is unread. Removes the write
    /// protection of the page.
    ///
    /// A request that fills pages would answer as well, but it also keeps the area from being
    /// merged with its neighbours.
    pub(crate) fn is_registered(&self, page: PageNumber) -> Option<bool> {
        let mut argument =
            uffdio_writeprotect { range: range(page, page + 1), mode: UFFDIO_WRITEPROTECT_MODE_DONTWAKE };
        match self.request(UFFDIO_WRITEPROTECT, &raw mut argument) {
            Ok(()) => Some(true),
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => None,
            Err(_) => Some(false),
        }
    }

    /// Whether the memory exists. Checked by a request that only removes the write protection of a
    /// page.
    pub(crate) fn is_alive(&self, page: PageNumber) -> bool {
        let mut argument =
            uffdio_writeprotect { range: range(page, page + 1), mode: UFFDIO_WRITEPROTECT_MODE_DONTWAKE };
        let result = self.request(UFFDIO_WRITEPROTECT, &raw mut argument);
        !result.is_err_and(|error| error.raw_os_error() == Some(libc::ESRCH))
    }

    /// Removes write protection and wakes the threads that wait for it.
    pub fn unprotect(&self, page: PageNumber, pages: usize) -> FillOutcome {
        let mut argument = uffdio_writeprotect { range: range(page, page + pages as u64), mode: 0 };
        outcome(self.request(UFFDIO_WRITEPROTECT, &raw mut argument), 0, pages)
    }

    /// Wakes the threads that wait for a page.
    pub fn wake(&self, page: PageNumber) {
        let mut argument = range(page, page + 1);
        if let Err(error) = self.request(UFFDIO_WAKE, &raw mut argument) {
            tracing::debug!(%error, page, "no thread could be woken");
        }
    }

    /// Wakes all threads that wait for any page, so that they fault again.
    pub fn wake_all(&self) {
        let mut argument = uffdio_range { start: USER_START, len: USER_END - USER_START };
        if let Err(error) = self.request(UFFDIO_WAKE, &raw mut argument) {
            tracing::warn!(%error, "cannot wake the threads that wait for pages");
        }
    }

    fn request<T>(&self, request: u64, argument: *mut T) -> io::Result<()> {
        ioctl(self.as_fd(), request, argument)
    }
}

/// Write-protects the present pages of all areas: the next write to each is a fault. Returns false
/// if an event is unread.
pub fn protect_all(uffd: BorrowedFd<'_>, areas: &Areas) -> bool {
    for area in areas.iter() {
        let Err(error) = protect(uffd, area.start, area.end) else { continue };
        if error.kind() == io::ErrorKind::WouldBlock {
            return false;
        }
        // The area is being unmapped, or the program has ended.
        tracing::debug!(%error, ?area, "cannot write-protect an area after a fork");
    }
    true
}

/// Write-protects the present pages of a range.
///
/// # Errors
/// `EAGAIN` while an event is unread; others if the range is not registered.
fn protect(uffd: BorrowedFd<'_>, start: PageNumber, end: PageNumber) -> io::Result<()> {
    let mut argument = uffdio_writeprotect { range: range(start, end), mode: UFFDIO_WRITEPROTECT_MODE_WP };
    ioctl(uffd, UFFDIO_WRITEPROTECT, &raw mut argument)
}

fn ioctl<T>(uffd: BorrowedFd<'_>, request: u64, argument: *mut T) -> io::Result<()> {
    // SAFETY: each caller passes the argument type that its request reads and writes, alive for the
    // call. The requests change the memory of the program, as intended.
    let result = unsafe { libc::ioctl(uffd.as_raw_fd(), request, argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn address(page: PageNumber) -> u64 {
    page * PAGE_BYTES as u64
}

fn range(start: PageNumber, end: PageNumber) -> uffdio_range {
    uffdio_range { start: address(start), len: (end - start) * PAGE_BYTES as u64 }
}

fn outcome(result: io::Result<()>, done: i64, pages: usize) -> FillOutcome {
    let Err(error) = result else {
        return FillOutcome { pages, stop: None };
    };
    let filled = usize::try_from(done).unwrap_or(0) / PAGE_BYTES;
    let stop = match error.raw_os_error() {
        Some(libc::EEXIST) => FillStop::Exists,
        Some(libc::EAGAIN) if filled == 0 => FillStop::Busy,
        // The kernel reports a partial fill as EAGAIN. A fill of the rest shows what stopped it.
        Some(libc::EAGAIN) => {
            return FillOutcome { pages: filled, stop: None };
        }
        Some(libc::ESRCH) => FillStop::Ended,
        Some(libc::ENOMEM) => FillStop::NoMemory,
        _ => FillStop::NoArea,
    };
    FillOutcome { pages: filled, stop: Some(stop) }
}

/// Whether a message is an event, not a fault.
#[must_use]
pub fn is_event(bytes: &[u8; MESSAGE_BYTES]) -> bool {
    matches!(bytes[0], EVENT_FORK | EVENT_REMAP | EVENT_REMOVE | EVENT_UNMAP)
}

/// Parses a message of the kernel; `None` if its kind is unknown.
///
/// The descriptor of a fork is a number in the process that read the message.
#[must_use]
pub fn parse(bytes: &[u8; MESSAGE_BYTES]) -> Option<UffdMessage<RawFd>> {
    let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    let page = |at: usize| word(at) / PAGE_BYTES as u64;
    Some(match bytes[0] {
        EVENT_PAGEFAULT => UffdMessage::Fault(PageFault {
            page: page(16),
            is_write: word(8) & UFFD_PAGEFAULT_FLAG_WRITE != 0,
            is_protected: word(8) & UFFD_PAGEFAULT_FLAG_WP != 0,
            thread: u32::from_ne_bytes(bytes[24..28].try_into().expect("4 bytes")),
        }),
        EVENT_FORK => UffdMessage::Fork(RawFd::from_ne_bytes(bytes[8..12].try_into().expect("4 bytes"))),
        EVENT_REMAP => UffdMessage::Remap { from: page(8), to: page(16), pages: page(24) },
        EVENT_REMOVE => UffdMessage::Remove { start: page(8), end: page(16) },
        EVENT_UNMAP => UffdMessage::Unmap { start: page(8), end: page(16) },
        kind => {
            tracing::error!(kind, "unknown message of the userfaultfd is ignored");
            return None;
        }
    })
}

/// Encodes a message in the format of the kernel.
#[must_use]
pub fn to_bytes(message: &UffdMessage<RawFd>) -> [u8; MESSAGE_BYTES] {
    let address = |page: PageNumber| page * PAGE_BYTES as u64;
    let (kind, words) = match *message {
        UffdMessage::Fault(PageFault { page, is_write, is_protected, thread }) => {
            let flags = if is_write { UFFD_PAGEFAULT_FLAG_WRITE } else { 0 }
                | if is_protected { UFFD_PAGEFAULT_FLAG_WP } else { 0 };
            (EVENT_PAGEFAULT, [flags, address(page), thread.into()])
        }
        // The descriptor has 4 bytes.
        UffdMessage::Fork(fd) => (EVENT_FORK, [u64::from_ne_bytes(i64::from(fd).to_ne_bytes()), 0, 0]),
        UffdMessage::Remap { from, to, pages } => (EVENT_REMAP, [address(from), address(to), address(pages)]),
        UffdMessage::Remove { start, end } => (EVENT_REMOVE, [address(start), address(end), 0]),
        UffdMessage::Unmap { start, end } => (EVENT_UNMAP, [address(start), address(end), 0]),
    };
    let mut bytes = [0; MESSAGE_BYTES];
    bytes[0] = kind;
    for (place, word) in bytes[8..].chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_the_bytes_of_the_kernel() {
        let fault = PageFault { page: 9, is_write: true, is_protected: true, thread: 77 };
        let messages = [
            UffdMessage::Fault(fault),
            UffdMessage::Fault(PageFault { is_write: false, is_protected: false, ..fault }),
            UffdMessage::Fork(12),
            UffdMessage::Remap { from: 1, to: 20, pages: 3 },
            UffdMessage::Remove { start: 4, end: 6 },
            UffdMessage::Unmap { start: 5, end: 1 << 34 },
        ];
        for message in messages {
            assert_eq!(parse(&to_bytes(&message)), Some(message));
        }
    }
}
