//! AnswerBuffer on their way out. What READs ask for is lent by the region itself until it is sent, so that it is copied once, by the kernel.

use std::os::fd::{AsRawFd, OwnedFd};

use crate::memory::copy;

/// Less is copied: a place in the kernel's list costs as much.
const BORROW_BYTES_MIN: usize = 1024;
/// Loans of one call.
const BORROWS_MAX: usize = 64;

/// Bytes of a region that belong into the answers.
#[derive(Clone, Copy, Debug)]
struct BorrowedBytes {
    /// How many of the other bytes come before.
    after: usize,
    from: *const u8,
    len: usize,
}

// SAFETY: it is an address and a length; whoever sends what is there promises that it is.
unsafe impl Send for BorrowedBytes {}

/// AnswerBuffer that are not sent yet.
#[derive(Debug, Default)]
pub(super) struct AnswerBuffer {
    bytes: Vec<u8>,
    borrowed: Vec<BorrowedBytes>,
    /// Bytes of all borrowed together.
    borrowed_bytes: usize,
    /// Whether regions may lend: what is said goes out as it is, and nothing before it waits.
    may_borrow: bool,
}

impl AnswerBuffer {
    /// Allow or forbid borrowed from now on.
    pub fn allow_borrowing(&mut self, may_borrow: bool) {
        self.may_borrow = may_borrow;
    }

    /// Bytes that will go out.
    pub fn len(&self) -> usize {
        self.bytes.len() + self.borrowed_bytes
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether something must be sent before anything else is done to a region.
    pub fn has_borrowed(&self) -> bool {
        !self.borrowed.is_empty()
    }

    /// The answers as plain bytes.
    pub fn bytes(&mut self) -> &mut Vec<u8> {
        assert!(self.borrowed.is_empty(), "borrowed end within the turn in which they begin");
        &mut self.bytes
    }

    pub fn put(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Append what lies at `from`, and zeros up to `padded`.
    ///
    /// # Safety
    /// `len` bytes at `from` must be readable, and stay so until [`Self::send_borrowed`].
    pub unsafe fn read(&mut self, from: *const u8, len: usize, padded: usize) {
        if self.may_borrow && len >= BORROW_BYTES_MIN && self.borrowed.len() < BORROWS_MAX {
            self.borrowed.push(BorrowedBytes { after: self.bytes.len(), from, len });
            self.borrowed_bytes += len;
            self.bytes.resize(self.bytes.len() + padded - len, 0);
            return;
        }
        self.bytes.reserve(padded);
        let at = self.bytes.len();
        // SAFETY: the caller's promise; the destination was reserved, and its padding is written too.
        unsafe {
            let to = self.bytes.as_mut_ptr().add(at);
            to.add(len).write_bytes(0, padded - len);
            copy(to, from, len);
            self.bytes.set_len(at + padded);
        }
    }

    /// Send everything, as far as the kernel takes it at once; the rest is copied to the end of `rest`. Then there are no borrowed any more.
    ///
    /// # Safety
    /// What was lent must still be readable.
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
        // SAFETY: an all-zero msghdr is a valid one; every part is readable: our own bytes, and by the caller's promise the borrowed. The kernel
        // only reads them.
        let sent = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_iov = parts.as_ptr().cast_mut();
            message.msg_iovlen = parts.len();
            libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
        };
        // An error shows again when the rest is sent.
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
        answers
    }

    fn expected(page: &[u8]) -> Vec<u8> {
        [b"first  .", page, &[0; 3], b"second .", &page[..16], b"last   ."].concat()
    }

    #[test]
    fn loans_go_out_in_their_place() {
        let page: Vec<u8> = (0..5000u32).map(|at| at.to_le_bytes()[0]).collect();
        let mut answers = answers(&page);
        assert!(answers.has_borrowed());
        assert_eq!(answers.len(), expected(&page).len());
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut rest = Vec::new();
        // SAFETY: the page is still there.
        unsafe { answers.send_borrowed(&OwnedFd::from(ours), &mut rest) };
        let mut heard = Vec::new();
        theirs.read_to_end(&mut heard).unwrap();
        heard.extend(rest);
        assert_eq!(heard, expected(&page));
        assert!(answers.is_empty() && !answers.has_borrowed());
    }

    #[test]
    fn what_the_kernel_does_not_take_is_kept() {
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
        assert!(!rest.is_empty(), "a socket takes no two megabytes");
        drop(ours);
        let mut heard = Vec::new();
        theirs.read_to_end(&mut heard).unwrap();
        heard.extend(rest);
        assert!(heard == wanted);
    }

    #[test]
    fn without_leave_everything_is_copied() {
        let page = vec![9u8; 4096];
        let mut plain = AnswerBuffer::default();
        // SAFETY: the page is there.
        unsafe { plain.read(page.as_ptr(), page.len(), page.len()) };
        assert!(!plain.has_borrowed());
        assert_eq!(plain.bytes(), &page);
    }
}
