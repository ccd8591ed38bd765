//! The canary: a page that is missing in each forked child, and that identifies a program's memory.

use std::io;
use std::os::fd::AsFd;

use aquifer_ipc::{CANARY_BYTES, CONNECT_BACK_REQUESTS_MAX, PROOF_PAGE, connect_back_page};
use aquifer_pager::{PAGE_BYTES, PageNumber};

use crate::kernel::FillOutcome;
use crate::uffd::Userfaultfd;

/// Random bytes that no program can know before they are in its canary.
pub(crate) type Nonce = [u8; 16];

/// Makes a new nonce.
///
/// # Errors
/// If the system cannot provide random bytes.
pub(crate) fn new_nonce() -> io::Result<Nonce> {
    let mut nonce = [0; 16];
    rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty())?;
    Ok(nonce)
}

/// The canary of one program.
///
/// A forked child reads its canary before anything else, and sends its hello with the number in it.
/// The nonce after the number proves which process has the memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Canary {
    /// The page of the canary in the memory of the program.
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

    /// Returns canaries for a proof after the hello, when the process may have read its own canary.
    ///
    /// A page can be used for one proof only, and other processes of the run can use it up. So the
    /// pages of connect-back requests are used, too, the last one first. The first `requests` of
    /// them may have been read.
    ///
    /// # Errors
    /// If the system cannot provide random bytes.
    pub fn of_proof(self, requests: usize) -> io::Result<impl Iterator<Item = Self>> {
        let nonce = new_nonce()?;
        let unread = (requests..CONNECT_BACK_REQUESTS_MAX).rev().map(connect_back_page);
        let offsets = std::iter::once(PROOF_PAGE).chain(unread);
        Ok(offsets.map(move |offset| Self { page: self.page + (offset / PAGE_BYTES) as u64, nonce, ..self }))
    }

    /// Fills the canary, and returns it if it was missing.
    pub fn filled(self, uffd: &Userfaultfd) -> Option<Self> {
        (self.fill(uffd).pages == 1).then_some(self)
    }

    /// The pages of the canary, of the proof, and of connect-back requests.
    pub fn pages(self) -> std::ops::Range<PageNumber> {
        self.page..self.page + (CANARY_BYTES / PAGE_BYTES) as u64
    }

    /// Whether a fault on this page is a connect-back request.
    pub fn is_connect_back(self, page: PageNumber) -> bool {
        let first = self.page + (connect_back_page(0) / PAGE_BYTES) as u64;
        (first..first + CONNECT_BACK_REQUESTS_MAX as u64).contains(&page)
    }

    /// Fills the canary, if it is missing.
    pub fn fill(self, uffd: &Userfaultfd) -> FillOutcome {
        let mut page = [0; PAGE_BYTES];
        let bytes = self.bytes();
        page[..bytes.len()].copy_from_slice(&bytes);
        uffd.copy_page(self.page, &page)
    }

    /// Whether the memory of a process has this canary. `memory` is its `/proc/PID/mem`.
    ///
    /// If the page is missing, the kernel returns an error instead of waiting.
    pub fn is_in(self, memory: impl AsFd) -> bool {
        let mut found = [0; 24];
        let length = rustix::io::pread(memory, &mut found, self.page * PAGE_BYTES as u64);
        length == Ok(found.len()) && found == self.bytes()
    }
}

#[cfg(test)]
pub(crate) mod tests;
