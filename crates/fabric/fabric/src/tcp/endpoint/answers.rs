//! Receives answers and completes operations in the order of posting.

use aquifer_secure_channel::SecureError;
use rustix::net::RecvFlags;
use zerocopy::FromBytes;

use super::direct::DirectOutcome;
use super::{PendingWork, TcpEndpoint};
use crate::memory::copy;
use crate::mutation::Mutation;
use crate::tcp::wire::{self, ANSWER_BYTES, AnswerHead, padded};
use crate::work::{Completion, LocalSlice, Verb, Work, WorkError};

impl TcpEndpoint {
    /// Receives what has arrived. Returns true if the connection is over.
    pub(super) fn receive_some(&mut self) -> bool {
        loop {
            if self.plan() {
                let direct = self.receive_directly();
                if matches!(direct, DirectOutcome::Over | DirectOutcome::Nothing) {
                    return direct == DirectOutcome::Over;
                }
                if self.filled > 0 && self.handle_input().is_err() {
                    self.log_violation();
                    return true;
                }
                if direct == DirectOutcome::Some {
                    return false;
                }
                continue;
            }
            let flags = RecvFlags::DONTWAIT;
            match rustix::net::recv(&self.stream, &mut self.input[self.filled..], flags) {
                Ok((_, 0)) => return true,
                Ok((_, bytes)) => {
                    self.filled += bytes;
                    let is_full = self.filled == self.input.len();
                    if self.handle_input().is_err() {
                        self.log_violation();
                        return true;
                    }
                    if !is_full {
                        return false;
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return false,
                Err(_) => return true,
            }
        }
    }

    fn log_violation(&self) {
        tracing::warn!(address = %self.address, "a target violated the protocol; reconnecting");
    }

    fn handle_input(&mut self) -> Result<(), SecureError> {
        let nonsense = || SecureError::Magic;
        let Some(cipher) = &mut self.cipher else {
            let input = std::mem::take(&mut self.input);
            let used = self.handle_answers(&input[..self.filled]);
            self.input = input;
            let used = used.ok_or_else(nonsense)?;
            self.input.copy_within(used..self.filled, 0);
            self.filled -= used;
            return Ok(());
        };
        let used = cipher.decrypt(&self.input[..self.filled], &mut self.opened)?;
        self.input.copy_within(used..self.filled, 0);
        self.filled -= used;
        let mut opened = std::mem::take(&mut self.opened);
        let used = self.handle_answers(&opened);
        opened.drain(..used.unwrap_or(0));
        self.opened = opened;
        used.map(drop).ok_or_else(nonsense)
    }

    /// Handles the answers in `bytes`. Returns the number of bytes used, a multiple of 8; `None` if
    /// the target violated the protocol.
    pub(super) fn handle_answers(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut at = 0;
        loop {
            if self.broken {
                // The operations behind a fence have failed, and their answers report the same.
                return Some(at);
            }
            if let Some((local, taken)) = self.reading {
                let used = self.copy_payload(local, taken, &bytes[at..])?;
                at += used;
                if self.reading.is_some() {
                    return Some(at);
                }
            }
            let Ok((answer, rest)) = AnswerHead::read_from_prefix(&bytes[at..]) else {
                return Some(at);
            };
            let len = answer.len.get();
            match answer.kind {
                wire::ANSWER => self.handle_answer(&answer)?,
                wire::MESSAGE => {
                    let is_short =
                        len <= self.limits.message_bytes_max || Mutation::TrustMessageLength.is_active();
                    if !is_short || self.messages.len() >= self.limits.receive_depth {
                        return None;
                    }
                    let Some(message) = rest.get(..padded(len)) else {
                        return Some(at);
                    };
                    self.messages.push_back(message[..len as usize].to_vec());
                    self.received += 1;
                    at += padded(len);
                }
                wire::FAREWELL => self.has_farewell = answer.value.get() == self.answered,
                _ => return None,
            }
            at += ANSWER_BYTES;
        }
    }

    fn handle_answer(&mut self, answer: &AnswerHead) -> Option<()> {
        self.complete_known();
        let PendingWork { work, .. } = *self.pending.front()?;
        let outcome = answer.outcome()?;
        match work.verb {
            Verb::Read { local, .. } if outcome.is_ok() => {
                if answer.len.get() != local.len {
                    return None;
                }
                self.reading = Some((local, 0));
            }
            _ if answer.len.get() != 0 => return None,
            _ => self.complete_oldest(outcome),
        }
        Some(())
    }

    /// Copies a received part of a READ to its destination. Returns the number of bytes used.
    fn copy_payload(&mut self, local: LocalSlice, taken: u32, bytes: &[u8]) -> Option<usize> {
        let left = padded(local.len) - taken as usize;
        let take = left.min(bytes.len() & !7);
        let len = take.min((local.len - taken.min(local.len)) as usize);
        let to = self.local(local)?;
        // SAFETY: `local` proved all of the destination, and `taken + len` is at most its length.
        unsafe { copy(to.add(taken as usize), bytes.as_ptr(), len) };
        if take == left {
            self.reading = None;
            self.complete_oldest(Ok(u64::from(local.len)));
        } else {
            self.reading = Some((local, taken + u32::try_from(take).expect("below the length")));
        }
        Some(take)
    }

    /// Completes the oldest operation.
    pub(super) fn complete_oldest(&mut self, outcome: Result<u64, WorkError>) {
        let Some(PendingWork { work, .. }) = self.pending.pop_front() else { return };
        self.answered += 1;
        // The number of bytes is that of the request, whatever number the target has sent.
        let outcome = match work.verb {
            Verb::Read { local, .. } | Verb::Write { local, .. } | Verb::Send { local } => {
                outcome.map(|_| u64::from(local.len))
            }
            Verb::CompareSwap { .. } | Verb::FetchAdd { .. } => outcome,
        };
        self.complete(work, outcome);
        if outcome == Err(WorkError::Fenced) {
            self.fail_all(None);
        }
    }

    pub(super) fn complete(&mut self, work: Work, outcome: Result<u64, WorkError>) {
        if work.signalled || outcome.is_err() {
            self.done.push_back(Completion { id: work.id, outcome });
        }
    }

    /// Completes operations at the front whose error was known before they were sent.
    pub(super) fn complete_known(&mut self) {
        while let Some(PendingWork { work, outcome: Some(error) }) = self.pending.front().copied() {
            self.pending.pop_front();
            self.complete(work, Err(error));
        }
    }
}
