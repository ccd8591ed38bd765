//! Receives the answers to READs directly into local memory, which saves one copy.
//!
//! If all requests succeed, the layout of the answers is known: heads, and the bytes of READs, in
//! the order of the requests. The kernel fills these places directly. If the target sends
//! something else, such as an error or a message, the received bytes are gathered and handled
//! as ordinary input.

use zerocopy::{FromBytes, IntoBytes};

use super::{INPUT_BYTES, TcpEndpoint};
use crate::tcp::wire::{self, ANSWER_BYTES, AnswerHead};
use crate::work::{LocalSlice, Verb};

/// Bound of the answers received by one call.
const ANSWERS_MAX: usize = 64;

/// The expected layout. Its buffers are reused, so that nothing is allocated.
#[derive(Debug)]
pub(super) struct DirectPlan {
    heads: Box<[[u8; ANSWER_BYTES]; ANSWERS_MAX]>,
    /// The destination of each READ; `None` for other requests.
    reads: Vec<Option<LocalSlice>>,
}

impl DirectPlan {
    pub(super) fn new() -> Self {
        Self { heads: Box::new([[0; ANSWER_BYTES]; ANSWERS_MAX]), reads: Vec::with_capacity(ANSWERS_MAX) }
    }
}

/// The outcome of a direct receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum DirectOutcome {
    /// All places were filled, so there may be more.
    Full,
    /// Some places were filled. A part may be in the input buffer.
    Some,
    /// Nothing has arrived.
    Nothing,
    /// The connection is over.
    Over,
}

impl TcpEndpoint {
    /// Plans the layout of the awaited answers. Returns false if a direct receive gains nothing.
    pub(super) fn plan(&mut self) -> bool {
        if self.cipher.is_some() || self.filled > 0 || self.reading.is_some() {
            return false;
        }
        self.complete_known();
        self.plan.reads.clear();
        let mut bytes = 0;
        for pending in self.pending.iter().filter(|pending| pending.outcome.is_none()).take(ANSWERS_MAX) {
            let read = match pending.work.verb {
                Verb::Read { local, .. } => Some(local),
                _ => None,
            };
            bytes += ANSWER_BYTES + read.map_or(0, |local| local.len as usize);
            // Padded READs, and more bytes than the input buffer holds, are received as ordinary
            // input.
            if read.is_some_and(|local| local.len % 8 != 0) || bytes > INPUT_BYTES {
                break;
            }
            self.plan.reads.push(read);
        }
        self.plan.reads.iter().any(Option::is_some)
    }

    /// Receives into the planned places.
    pub(super) fn receive_directly(&mut self) -> DirectOutcome {
        use std::os::fd::AsRawFd;
        let mut places =
            [const { libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 } }; 2 * ANSWERS_MAX];
        let (mut used, mut room) = (0, 0);
        for (at, read) in self.plan.reads.iter().enumerate() {
            let head = self.plan.heads[at].as_mut_ptr();
            places[used] = libc::iovec { iov_base: head.cast(), iov_len: ANSWER_BYTES };
            used += 1;
            room += ANSWER_BYTES;
            if let Some(local) = *read {
                let to = self.local(local).expect("the slice was checked when the work was posted");
                places[used] = libc::iovec { iov_base: to.cast(), iov_len: local.len as usize };
                used += 1;
                room += local.len as usize;
            }
        }
        // SAFETY: an all-zero msghdr is valid.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = places.as_mut_ptr();
        message.msg_iovlen = used;
        // SAFETY: each place is a head of the plan or a range that `local` checked. All are mapped,
        // and nothing else uses them during the call.
        let received =
            unsafe { libc::recvmsg(self.stream.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
        match usize::try_from(received) {
            Ok(0) => DirectOutcome::Over,
            Ok(bytes) => {
                self.handle_direct(bytes);
                if bytes == room { DirectOutcome::Full } else { DirectOutcome::Some }
            }
            Err(_) => match std::io::Error::last_os_error().kind() {
                std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted => DirectOutcome::Nothing,
                _ => DirectOutcome::Over,
            },
        }
    }

    /// Handles `left` received bytes. Bytes that are not as planned are moved to the input buffer.
    fn handle_direct(&mut self, mut left: usize) {
        for at in 0..self.plan.reads.len() {
            if left < ANSWER_BYTES {
                self.input[..left].copy_from_slice(&self.plan.heads[at][..left]);
                self.filled = left;
                return;
            }
            self.complete_known();
            let answer = AnswerHead::read_from_bytes(&self.plan.heads[at]).expect("a head has that size");
            let read = self.plan.reads[at];
            let expected = read.map_or(0, |local| local.len);
            let outcome =
                answer.outcome().filter(|_| answer.kind == wire::ANSWER && answer.len.get() == expected);
            let Some(outcome) = outcome.filter(|outcome| read.is_none() || outcome.is_ok()) else {
                self.gather(at, left);
                return;
            };
            left -= ANSWER_BYTES;
            if let Some(local) = read
                && left < local.len as usize
            {
                self.handle_partial(local, left);
                return;
            }
            left -= expected as usize;
            self.complete_oldest(outcome);
            if self.broken || left == 0 {
                return;
            }
        }
    }

    /// Handles a READ of which a part has arrived: whole words stay in place, and the rest is moved
    /// to the input buffer.
    fn handle_partial(&mut self, local: LocalSlice, came: usize) {
        let whole = came & !7;
        let from = self.local(local).expect("the slice was checked when the work was posted");
        for at in whole..came {
            // SAFETY: `came` is less than the range that `local` proved.
            self.input[at - whole] = unsafe { from.add(at).read() };
        }
        self.filled = came - whole;
        self.reading = Some((local, u32::try_from(whole).expect("below a READ's length")));
    }

    /// Puts the bytes from head `first` on together in the input buffer.
    fn gather(&mut self, first: usize, left: usize) {
        self.filled = 0;
        for at in first..self.plan.reads.len() {
            let head = self.plan.heads[at];
            self.gather_range(head.as_bytes().as_ptr(), ANSWER_BYTES, left);
            if let Some(local) = self.plan.reads[at] {
                let from = self.local(local).expect("the slice was checked when the work was posted");
                self.gather_range(from, local.len as usize, left);
            }
        }
    }

    fn gather_range(&mut self, from: *const u8, len: usize, total: usize) {
        let len = len.min(total - self.filled);
        // SAFETY: both callers' ranges are `len` long or longer, and the plan is no longer than the
        // input.
        unsafe { from.copy_to_nonoverlapping(self.input.as_mut_ptr().add(self.filled), len) };
        self.filled += len;
    }
}
