//! Sessions of a target and their messages, for providers whose connections can break. No message
//! is lost with a connection, and none is delivered twice.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::handshake::RefusalReason;
use crate::handshake::hello::{SessionId, new_session_id};
use crate::limits::Limits;
use crate::tables::TargetTables;
use crate::target::{Host, Identity};

/// The messages of one session, in both directions.
#[derive(Debug, Default)]
pub struct Mailbox {
    /// Messages from the initiator with their arrival stamps.
    inbox: Mutex<VecDeque<(u64, Vec<u8>)>>,
    outbox: Mutex<Outbox>,
}

/// Messages to the initiator. Each is kept until the initiator has taken it, so a broken connection
/// loses none.
#[derive(Debug, Default)]
struct Outbox {
    untaken: VecDeque<Vec<u8>>,
    /// Number of messages that the initiator has taken since the session began.
    taken: u64,
    /// Number of messages given to a connection, taken ones included.
    sent: u64,
}

impl Mailbox {
    /// Stores a message from the initiator. Returns false if there is no room.
    pub fn deliver(&self, stamp: u64, message: Vec<u8>, depth: usize) -> bool {
        let mut inbox = lock(&self.inbox);
        let has_room = inbox.len() < depth;
        if has_room {
            inbox.push_back((stamp, message));
        }
        has_room
    }

    /// Queues a message to the initiator. Returns false if there is no room.
    pub fn post(&self, message: &[u8], depth: usize) -> bool {
        let mut outbox = lock(&self.outbox);
        let has_room = outbox.untaken.len() < depth;
        if has_room {
            outbox.untaken.push_back(message.to_vec());
        }
        has_room
    }

    /// Records that the initiator has taken `count` more messages. Returns false if there were not
    /// so many.
    pub fn credit(&self, count: u64) -> bool {
        let mut outbox = lock(&self.outbox);
        let taken = outbox.taken.saturating_add(count);
        outbox.set_taken(taken)
    }

    /// Records that the initiator has taken `taken` messages in total. Returns false if that is
    /// impossible.
    pub fn credit_through(&self, taken: u64) -> bool {
        lock(&self.outbox).set_taken(taken)
    }

    /// Resumes after a broken connection: `received` messages have arrived at the initiator, and it
    /// has taken `taken` of them. Returns false if that is impossible.
    pub fn resume(&self, received: u64, taken: u64) -> bool {
        let mut outbox = lock(&self.outbox);
        let is_possible = taken <= received && received <= outbox.sent && outbox.set_taken(taken);
        if is_possible {
            outbox.sent = received;
        }
        is_possible
    }

    /// Passes the next unsent message and its number to `send`. Returns false if there is none.
    pub fn send_next(&self, send: impl FnOnce(u64, &[u8])) -> bool {
        let mut outbox = lock(&self.outbox);
        let at = usize::try_from(outbox.sent - outbox.taken).expect("bounded by the receive depth");
        let Some(message) = outbox.untaken.get(at) else { return false };
        send(outbox.sent, message);
        outbox.sent += 1;
        true
    }

    /// The arrival stamp of the oldest message from the initiator.
    fn oldest_stamp(&self) -> Option<u64> {
        lock(&self.inbox).front().map(|(stamp, _)| *stamp)
    }

    fn pop(&self) -> Option<Vec<u8>> {
        lock(&self.inbox).pop_front().map(|(_, message)| message)
    }
}

impl Outbox {
    fn set_taken(&mut self, taken: u64) -> bool {
        let is_possible = (self.taken..=self.sent).contains(&taken);
        if is_possible {
            let newly = usize::try_from(taken - self.taken).expect("fewer than were sent");
            self.untaken.drain(..newly);
            self.taken = taken;
        }
        is_possible
    }
}

/// What a target knows of one session, across all its connections.
#[derive(Debug)]
pub struct PeerSession<P> {
    /// The initiator.
    pub who: Identity,
    /// The session's identifier.
    pub id: SessionId,
    /// The slot that the session occupies in control memory.
    pub slot: usize,
    /// Its messages, which outlive the session.
    pub mailbox: Mailbox,
    is_closed: AtomicBool,
    /// State of the provider.
    pub own: P,
}

