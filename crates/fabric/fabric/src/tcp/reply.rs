//! Answers that are to be sent. The data of READs is borrowed from the region until it is sent, so
//! that only the kernel copies it.

use std::os::fd::{AsRawFd, OwnedFd};

use crate::memory::copy;

/// Least bytes of data that is borrowed. Copying less costs no more than an entry of the kernel's
/// list.
const BORROW_BYTES_MIN: usize = 1024;
/// Bound of the borrowed ranges in one call.
const BORROWS_MAX: usize = 64;

/// A range of a region that is sent among the answers.
#[derive(Clone, Copy, Debug)]
struct BorrowedBytes {
    /// Number of owned bytes that are sent before this range.
    after: usize,
    from: *const u8,
    len: usize,
}

// SAFETY: it is an address and a length; the code that sends the range guarantees that it is
// mapped.
unsafe impl Send for BorrowedBytes {}

/// A buffer of answers that are not sent yet.
#[derive(Debug, Default)]
pub(super) struct AnswerBuffer {
    bytes: Vec<u8>,
    borrowed: Vec<BorrowedBytes>,
    /// Sum of the lengths of all borrowed ranges.
    borrowed_bytes: usize,
    /// Whether ranges may be borrowed: only without encryption, and if no earlier output waits.
    may_borrow: bool,
}

impl AnswerBuffer {
    /// Permits or forbids borrowing from now on.
    pub fn allow_borrowing(&mut self, may_borrow: bool) {
        self.may_borrow = may_borrow;
    }

