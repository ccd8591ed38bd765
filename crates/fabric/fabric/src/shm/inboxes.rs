//! Messages of all endpoints that the target has not received yet.

use std::collections::{BTreeSet, HashMap, VecDeque};

use super::mailbox::{MessageRing, RingCorrupt};
use crate::target::{EndpointNumber, Identity, Sender};

/// The ring of one endpoint.
#[derive(Debug)]
struct PeerInbox {
    who: Identity,
    ring: MessageRing,
    /// The stamp of the endpoint's oldest message, if that is among the heads.
    head: Option<u64>,
}

/// The rings of all endpoints. Only rings with announced messages are read.
#[derive(Debug)]
pub(super) struct Inboxes {
    rings: HashMap<EndpointNumber, PeerInbox>,
    /// The oldest message of each endpoint that has some: its stamp, and the endpoint.
    heads: BTreeSet<(u64, EndpointNumber)>,
    /// Endpoints that hung up and have unread messages, oldest first.
    ended: VecDeque<EndpointNumber>,
    ended_max: usize,
}

impl Inboxes {
    /// Creates an empty set, which keeps the messages of at most `ended_max` endpoints that hung
    /// up.
    pub fn new(ended_max: usize) -> Self {
        Self { rings: HashMap::new(), heads: BTreeSet::new(), ended: VecDeque::new(), ended_max }
    }

    pub fn add(&mut self, from: Sender, ring: MessageRing) {
        self.rings.insert(from.endpoint, PeerInbox { who: from.who, ring, head: None });
    }

    /// Handles the announcement of an endpoint's messages.
    pub fn handle_announced(&mut self, endpoint: EndpointNumber) -> Result<(), RingCorrupt> {
        if let Some(inbox) = self.rings.get_mut(&endpoint)
            && inbox.head.is_none()
            && let Some(stamp) = inbox.ring.oldest_stamp()?
        {
            inbox.head = Some(stamp);
            self.heads.insert((stamp, endpoint));
        }
        Ok(())
    }

    /// Whether there are messages that were announced.
    pub fn has_message(&self) -> bool {
        !self.heads.is_empty()
    }

    /// Takes the oldest message and appends it to `out`. Returns the sender. Calls `corrupt` for
    /// each endpoint that corrupted its ring.
    pub fn receive(&mut self, out: &mut Vec<u8>, mut corrupt: impl FnMut(EndpointNumber)) -> Option<Sender> {
        while let Some((_, endpoint)) = self.heads.pop_first() {
            let Some(inbox) = self.rings.get_mut(&endpoint) else { continue };
            inbox.head = None;
            let from = Sender { who: inbox.who, endpoint };
            let taken = inbox.ring.pop(out);
            if taken.is_err() || self.handle_announced(endpoint).is_err() {
                corrupt(endpoint);
            }
            if taken == Ok(true) {
                self.forget_read();
                return Some(from);
            }
        }
        None
    }

    /// Keeps the unread messages of an endpoint that hung up.
    pub fn end(&mut self, endpoint: EndpointNumber) {
        // The endpoint may have died before it announced its last message.
        let _ = self.handle_announced(endpoint);
        self.ended.push_back(endpoint);
        self.forget_read();
        if self.ended.len() > self.ended_max
            && let Some(oldest) = self.ended.pop_front()
        {
            self.remove(oldest);
        }
    }

    /// Removes endpoints that hung up and whose messages were read.
    fn forget_read(&mut self) {
        let Self { rings, ended, .. } = self;
        if ended.is_empty() {
            return;
        }
        ended.retain(|endpoint| {
            let has_unread = rings.get(endpoint).is_some_and(|inbox| inbox.head.is_some());
            if !has_unread {
                rings.remove(endpoint);
            }
            has_unread
        });
    }

    fn remove(&mut self, endpoint: EndpointNumber) {
        let inbox = self.rings.remove(&endpoint);
        if let Some(stamp) = inbox.and_then(|inbox| inbox.head) {
            self.heads.remove(&(stamp, endpoint));
        }
    }
}
