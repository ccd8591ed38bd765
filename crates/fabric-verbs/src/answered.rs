//! What a target knows of one session, whatever becomes of its connections.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use aquifer_fabric::sessions::{self, Mailbox};

/// What was answered to the initiator's last messages, by their numbers.
#[derive(Debug, Default)]
pub(super) struct AnsweredMessages(Mutex<VecDeque<(u64, bool)>>);

pub(super) type VerbsPeer = sessions::PeerSession<AnsweredMessages>;

impl AnsweredMessages {
    /// A message from the initiator; whether there was room in its mailbox. One that comes again is answered as it was.
    pub fn deliver(&self, mailbox: &Mailbox, number: u64, stamp: u64, message: &[u8], depth: usize) -> bool {
        let mut answers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, had_room)) = answers.iter().find(|(known, _)| *known == number) {
            return *had_room;
        }
        let has_room = mailbox.deliver(stamp, message.to_vec(), depth);
        // No more than these are ever without answer.
        if answers.len() == super::MESSAGE_SLOTS_MAX as usize {
            answers.pop_front();
        }
        answers.push_back((number, has_room));
        has_room
    }
}