impl<P> PeerSession<P> {
    /// Whether the session has ended and only its messages remain.
    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }
}

/// The sessions of one target, and the messages of sessions that have ended.
#[derive(Debug)]
pub struct PeerSessions<P> {
    slots: Vec<bool>,
    list: Vec<Arc<PeerSession<P>>>,
}

impl<P> PeerSessions<P> {
    /// A table with room for `endpoints_max` sessions.
    pub fn new(endpoints_max: usize) -> Self {
        Self { slots: vec![false; endpoints_max], list: Vec::new() }
    }

    /// All sessions: connected ones, ones whose connection broke a moment ago, and ended ones with
    /// unread messages.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<PeerSession<P>>> {
        self.list.iter()
    }

    /// The number of sessions that have not ended.
    pub fn count(&self) -> usize {
        self.slots.iter().filter(|taken| **taken).count()
    }

    /// Whether there is room for another session.
    pub fn has_room(&self) -> bool {
        self.slots.contains(&false)
    }

    /// Begins a session. `own` makes the provider's state from the slot.
    ///
    /// # Errors
    /// If all slots are in use, or the system gives no random bytes.
    pub fn begin(
        &mut self,
        who: Identity,
        own: impl FnOnce(usize) -> P,
    ) -> Result<Arc<PeerSession<P>>, RefusalReason> {
        let Some(slot) = self.slots.iter().position(|taken| !taken) else {
            return Err(RefusalReason::Full(self.slots.len()));
        };
        let (id, mailbox, is_closed) = (new_session_id()?, Mailbox::default(), AtomicBool::new(false));
        self.slots[slot] = true;
        let peer = Arc::new(PeerSession { who, id, slot, mailbox, is_closed, own: own(slot) });
        self.list.push(Arc::clone(&peer));
        Ok(peer)
    }

    /// Ends a session. `gone` is called for each entry that is removed.
    pub fn release(&mut self, peer: &PeerSession<P>, gone: impl FnMut(&PeerSession<P>)) {
        if !peer.is_closed.swap(true, Ordering::SeqCst) {
            self.slots[peer.slot] = false;
        }
        self.remove_closed(gone);
    }

    /// Takes the message that arrived first of all sessions and appends it to `out`. Returns the
    /// sender. `gone` is called for each entry that is removed.
    pub fn receive(&mut self, out: &mut Vec<u8>, gone: impl FnMut(&PeerSession<P>)) -> Option<Identity> {
        let with_mail = self.list.iter().filter_map(|peer| Some((peer.mailbox.oldest_stamp()?, peer)));
        let (_, peer) = with_mail.min_by_key(|(stamp, _)| *stamp)?;
        out.extend_from_slice(&peer.mailbox.pop()?);
        let who = peer.who;
        self.remove_closed(gone);
        Some(who)
    }

    /// Queues a message for each session of a host that is not fenced. Calls `posted` for each
    /// session that had room, and returns their number.
    pub fn send(
        &self,
        to: Host,
        message: &[u8],
        limits: &Limits,
        tables: &TargetTables,
        mut posted: impl FnMut(&PeerSession<P>),
    ) -> usize {
        if message.len() > limits.message_bytes_max as usize {
            return 0;
        }
        let is_there = |peer: &&Arc<PeerSession<P>>| {
            peer.who.host == to && !peer.is_closed() && !tables.is_fenced(peer.who)
        };
        let has_room = |peer: &&Arc<PeerSession<P>>| peer.mailbox.post(message, limits.receive_depth);
        self.list.iter().filter(is_there).filter(has_room).map(|peer| posted(peer)).count()
    }

    /// Removes ended sessions without messages. If more ended sessions than slots remain, removes
    /// the oldest.
    fn remove_closed(&mut self, mut gone: impl FnMut(&PeerSession<P>)) {
        let mut keep_if = |peer: &PeerSession<P>, stays: bool| {
            if !stays {
                gone(peer);
            }
            stays
        };
        self.list.retain(|peer| keep_if(peer, !peer.is_closed() || peer.mailbox.oldest_stamp().is_some()));
        let left = self.list.iter().filter(|peer| peer.is_closed()).count();
        let mut surplus = left.saturating_sub(self.slots.len());
        self.list.retain(|peer| {
            let goes = surplus > 0 && peer.is_closed();
            surplus -= usize::from(goes);
            keep_if(peer, !goes)
        });
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::Tenant;

    fn next_of(mailbox: &Mailbox) -> Option<(u64, Vec<u8>)> {
        let mut next = None;
        mailbox.send_next(|number, message| next = Some((number, message.to_vec())));
        next
    }

    #[test]
    fn unreceived_messages_are_sent_again_and_taken_ones_are_dropped() {
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
        for (received, taken) in [(3, 1), (1, 2), (0, 0), (1, u64::MAX)] {
            assert!(!mailbox.resume(received, taken), "{received} {taken}");
        }
        assert!(mailbox.resume(1, 1));
        for (number, message) in [(1, b"b"), (2, b"c"), (3, b"d")] {
            assert_eq!(next_of(&mailbox), Some((number, message.to_vec())));
        }
        assert_eq!(next_of(&mailbox), None);
        assert!(mailbox.credit_through(4));
        assert!(!mailbox.credit_through(3), "the count of taken messages cannot decrease");
    }

    #[test]
    fn messages_are_received_in_order_and_outlive_their_session() {
        let who = |number| Identity { host: Host(number), epoch: 1, tenant: Tenant(0) };
        let mut peers = PeerSessions::new(2);
        let (first, second) = (peers.begin(who(1), |_| ()).unwrap(), peers.begin(who(2), |_| ()).unwrap());
        assert!(!peers.has_room());
        assert!(peers.begin(who(3), |_| ()).unwrap_err().to_string().contains("2 endpoints"));
        assert!(second.mailbox.deliver(1, vec![1], 1));
        assert!(first.mailbox.deliver(2, vec![2], 1));
        assert!(!first.mailbox.deliver(4, Vec::new(), 1), "there is no room");
        let mut gone = 0;
        for peer in [&second, &first, &first] {
            peers.release(peer, |_| gone += 1);
        }
        assert_eq!((peers.count(), peers.iter().count(), gone), (0, 2, 0), "their messages are there");
        let third = peers.begin(who(3), |_| ()).unwrap();
        assert!(third.mailbox.deliver(3, vec![3], 1));
        peers.release(&third, |_| gone += 1);
        assert_eq!((peers.iter().count(), gone), (2, 1), "at the limit the oldest ended session is removed");
        let mut out = Vec::new();
        assert_eq!(peers.receive(&mut out, |_| gone += 1), Some(who(2)));
        assert_eq!(peers.receive(&mut out, |_| gone += 1), Some(who(3)));
        assert_eq!(peers.receive(&mut out, |_| gone += 1), None);
        assert_eq!((out, gone), (vec![1, 3], 3));
    }

    #[test]
    fn a_message_goes_to_the_sessions_of_a_host_that_are_not_fenced() {
        let who = |number, epoch| Identity { host: Host(number), epoch, tenant: Tenant(0) };
        let limits = Limits { message_bytes_max: 2, receive_depth: 1, ..Limits::default() };
        let mut peers = PeerSessions::new(4);
        let names = [who(1, 1), who(1, 2), who(1, 2), who(2, 2)];
        let all = names.map(|who| peers.begin(who, |slot| slot).unwrap());
        let mut tables = TargetTables::new(1, 1, 0);
        tables.fence(Host(1), 1);
        peers.release(&all[1], |_| ());
        let mut notified = Vec::new();
        assert_eq!(peers.send(Host(1), b"abc", &limits, &tables, |_| ()), 0, "it is too long");
        assert_eq!(peers.send(Host(1), b"ab", &limits, &tables, |peer| notified.push(peer.own)), 1);
        assert_eq!(
            peers.send(Host(1), b"ab", &limits, &tables, |peer| notified.push(peer.own)),
            0,
            "no room"
        );
        assert_eq!(notified, [2]);
    }
}
