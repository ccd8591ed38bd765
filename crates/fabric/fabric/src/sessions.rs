//! Sessions of a target and their messages, for providers whose connections can break. No message
//! is lost with a connection, and none is delivered twice.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::handshake::RefusalReason;
use crate::handshake::hello::{SessionId, new_session_id};
use crate::inbox::{Inbox, UntakenCount};
use crate::limits::Limits;
use crate::tables::TargetTables;
use crate::target::{EndpointNumber, Host, Identity, Sender, Tenant};

/// The messages of one session, in both directions.
#[derive(Debug)]
pub struct Mailbox {
    /// Holds the messages of all initiators.
    inbox: Arc<Inbox>,
    from: Sender,
    untaken: UntakenCount,
    outbox: Mutex<Outbox>,
}

/// Messages to the initiator. Each is kept until the initiator has taken it, so a broken connection
/// loses none.
#[derive(Debug, Default)]
struct Outbox {
    untaken: VecDeque<Vec<u8>>,
    /// Number of messages that the initiator has taken since the session began.
    taken: u64,
    /// Number of messages that were passed to a connection, taken ones included.
    sent: u64,
}

impl Mailbox {
    fn new(inbox: &Arc<Inbox>, from: Sender) -> Self {
        Self { inbox: Arc::clone(inbox), from, untaken: UntakenCount::default(), outbox: Mutex::default() }
    }

    /// Stores a message from the initiator. Returns false if there is no room.
    pub fn deliver(&self, message: Vec<u8>, depth: usize) -> bool {
        self.inbox.deliver(self.from, &self.untaken, message, depth)
    }

    /// Queues a message to the initiator. Returns false if there is no room.
    pub fn post(&self, message: &[u8], depth: usize) -> bool {
        let mut outbox = self.outbox.lock();
        let has_room = outbox.untaken.len() < depth;
        if has_room {
            outbox.untaken.push_back(message.to_vec());
        }
        has_room
    }

    /// Records that the initiator has taken `count` more messages. Returns false if fewer messages
    /// were sent.
    pub fn credit(&self, count: u64) -> bool {
        let mut outbox = self.outbox.lock();
        let taken = outbox.taken.saturating_add(count);
        outbox.set_taken(taken)
    }

    /// Records that the initiator has taken `taken` messages in total. Returns false if that is
    /// impossible.
    pub fn credit_through(&self, taken: u64) -> bool {
        self.outbox.lock().set_taken(taken)
    }

    /// Resumes after a broken connection: `received` messages have arrived at the initiator, and it
    /// has taken `taken` of them. Returns false if that is impossible.
    pub fn resume(&self, received: u64, taken: u64) -> bool {
        let mut outbox = self.outbox.lock();
        let is_possible = taken <= received && received <= outbox.sent && outbox.set_taken(taken);
        if is_possible {
            outbox.sent = received;
        }
        is_possible
    }

    /// Passes the next unsent message and its number to `send`. Returns false if there is none.
    pub fn send_next(&self, send: impl FnOnce(u64, &[u8])) -> bool {
        let mut outbox = self.outbox.lock();
        let at = usize::try_from(outbox.sent - outbox.taken).expect("bounded by the receive depth");
        let Some(message) = outbox.untaken.get(at) else { return false };
        send(outbox.sent, message);
        outbox.sent += 1;
        true
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

/// The target's state of one session, across all its connections.
#[derive(Debug)]
pub struct PeerSession<P> {
    /// The initiator.
    pub who: Identity,
    /// The number of the session's endpoint.
    pub endpoint: EndpointNumber,
    /// The session's identifier.
    pub id: SessionId,
    /// The slot that the session occupies in control memory.
    pub slot: usize,
    /// The session's messages. Messages from the initiator outlive the session.
    pub mailbox: Mailbox,
    is_closed: AtomicBool,
    /// State of the provider.
    pub own: P,
}

impl<P> PeerSession<P> {
    /// Whether the session has ended.
    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }

    /// The endpoint as the sender of messages.
    pub fn sender(&self) -> Sender {
        Sender { who: self.who, endpoint: self.endpoint }
    }
}

/// Bounds of the sessions of one target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SessionLimits {
    /// All sessions.
    pub endpoints_max: usize,
    /// Sessions of one tenant.
    pub endpoints_per_tenant_max: usize,
}

