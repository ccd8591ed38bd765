//! Messages between a target's owner and its initiators, as the providers with a connection keep them: whatever becomes of connections, none is lost,
//! and none comes twice.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The messages of one session, both ways.
#[derive(Debug, Default)]
pub struct Mailbox {
    /// With the stamps of their arrival.
    inbox: Mutex<VecDeque<(u64, Vec<u8>)>>,
    outbox: Mutex<Outbox>,
}

/// Messages to the initiator, kept until it has taken them: a connection that breaks loses none.
#[derive(Debug, Default)]
struct Outbox {
    untaken: VecDeque<Vec<u8>>,
    /// Messages taken since the session began.
    taken: u64,
    /// Messages given to the connection, those that were taken included.
    sent: u64,
}

impl Mailbox {
    /// A message from the initiator; false if there is no room.
    pub fn deliver(&self, stamp: u64, message: Vec<u8>, depth: usize) -> bool {
        let mut inbox = lock(&self.inbox);
        let has_room = inbox.len() < depth;
        if has_room {
            inbox.push_back((stamp, message));
        }
        has_room
    }

    /// A message to the initiator; false if there is no room.
    pub fn post(&self, message: &[u8], depth: usize) -> bool {
        let mut outbox = lock(&self.outbox);
        let has_room = outbox.untaken.len() < depth;
        if has_room {
            outbox.untaken.push_back(message.to_vec());
        }
        has_room
    }

    /// The initiator has taken so many more; false if there were not so many.
    pub fn credit(&self, count: u64) -> bool {
        let mut outbox = lock(&self.outbox);
        let taken = outbox.taken.saturating_add(count);
        outbox.has_taken(taken)
    }

    /// The initiator has taken so many since the session began; false if there were not so many.
    pub fn credit_through(&self, taken: u64) -> bool {
        lock(&self.outbox).has_taken(taken)
    }

    /// The initiator is back: so many messages have arrived there, and so many of those were taken. False if that cannot be.
    pub fn resume(&self, heard: u64, taken: u64) -> bool {
        let mut outbox = lock(&self.outbox);
        let is_possible = taken <= heard && heard <= outbox.sent && outbox.has_taken(taken);
        if is_possible {
            outbox.sent = heard;
        }
        is_possible
    }

    /// Give the next message that was not sent, with its number, to `send`; false if there is none.
    pub fn send_next(&self, send: impl FnOnce(u64, &[u8])) -> bool {
        let mut outbox = lock(&self.outbox);
        let at = usize::try_from(outbox.sent - outbox.taken).expect("bounded by the receive depth");
        let Some(message) = outbox.untaken.get(at) else { return false };
        send(outbox.sent, message);
        outbox.sent += 1;
        true
    }

    /// When the oldest message from the initiator came.
    fn oldest(&self) -> Option<u64> {
        lock(&self.inbox).front().map(|(stamp, _)| *stamp)
    }

    fn take(&self) -> Option<Vec<u8>> {
        lock(&self.inbox).pop_front().map(|(_, message)| message)
    }
}

impl Outbox {
    fn has_taken(&mut self, taken: u64) -> bool {
        let is_possible = (self.taken..=self.sent).contains(&taken);
        if is_possible {
            let newly = usize::try_from(taken - self.taken).expect("fewer than were sent");
            self.untaken.drain(..newly);
            self.taken = taken;
        }
        is_possible
    }
}

/// Somebody whom a target has messages of.
pub trait Correspondent {
    /// Its mailbox.
    fn mailbox(&self) -> &Mailbox;
    /// Its session is over; only its messages are still there.
    fn has_left(&self) -> bool;
}

/// Take the message that came first of all.
pub fn receive_oldest<P: Correspondent>(peers: &[Arc<P>], out: &mut Vec<u8>) -> Option<Arc<P>> {
    let with_mail = peers.iter().filter_map(|peer| Some((peer.mailbox().oldest()?, peer)));
    let (_, peer) = with_mail.min_by_key(|(stamp, _)| *stamp)?;
    out.extend_from_slice(&peer.mailbox().take()?);
    Some(Arc::clone(peer))
}

