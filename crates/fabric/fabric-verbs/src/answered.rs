//! The answers to messages of one session, across all its connections.

use std::collections::VecDeque;

use aquifer_fabric::sessions::{self, Mailbox};
use parking_lot::Mutex;

/// The answers to the initiator's most recent messages, by message number.
#[derive(Debug, Default)]
pub(super) struct AnsweredMessages(Mutex<VecDeque<(u64, bool)>>);

pub(super) type VerbsPeer = sessions::PeerSession<AnsweredMessages>;

impl AnsweredMessages {
    /// Stores a message from the initiator. Returns whether the mailbox had room. A message that is
    /// sent again has the same answer.
    pub fn deliver(&self, mailbox: &Mailbox, number: u64, message: &[u8], depth: usize) -> bool {
        let mut answers = self.0.lock();
        if let Some((_, had_room)) = answers.iter().find(|(known, _)| *known == number) {
            return *had_room;
        }
        let has_room = mailbox.deliver(message.to_vec(), depth);
        // An initiator never has more messages without an answer.
        if answers.len() == super::MESSAGE_SLOTS_MAX as usize {
            answers.pop_front();
        }
        answers.push_back((number, has_room));
        has_room
    }
}