/// The sessions of one target: connected ones, and ones whose connection broke a moment ago.
#[derive(Debug)]
pub struct PeerSessions<P> {
    limits: SessionLimits,
    /// The sessions by host and number, so that those of one host are found together.
    sessions: BTreeMap<(Host, EndpointNumber), Arc<PeerSession<P>>>,
    hosts: HashMap<EndpointNumber, Host>,
    numbers: HashMap<SessionId, EndpointNumber>,
    of_tenant: HashMap<Tenant, usize>,
    /// Slots that were used before; the smallest is used first.
    free_slots: BinaryHeap<Reverse<usize>>,
    slots_used: usize,
    last_number: u64,
    inbox: Arc<Inbox>,
}

impl<P> PeerSessions<P> {
    /// Creates an empty table.
    pub fn new(limits: SessionLimits) -> Self {
        Self {
            limits,
            sessions: BTreeMap::new(),
            hosts: HashMap::new(),
            numbers: HashMap::new(),
            of_tenant: HashMap::new(),
            free_slots: BinaryHeap::new(),
            slots_used: 0,
            last_number: 0,
            inbox: Arc::default(),
        }
    }

    /// The messages of all initiators.
    pub fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    /// All sessions.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<PeerSession<P>>> {
        self.sessions.values()
    }

    /// The sessions of a host.
    pub fn of_host(&self, host: Host) -> impl Iterator<Item = &Arc<PeerSession<P>>> {
        let range = (host, EndpointNumber(0))..=(host, EndpointNumber(u64::MAX));
        self.sessions.range(range).map(|(_, peer)| peer)
    }

    /// The session of an endpoint.
    pub fn get(&self, endpoint: EndpointNumber) -> Option<&Arc<PeerSession<P>>> {
        self.sessions.get(&(*self.hosts.get(&endpoint)?, endpoint))
    }

    /// The session with an identifier.
    pub fn find(&self, id: SessionId) -> Option<&Arc<PeerSession<P>>> {
        self.get(*self.numbers.get(&id)?)
    }

    /// The number of sessions.
    pub fn count(&self) -> usize {
        self.sessions.len()
    }

    /// Whether there is room for another session.
    pub fn has_room(&self) -> bool {
        self.sessions.len() < self.limits.endpoints_max
    }

    /// Begins a session. `own` makes the provider's state from the slot.
    ///
    /// # Errors
    /// At the limit of sessions of all tenants or of this one, or if the system returns no random
    /// bytes.
    pub fn begin(
        &mut self,
        who: Identity,
        own: impl FnOnce(usize) -> P,
    ) -> Result<Arc<PeerSession<P>>, RefusalReason> {
        if !self.has_room() {
            return Err(RefusalReason::Full(self.limits.endpoints_max));
        }
        let limit = self.limits.endpoints_per_tenant_max;
        if self.of_tenant.get(&who.tenant).is_some_and(|count| *count >= limit) {
            return Err(RefusalReason::TenantFull { tenant: who.tenant, limit });
        }
        let id = new_session_id()?;
        let slot = self.free_slots.pop().map_or(self.slots_used, |Reverse(slot)| slot);
        self.slots_used = self.slots_used.max(slot + 1);
        self.last_number += 1;
        let endpoint = EndpointNumber(self.last_number);
        let mailbox = Mailbox::new(&self.inbox, Sender { who, endpoint });
        let is_closed = AtomicBool::new(false);
        let peer = Arc::new(PeerSession { who, endpoint, id, slot, mailbox, is_closed, own: own(slot) });
        self.sessions.insert((who.host, endpoint), Arc::clone(&peer));
        self.hosts.insert(endpoint, who.host);
        self.numbers.insert(id, endpoint);
        *self.of_tenant.entry(who.tenant).or_default() += 1;
        Ok(peer)
    }

    /// Ends a session. Its messages to the target are kept. Returns false if it has ended before.
    pub fn release(&mut self, peer: &PeerSession<P>) -> bool {
        if peer.is_closed.swap(true, Ordering::SeqCst) {
            return false;
        }
        self.sessions.remove(&(peer.who.host, peer.endpoint));
        self.hosts.remove(&peer.endpoint);
        self.numbers.remove(&peer.id);
        self.free_slots.push(Reverse(peer.slot));
        if let Some(count) = self.of_tenant.get_mut(&peer.who.tenant) {
            *count -= 1;
            if *count == 0 {
                self.of_tenant.remove(&peer.who.tenant);
            }
        }
        self.inbox.end(&peer.mailbox.untaken, self.limits.endpoints_max);
        true
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
        let has_room = |peer: &&Arc<PeerSession<P>>| post(peer, message, limits, tables);
        self.of_host(to).filter(has_room).map(|peer| posted(peer)).count()
    }

    /// Queues a message for one session. Returns the session if it had room.
    pub fn reply(
        &self,
        to: EndpointNumber,
        message: &[u8],
        limits: &Limits,
        tables: &TargetTables,
    ) -> Option<&PeerSession<P>> {
        self.get(to).filter(|peer| post(peer, message, limits, tables)).map(|peer| &**peer)
    }
}

