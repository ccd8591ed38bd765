//! What a target knows of one session, whatever becomes of its connections.

use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::target::Identity;
use crate::tcp::hello::SessionId;

#[derive(Debug)]
pub(super) struct Peer {
    pub who: Identity,
    pub id: SessionId,
    pub slot: usize,
    pub has_left: AtomicBool,
    mail: Mutex<Mail>,
}

/// Messages both ways.
#[derive(Debug, Default)]
struct Mail {
    inbox: VecDeque<(u64, Vec<u8>)>,
    /// What was answered to the initiator's last messages, by their numbers.
    answers: VecDeque<(u64, bool)>,
    /// To the initiator, kept until it has taken them: a connection that breaks loses none.
    untaken: VecDeque<Vec<u8>>,
    taken: u64,
    sent: u64,
}

impl Peer {
    pub fn new(who: Identity, id: SessionId, slot: usize) -> Self {
        Self { who, id, slot, has_left: AtomicBool::new(false), mail: Mutex::default() }
    }

    fn mail(&self) -> MutexGuard<'_, Mail> {
        self.mail.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A message from the initiator; whether there was room. One that comes again is answered as it was.
    pub fn deliver(&self, number: u64, stamp: u64, message: &[u8], depth: usize) -> bool {
        let mut mail = self.mail();
        if let Some((_, had_room)) = mail.answers.iter().find(|(known, _)| *known == number) {
            return *had_room;
        }
        let has_room = mail.inbox.len() < depth;
        if has_room {
            mail.inbox.push_back((stamp, message.to_vec()));
        }
        // No more than these are ever without answer.
        if mail.answers.len() == super::LETTERS_MAX as usize {
            mail.answers.pop_front();
        }
        mail.answers.push_back((number, has_room));
        has_room
    }

    /// The initiator has taken so many since the session began; false if there were not so many.
    pub fn credit(&self, taken: u64) -> bool {
        let mut mail = self.mail();
        let is_possible = (mail.taken..=mail.sent).contains(&taken);
        if is_possible {
            let newly = usize::try_from(taken - mail.taken).expect("fewer than were sent");
            mail.untaken.drain(..newly);
            mail.taken = taken;
        }
        is_possible
    }

    /// The initiator is back, and has heard so many and taken so many; false if that cannot be.
    pub fn resume(&self, heard: u64, taken: u64) -> bool {
        let sent = self.mail().sent;
        let is_possible = taken <= heard && heard <= sent && self.credit(taken);
        if is_possible {
            self.mail().sent = heard;
        }
        is_possible
    }

    /// The next message that was not sent, with its number.
    pub fn next_message(&self) -> Option<(u64, Vec<u8>)> {
        let mut mail = self.mail();
        let at = usize::try_from(mail.sent - mail.taken).expect("bounded by the receive depth");
        let message = mail.untaken.get(at)?.clone();
        mail.sent += 1;
        Some((mail.sent - 1, message))
    }

    /// A message to the initiator; whether there was room.
    pub fn post(&self, message: &[u8], depth: usize) -> bool {
        let mut mail = self.mail();
        let has_room = mail.untaken.len() < depth;
        if has_room {
            mail.untaken.push_back(message.to_vec());
        }
        has_room
    }

    /// When its oldest message came.
    pub fn oldest(&self) -> Option<u64> {
        self.mail().inbox.front().map(|(stamp, _)| *stamp)
    }

    pub fn take(&self) -> Option<Vec<u8>> {
        self.mail().inbox.pop_front().map(|(_, message)| message)
    }
}
