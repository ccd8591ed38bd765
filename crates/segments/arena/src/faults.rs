//! The agent's end of an armed mapping: it receives the faults, and resumes the threads.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::uffd;

const MESSAGE_BYTES: usize = 32;
const EVENT_PAGEFAULT: u8 = 0x12;

/// The source of page faults of one armed mapping.
#[derive(Debug)]
pub struct PageFaults {
    uffd: OwnedFd,
    address: usize,
    bytes: usize,
}

impl AsFd for PageFaults {
    /// A descriptor that is readable when a thread waits.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }
}

impl PageFaults {
    /// Receives the faults of the mapping of `bytes` bytes at `address`, which was armed with this
    /// descriptor.
    #[must_use]
    pub fn new(uffd: OwnedFd, address: usize, bytes: usize) -> Self {
        Self { uffd, address, bytes }
    }

    /// Reads some pending messages without waiting, and adds the pages for which threads wait to
    /// `pages`. A move of the mapping is acknowledged by reading its message.
    ///
    /// # Errors
    /// If the process of the mapping has ended.
    pub fn read(&self, pages: &mut Vec<u32>) -> io::Result<()> {
        let mut buffer = [0; 16 * MESSAGE_BYTES];
        let len = match rustix::io::read(&self.uffd, &mut buffer[..]) {
            Ok(len) => len,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        pages.extend(buffer[..len].chunks_exact(MESSAGE_BYTES).filter_map(|message| self.page(message)));
        Ok(())
    }

    /// The page of a fault; `None` for an event.
    fn page(&self, message: &[u8]) -> Option<u32> {
        let address = message.get(16..24)?.try_into().map(u64::from_le_bytes).ok()?;
        let offset = usize::try_from(address).ok()?.checked_sub(self.address)?;
        let is_fault = message[0] == EVENT_PAGEFAULT && offset < self.bytes;
        is_fault.then(|| u32::try_from(offset / 4096).ok())?
    }

    /// Resumes the threads that wait for a page, whose bytes are in place.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn resume(&self, page: u32) -> io::Result<()> {
        let address = self.address_of(page);
        match uffd::resume(&self.uffd, address, 4096).map_err(|error| error.raw_os_error()) {
            Ok(_) => Ok(()),
            // The page was never written, and is a hole of the file.
            Err(Some(libc::EFAULT)) => match uffd::fill_with_zeros(&self.uffd, address) {
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
                    uffd::wake(&self.uffd, address, 4096)
                }
                result => result,
            },
            // The page is mapped already, or its faults are not served any more. A thread may still
            // wait, because the kernel does not wake one that begins to wait during `disarm`. It
            // must touch the page again.
            Err(_) => uffd::wake(&self.uffd, address, 4096),
        }
    }

    /// Maps pages whose bytes are in place before they are touched, and resumes the threads that
    /// wait for them.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn resume_all(&self, mut pages: Range<u32>) -> io::Result<()> {
        while let Some(page) = pages.next() {
            let bytes = (pages.len() + 1) * 4096;
            match uffd::resume(&self.uffd, self.address_of(page), bytes) {
                Ok(mapped @ 4096..) => pages.start = page + u32::try_from(mapped / 4096).unwrap_or(u32::MAX),
                // The page is mapped already, or is a hole.
                _ => self.resume(page)?,
            }
        }
        Ok(())
    }

    /// Stops serving faults once all pages are in place. Waiting threads touch their pages again.
    ///
    /// # Errors
    /// If the mapping is gone or was moved.
    pub fn disarm(&self) -> io::Result<()> {
        uffd::unregister(&self.uffd, self.address, self.bytes)?;
        // A thread may have begun to wait meanwhile.
        self.wake_all()
    }

    /// Marks a page as lost: each touch of it raises SIGBUS.
    ///
    /// # Errors
    /// If the system call fails.
    pub fn poison(&self, page: u32) -> io::Result<()> {
        uffd::poison(&self.uffd, self.address_of(page))
    }

    /// Wakes all waiting threads, so that they touch their pages again.
    ///
    /// # Errors
    /// If the program has ended.
    pub fn wake_all(&self) -> io::Result<()> {
        uffd::wake(&self.uffd, self.address, self.bytes)
    }

    fn address_of(&self, page: u32) -> usize {
        self.address + page as usize * 4096
    }
}