    /// Number of bytes to send.
    pub fn len(&self) -> usize {
        self.bytes.len() + self.borrowed_bytes
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether there are borrowed ranges. They must be sent before a region is changed.
    pub fn has_borrowed(&self) -> bool {
        !self.borrowed.is_empty()
    }

    /// Whether no further range can be borrowed before the others are sent.
    pub fn is_borrowed_full(&self) -> bool {
        self.borrowed.len() == BORROWS_MAX
    }

    /// The owned bytes. There must be no borrowed ranges.
    pub fn bytes(&mut self) -> &mut Vec<u8> {
        assert!(self.borrowed.is_empty(), "borrowed end within the turn in which they begin");
        &mut self.bytes
    }

    pub fn put(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Appends `len` bytes at `from`, and zeros up to `padded` bytes. May borrow the bytes.
    ///
    /// After a borrowed range all are borrowed, however short: borrowed bytes are read when they
    /// are sent, and a later READ must not find older bytes.
    ///
    /// # Safety
    /// `len` bytes at `from` must be readable, and stay so until [`Self::send_borrowed`].
    pub unsafe fn read(&mut self, from: *const u8, len: usize, padded: usize) {
        if self.may_borrow && (len >= BORROW_BYTES_MIN || self.has_borrowed()) && !self.is_borrowed_full() {
            self.borrowed.push(BorrowedBytes { after: self.bytes.len(), from, len });
            self.borrowed_bytes += len;
        } else {
            // SAFETY: the caller guarantees the source.
            unsafe { self.copy(from, len) };
        }
        self.bytes.resize(self.bytes.len() + padded - len, 0);
    }

    /// Appends a copy of `len` bytes at `from`.
    ///
    /// # Safety
    /// `len` bytes at `from` must be readable.
    pub unsafe fn copy(&mut self, from: *const u8, len: usize) {
        self.bytes.reserve(len);
        let at = self.bytes.len();
        // SAFETY: the caller guarantees the source, and the destination was reserved.
        unsafe {
            copy(self.bytes.as_mut_ptr().add(at), from, len);
            self.bytes.set_len(at + len);
        }
    }

    /// Sends as much as the kernel accepts at once, and appends the rest to `rest`. No borrowed
    /// ranges remain.
    ///
    /// # Safety
    /// All borrowed ranges must still be readable.
    pub unsafe fn send_borrowed(&mut self, socket: &OwnedFd, rest: &mut Vec<u8>) {
        let mut parts = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 2 * BORROWS_MAX + 1];
        let mut count = 0;
        let mut at = 0;
        let mut part = |from: *const u8, len: usize| {
            parts[count] = libc::iovec { iov_base: from.cast_mut().cast(), iov_len: len };
            count += 1;
        };
        for range in &self.borrowed {
            part(self.bytes[at..].as_ptr(), range.after - at);
            part(range.from, range.len);
            at = range.after;
        }
        part(self.bytes[at..].as_ptr(), self.bytes.len() - at);
        let parts = &parts[..count];
        // SAFETY: an all-zero msghdr is valid. Every part is readable: our own bytes, and the
        // borrowed ranges by the caller's guarantee. The kernel only reads them.
        let sent = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_iov = parts.as_ptr().cast_mut();
            message.msg_iovlen = parts.len();
            libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
        };
        // An error of the connection shows again when the rest is sent.
        let mut skip = usize::try_from(sent).unwrap_or(0);
        for part in parts {
            let skipped = skip.min(part.iov_len);
            skip -= skipped;
            let left = part.iov_len - skipped;
            rest.reserve(left);
            // SAFETY: the part is readable, and the destination was reserved.
            unsafe {
                copy(rest.as_mut_ptr().add(rest.len()), part.iov_base.cast::<u8>().add(skipped), left);
                rest.set_len(rest.len() + left);
            }
        }
        self.bytes.clear();
        self.borrowed.clear();
        self.borrowed_bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn answers(page: &[u8]) -> AnswerBuffer {
        let mut answers = AnswerBuffer::default();
        answers.allow_borrowing(true);
        answers.put(b"first  .");
        // SAFETY: the page outlives the answers.
        unsafe {
            answers.read(page.as_ptr(), page.len(), page.len() + 3);
            answers.put(b"second .");
            answers.read(page.as_ptr(), 16, 16);
        }
        answers.put(b"last   .");
        assert_eq!(answers.borrowed.len(), 2, "a short range after a borrowed one is borrowed, too");
        answers
    }

    fn expected(page: &[u8]) -> Vec<u8> {
        [b"first  .", page, &[0; 3], b"second .", &page[..16], b"last   ."].concat()
    }

    #[test]
    fn borrowed_ranges_are_sent_in_their_place() {
        let page: Vec<u8> = (0..5000u32).map(|at| at.to_le_bytes()[0]).collect();
        let mut answers = answers(&page);
        assert!(answers.has_borrowed());
        assert_eq!(answers.len(), expected(&page).len());
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut rest = Vec::new();
        // SAFETY: the page is still there.
        unsafe { answers.send_borrowed(&OwnedFd::from(ours), &mut rest) };
        let mut received = Vec::new();
        theirs.read_to_end(&mut received).unwrap();
        received.extend(rest);
        assert_eq!(received, expected(&page));
        assert!(answers.is_empty() && !answers.has_borrowed());
    }

    #[test]
    fn bytes_that_the_kernel_does_not_accept_are_kept() {
        let page = vec![7u8; 100_000];
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let ours = OwnedFd::from(ours);
        let (mut rest, mut wanted) = (Vec::new(), Vec::new());
        for _ in 0..20 {
            let mut answers = answers(&page);
            // SAFETY: the page is still there.
            unsafe { answers.send_borrowed(&ours, &mut rest) };
            wanted.extend(expected(&page));
            if !rest.is_empty() {
                break;
            }
        }
        assert!(!rest.is_empty(), "a socket does not accept two megabytes");
        drop(ours);
        let mut received = Vec::new();
        theirs.read_to_end(&mut received).unwrap();
        received.extend(rest);
        assert!(received == wanted);
    }

    #[test]
    fn without_permission_everything_is_copied() {
        let page = vec![9u8; 4096];
        let mut plain = AnswerBuffer::default();
        // SAFETY: the page is there.
        unsafe { plain.read(page.as_ptr(), page.len(), page.len()) };
        assert!(!plain.has_borrowed());
        assert_eq!(plain.bytes(), &page);
    }
}