/// Those who left stay as long as their messages; of more than `left_max` the oldest give way. `gone` is told of each that goes.
pub fn forget_departed<P: Correspondent>(peers: &mut Vec<Arc<P>>, left_max: usize, mut gone: impl FnMut(&P)) {
    let mut keep_if = |peer: &P, stays: bool| {
        if !stays {
            gone(peer);
        }
        stays
    };
    peers.retain(|peer| keep_if(peer, !peer.has_left() || peer.mailbox().oldest().is_some()));
    let left = peers.iter().filter(|peer| peer.has_left()).count();
    let mut surplus = left.saturating_sub(left_max);
    peers.retain(|peer| {
        let goes = surplus > 0 && peer.has_left();
        surplus -= usize::from(goes);
        keep_if(peer, !goes)
    });
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default)]
    struct Peer {
        mailbox: Mailbox,
        has_left: bool,
    }

    impl Correspondent for Peer {
        fn mailbox(&self) -> &Mailbox {
            &self.mailbox
        }

        fn has_left(&self) -> bool {
            self.has_left
        }
    }

    fn next_of(mailbox: &Mailbox) -> Option<(u64, Vec<u8>)> {
        let mut next = None;
        mailbox.send_next(|number, message| next = Some((number, message.to_vec())));
        next
    }

    #[test]
    fn what_was_not_heard_is_sent_again_and_what_was_taken_is_gone() {
        let mailbox = Mailbox::default();
        for message in [b"a", b"b", b"c"] {
            assert!(mailbox.post(message, 3));
        }
        assert!(!mailbox.post(b"d", 3));
        assert_eq!(next_of(&mailbox), Some((0, b"a".to_vec())));
        assert_eq!(next_of(&mailbox), Some((1, b"b".to_vec())));
        assert!(!mailbox.credit(3), "two were sent");
        assert!(mailbox.credit(1));
        assert!(mailbox.post(b"d", 3));
        for (heard, taken) in [(3, 1), (1, 2), (0, 0), (1, u64::MAX)] {
            assert!(!mailbox.resume(heard, taken), "{heard} {taken}");
        }
        assert!(mailbox.resume(1, 1));
        for (number, message) in [(1, b"b"), (2, b"c"), (3, b"d")] {
            assert_eq!(next_of(&mailbox), Some((number, message.to_vec())));
        }
        assert_eq!(next_of(&mailbox), None);
        assert!(mailbox.credit_through(4));
        assert!(!mailbox.credit_through(3), "it cannot give them back");
    }

    #[test]
    fn messages_are_received_as_they_came_and_outlive_those_who_left() {
        let peer = |has_left| Arc::new(Peer { has_left, ..Peer::default() });
        let mut peers = vec![peer(true), peer(false), peer(true), peer(true)];
        for (stamp, at) in [(1, 2), (2, 0), (3, 1)] {
            assert!(peers[at].mailbox.deliver(stamp, vec![u8::try_from(stamp).unwrap()], 1));
        }
        assert!(!peers[1].mailbox.deliver(4, Vec::new(), 1), "there is no room");
        let mut gone = 0;
        forget_departed(&mut peers, 2, |_| gone += 1);
        assert_eq!((peers.len(), gone), (3, 1), "one left without a message");
        let mut out = Vec::new();
        let first = receive_oldest(&peers, &mut out).unwrap();
        assert!(Arc::ptr_eq(&first, &peers[2]));
        forget_departed(&mut peers, 0, |_| gone += 1);
        assert_eq!((peers.len(), gone), (1, 3), "no more may stay");
        receive_oldest(&peers, &mut out).unwrap();
        assert!(receive_oldest(&peers, &mut out).is_none());
        assert_eq!(out, [1, 3]);
    }
}
