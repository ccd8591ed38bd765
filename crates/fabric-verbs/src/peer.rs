//! What a target knows of one session, whatever becomes of its connections.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use aquifer_fabric::handshake::hello::SessionId;
use aquifer_fabric::mail::{Correspondent, Mailbox};
use aquifer_fabric::target::Identity;

#[derive(Debug)]
pub(super) struct Peer {
    pub who: Identity,
    pub id: SessionId,
    pub slot: usize,
    pub has_left: AtomicBool,
    pub mailbox: Mailbox,
    /// What was answered to the initiator's last messages, by their numbers.
    answers: Mutex<VecDeque<(u64, bool)>>,
}

impl Peer {
    pub fn new(who: Identity, id: SessionId, slot: usize) -> Self {
        Self {
            who,
            id,
            slot,
            has_left: AtomicBool::new(false),
            mailbox: Mailbox::default(),
            answers: Mutex::default(),
        }
    }

    /// A message from the initiator; whether there was room. One that comes again is answered as it was.
    pub fn deliver(&self, number: u64, stamp: u64, message: &[u8], depth: usize) -> bool {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, had_room)) = answers.iter().find(|(known, _)| *known == number) {
            return *had_room;
        }
        let has_room = self.mailbox.deliver(stamp, message.to_vec(), depth);
        // No more than these are ever without answer.
        if answers.len() == super::LETTERS_MAX as usize {
            answers.pop_front();
        }
        answers.push_back((number, has_room));
        has_room
    }
}

impl Correspondent for Peer {
    fn mailbox(&self) -> &Mailbox {
        &self.mailbox
    }

    fn has_left(&self) -> bool {
        self.has_left.load(Ordering::SeqCst)
    }
}