/// Queues a message for a session, if it is not fenced and has room.
fn post<P>(peer: &PeerSession<P>, message: &[u8], limits: &Limits, tables: &TargetTables) -> bool {
    message.len() <= limits.message_bytes_max as usize
        && !tables.is_fenced(peer.who)
        && peer.mailbox.post(message, limits.receive_depth)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn who(number: u16, epoch: u64) -> Identity {
        Identity { host: Host(number), epoch, tenant: Tenant(u32::from(number % 2)) }
    }

    fn sessions(endpoints_max: usize) -> PeerSessions<usize> {
        PeerSessions::new(SessionLimits { endpoints_max, endpoints_per_tenant_max: endpoints_max })
    }

    fn next_of(mailbox: &Mailbox) -> Option<(u64, Vec<u8>)> {
        let mut next = None;
        mailbox.send_next(|number, message| next = Some((number, message.to_vec())));
        next
    }

    #[test]
    fn unreceived_messages_are_sent_again_and_taken_ones_are_dropped() {
        let peer = sessions(1).begin(who(1, 1), |slot| slot).unwrap();
        let mailbox = &peer.mailbox;
        for message in [b"a", b"b", b"c"] {
            assert!(mailbox.post(message, 3));
        }
        assert!(!mailbox.post(b"d", 3));
        assert_eq!(next_of(mailbox), Some((0, b"a".to_vec())));
        assert_eq!(next_of(mailbox), Some((1, b"b".to_vec())));
        assert!(!mailbox.credit(3), "two were sent");
        assert!(mailbox.credit(1));
        assert!(mailbox.post(b"d", 3));
        for (received, taken) in [(3, 1), (1, 2), (0, 0), (1, u64::MAX)] {
            assert!(!mailbox.resume(received, taken), "{received} {taken}");
        }
        assert!(mailbox.resume(1, 1));
        for (number, message) in [(1, b"b"), (2, b"c"), (3, b"d")] {
            assert_eq!(next_of(mailbox), Some((number, message.to_vec())));
        }
        assert_eq!(next_of(mailbox), None);
        assert!(mailbox.credit_through(4));
        assert!(!mailbox.credit_through(3), "the count of taken messages cannot decrease");
    }

    #[test]
    fn messages_are_received_in_order_and_outlive_their_session() {
        let mut peers = sessions(2);
        let inbox = Arc::clone(peers.inbox());
        let [first, second] = [1, 2].map(|host| peers.begin(who(host, 1), |slot| slot).unwrap());
        assert!(!peers.has_room());
        assert!(peers.begin(who(3, 1), |slot| slot).unwrap_err().to_string().contains("2 endpoints"));
        assert!(second.mailbox.deliver(vec![1], 1));
        assert!(first.mailbox.deliver(vec![2], 1));
        assert!(!first.mailbox.deliver(Vec::new(), 1), "there is no room");
        assert!(peers.release(&second) && peers.release(&first) && !peers.release(&first));
        assert_eq!((peers.count(), peers.iter().count()), (0, 0));
        let third = peers.begin(who(3, 1), |slot| slot).unwrap();
        assert!(third.mailbox.deliver(vec![3], 1));
        peers.release(&third);
        let mut out = Vec::new();
        assert_eq!(inbox.receive(&mut out), Some(first.sender()), "the messages of the oldest were dropped");
        assert_eq!(inbox.receive(&mut out), Some(third.sender()));
        assert_eq!(inbox.receive(&mut out), None);
        assert_eq!(out, [2, 3]);
    }

    #[test]
    fn numbers_are_never_reused_and_slots_are() {
        let mut peers = sessions(3);
        let mut numbers = Vec::new();
        for _ in 0..50 {
            let all = [1, 2, 3].map(|host| peers.begin(who(host, 1), |slot| slot).unwrap());
            assert_eq!(all.each_ref().map(|peer| peer.slot), [0, 1, 2]);
            for peer in &all {
                assert!(!numbers.contains(&peer.endpoint));
                numbers.push(peer.endpoint);
                assert_eq!(peers.find(peer.id).unwrap().endpoint, peer.endpoint);
            }
            for peer in all.iter().rev() {
                peers.release(peer);
                assert!(peers.get(peer.endpoint).is_none() && peers.find(peer.id).is_none());
            }
        }
    }

    #[test]
    fn endpoints_of_a_tenant_are_bounded() {
        let limits = SessionLimits { endpoints_max: 5, endpoints_per_tenant_max: 2 };
        let mut peers = PeerSessions::new(limits);
        let first = peers.begin(who(1, 1), |slot| slot).unwrap();
        peers.begin(who(3, 1), |slot| slot).unwrap();
        let refused = peers.begin(who(5, 1), |slot| slot).unwrap_err();
        assert_eq!(refused.to_string(), "tenant 1 has 2 endpoints already, which is its limit");
        assert_eq!(refused.code(), crate::handshake::RefusalCode::NoRoom);
        peers.begin(who(2, 1), |slot| slot).unwrap();
        peers.release(&first);
        peers.begin(who(5, 1), |slot| slot).unwrap();
    }

    #[test]
    fn a_message_goes_to_the_sessions_of_a_host_that_are_not_fenced() {
        let limits = Limits { message_bytes_max: 2, receive_depth: 1, ..Limits::default() };
        let mut peers = sessions(4);
        let names = [who(1, 1), who(1, 2), who(1, 2), who(2, 2)];
        let all = names.map(|who| peers.begin(who, |slot| slot).unwrap());
        let mut tables = TargetTables::new(1, 1, 0);
        tables.fence(Host(1), 1);
        peers.release(&all[1]);
        let mut notified = Vec::new();
        assert_eq!(peers.send(Host(1), b"abc", &limits, &tables, |_| ()), 0, "the message is too long");
        assert_eq!(peers.send(Host(1), b"ab", &limits, &tables, |peer| notified.push(peer.own)), 1);
        assert_eq!(
            peers.send(Host(1), b"ab", &limits, &tables, |peer| notified.push(peer.own)),
            0,
            "no room"
        );
        assert_eq!(notified, [2]);
        let reply = |at: usize, text: &[u8]| peers.reply(all[at].endpoint, text, &limits, &tables).is_some();
        assert_eq!([0, 1, 2, 3].map(|at| reply(at, b"ab")), [false, false, false, true]);
        assert!(!reply(3, b"ab"), "no room");
    }

    #[test]
    fn a_waiting_thread_is_woken_by_a_message() {
        let mut peers = sessions(1);
        let inbox = Arc::clone(peers.inbox());
        inbox.wait(std::time::Duration::ZERO);
        let peer = peers.begin(who(1, 1), |slot| slot).unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                inbox.wait(std::time::Duration::MAX);
                inbox.receive(&mut Vec::new())
            });
            assert!(peer.mailbox.deliver(vec![1], 1));
            assert_eq!(waiter.join().unwrap(), Some(peer.sender()));
        });
    }
}
