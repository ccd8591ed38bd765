//! Serves the requests of admitted initiators.

use std::io;

use super::{SESSION_DEPTH, VerbsServer};
use crate::MESSAGE_SLOTS_MAX;
use crate::answered::VerbsPeer;
use crate::messages::{InitiatorMessage, OpenedKey, TargetMessage};
use crate::remap::LentRegion;
use crate::session::{BindEnd, BoundWindow, InFlightRequest, PendingBind, QueuedRequest};
use crate::slots::SENT_BIT;
use crate::sys::queue_pair::{WindowBind, WorkKind, WorkRequest};
use crate::sys::window::Window;
use crate::target::VerbsShared;
use aquifer_fabric::keys::{KeyGrant, KeyId, admits};

/// Bound of the queued answers and messages of one session: twice what an initiator can have sent
/// without an answer.
const WAITING_MAX: usize = 2 * MESSAGE_SLOTS_MAX as usize;

impl VerbsServer {
    pub(super) fn handle_request(
        &mut self,
        shared: &VerbsShared,
        connection_id: usize,
        peer: &VerbsPeer,
        message: &[u8],
    ) {
        let Some(session) = self.sessions.get_mut(&connection_id) else { return };
        let host = peer.who.host.0;
        if session.queued.len() >= WAITING_MAX {
            tracing::warn!(host, "an endpoint has too many unread answers; closing its connection");
            return self.close(connection_id);
        }
        match InitiatorMessage::parse(message) {
            Some(InitiatorMessage::Ask(key_id)) => session.queued.push_back(QueuedRequest::Bind(key_id)),
            Some(InitiatorMessage::Forget(key_id)) => drop(session.windows.remove(&key_id)),
            Some(InitiatorMessage::Message(number, message)) => {
                let limits = &shared.options.limits;
                let is_short = message.len() <= limits.message_bytes_max as usize;
                let had_room =
                    is_short && peer.own.deliver(&peer.mailbox, number, message, limits.receive_depth);
                session.queue_answer(&TargetMessage::Delivered(number, had_room));
            }
            Some(InitiatorMessage::Taken(count)) if peer.mailbox.credit_through(count) => {}
            Some(InitiatorMessage::Taken(_)) => {
                tracing::warn!(host, "an endpoint reports unsent messages as taken; closing its connection");
                return self.close(connection_id);
            }
            None => {
                tracing::warn!(host, "an endpoint violated the protocol; closing its connection");
                return self.close(connection_id);
            }
        }
        self.post_queued(shared, connection_id);
    }

    /// Queues a message and posts it when a slot is free.
    pub(super) fn send_message(&mut self, shared: &VerbsShared, connection_id: usize, message: Vec<u8>) {
        if let Some(session) = self.sessions.get_mut(&connection_id) {
            session.queued.push_back(QueuedRequest::Message(message));
        }
        self.post_queued(shared, connection_id);
    }

    /// Posts queued requests to the device, in order.
    pub(super) fn post_queued(&mut self, shared: &VerbsShared, connection_id: usize) {
        while !self.is_paused
            && let Some(session) = self.sessions.get_mut(&connection_id)
            && session.in_flight.len() < SESSION_DEPTH
            && let Some(first) = session.queued.pop_front()
        {
            let given = match first {
                QueuedRequest::Bind(wanted) => self.bind_window(shared, connection_id, wanted),
                QueuedRequest::Message(message) => match self.outbox.allocate() {
                    Some(slot) => self.send(connection_id, slot, &message),
                    None => {
                        session.queued.push_front(QueuedRequest::Message(message));
                        self.is_outbox_full = true;
                        return;
                    }
                },
            };
            if let Err(error) = given {
                tracing::warn!(%error, "cannot post a request to the device; closing the connection");
                return self.close(connection_id);
            }
        }
    }

    fn send(&mut self, connection_id: usize, slot: u32, message: &[u8]) -> io::Result<()> {
        self.outbox.write(slot, message);
        let kind = WorkKind::Send { local: self.outbox.piece(slot, message.len()) };
        self.post(connection_id, SENT_BIT, InFlightRequest::Message(slot), kind)
    }

    /// Binds a window for a key, if the key is for this session.
    fn bind_window(&mut self, shared: &VerbsShared, connection_id: usize, wanted: KeyId) -> io::Result<()> {
        let Some(session) = self.sessions.get_mut(&connection_id) else { return Ok(()) };
        let Some(who) = session.peer().map(|peer| peer.who) else { return Ok(()) };
        let KeyId { key, start } = wanted;
        let grant = if key.is_table_key() {
            shared.lock().tables.table_grant(who, key, start)
        } else {
            shared.control.lookup(key).filter(|grant| admits(grant.scope, who))
        };
        let Some(grant) = grant.filter(|_| !session.has_window(wanted)) else {
            session.queue_answer(&TargetMessage::Opened(wanted, None));
            return Ok(());
        };
        let lends =
            shared.lock().regions.get(&grant.region).is_some_and(|lent| lent.registration().is_some());
        if !lends {
            session.queue_answer(&TargetMessage::Opened(wanted, None));
            return Ok(());
        }
        let window = if session.windows_in_use() < self.windows_each {
            let made = Window::new(self.device);
            made.inspect_err(|error| tracing::warn!(%error, "cannot allocate a window")).ok()
        } else {
            None
        };
        let Some(window) = window else {
            session.queue_answer(&TargetMessage::Full(wanted));
            return Ok(());
        };
        let device_key = window.fresh_key();
        let opening = {
            let state = shared.lock();
            let lent = state.regions.get(&grant.region).and_then(LentRegion::registration);
            let region = lent.ok_or(io::ErrorKind::NotFound)?;
            let KeyGrant { base: addr, len, access, .. } = grant;
            WindowBind { window: window.raw(), region: region.raw(), key: device_key, addr, len, access }
        };
        let opened = OpenedKey { addr: grant.base, len: grant.len, access: grant.access, device_key };
        let bound = BoundWindow { window, region: grant.region, range: grant.base..grant.base + grant.len };
        let binding = PendingBind { key_id: wanted, bound, opened, end: BindEnd::Open };
        self.post(connection_id, 0, InFlightRequest::Bind(binding), WorkKind::Bind(opening))
    }

    /// Posts a request to the device, and records it until it has ended.
    fn post(
        &mut self,
        connection_id: usize,
        class: u64,
        what: InFlightRequest,
        kind: WorkKind,
    ) -> io::Result<()> {
        let id = class | self.next_id;
        self.next_id += 1;
        let session = self.sessions.get_mut(&connection_id).ok_or(io::ErrorKind::NotConnected)?;
        session.in_flight.insert(id, what);
        self.in_flight.insert(id, connection_id);
        let request = WorkRequest { id, kind, signalled: true, fenced: false };
        // SAFETY: regions and slots are registered for as long as the target lives. A window or a
        // slot is recorded as in flight, so it is neither freed nor reused until the device has
        // reported its end or the queue pair is gone.
        unsafe { session.pair.post(&[request]) }
    }

    pub(super) fn handle_bound(&mut self, connection_id: usize, binding: PendingBind, is_done: bool) {
        let Some(session) = self.sessions.get_mut(&connection_id) else { return };
        let PendingBind { key_id: wanted, bound, opened, end } = binding;
        match end {
            BindEnd::Open if is_done => {
                session.windows.insert(wanted, bound);
                session.queue_answer(&TargetMessage::Opened(wanted, Some(opened)));
            }
            BindEnd::Open | BindEnd::Discard => session.queue_answer(&TargetMessage::Opened(wanted, None)),
            BindEnd::Repeat => session.queued.push_front(QueuedRequest::Bind(wanted)),
        }
    }
}
