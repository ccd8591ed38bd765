//! The state of one connection at the target, from its handshake to its windows.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::answered::VerbsPeer;
use super::messages::{OpenedKey, TargetMessage};
use super::sys::connection::CmConnection;
use super::sys::queue_pair::QueuePair;
use super::sys::window::Window;
use aquifer_fabric::Admission;
use aquifer_fabric::handshake::secure::respond_to;
use aquifer_fabric::handshake::ticket::Ticket;
use aquifer_fabric::keys::KeyId;
use aquifer_fabric::work::Key;
use aquifer_secure_channel::{ClusterKey, RecordCipher, SecureError};

/// The phase of a connection.
#[derive(Debug)]
pub(super) enum SessionPhase {
    /// The initiator must prove before the deadline that it holds the cluster key, or a ticket.
    Authenticating(Instant),
    /// The key or the ticket is proven. The hello must arrive before the deadline.
    AwaitingHello(RecordCipher, Option<Ticket>, Instant),
    Open(Arc<VerbsPeer>),
    /// The initiator was refused. The answer is being sent.
    Refused(Instant),
}

/// A bind in flight.
#[derive(Debug)]
pub(super) struct PendingBind {
    pub key_id: KeyId,
    pub bound: BoundWindow,
    pub opened: OpenedKey,
    pub end: BindEnd,
}

/// The action when the bind of a window has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum BindEnd {
    Open,
    /// The key was invalidated while the window was being bound.
    Discard,
    /// The region's pages change, so the window must be bound again.
    Repeat,
}

/// A window and the region that it opens.
#[derive(Debug)]
pub(super) struct BoundWindow {
    /// The window is open until this is dropped.
    #[expect(dead_code, reason = "the field keeps the window open")]
    pub window: Window,
    pub region: usize,
    /// The addresses that the window opens.
    pub range: Range<u64>,
}

impl BoundWindow {
    /// Whether the window is for a key of a key table and overlaps the range.
    fn is_of_table_in(&self, key_id: KeyId, range: &Range<u64>) -> bool {
        key_id.key.is_table_key() && self.range.start < range.end && range.start < self.range.end
    }
}

/// A request that the device is processing.
#[derive(Debug)]
pub(super) enum InFlightRequest {
    /// Sends the message in this slot of the outbox.
    Message(u32),
    Bind(PendingBind),
}

/// A request that waits until the device can accept it.
#[derive(Debug)]
pub(super) enum QueuedRequest {
    Message(Vec<u8>),
    Bind(KeyId),
}

#[derive(Debug)]
pub(super) struct VerbsSession {
    pub windows: HashMap<KeyId, BoundWindow>,
    /// The requests that the device is processing, by completion id.
    pub in_flight: HashMap<u64, InFlightRequest>,
    pub connection: CmConnection,
    pub pair: QueuePair,
    pub phase: SessionPhase,
    pub queued: VecDeque<QueuedRequest>,
}

impl VerbsSession {
    pub fn new(connection: CmConnection, pair: QueuePair, deadline: Instant) -> Self {
        Self {
            windows: HashMap::new(),
            connection,
            pair,
            phase: SessionPhase::Authenticating(deadline),
            in_flight: HashMap::new(),
            queued: VecDeque::new(),
        }
    }

    pub fn peer(&self) -> Option<&Arc<VerbsPeer>> {
        match &self.phase {
            SessionPhase::Open(peer) => Some(peer),
            _ => None,
        }
    }

    fn bindings(&self) -> impl Iterator<Item = &PendingBind> {
        self.in_flight.values().filter_map(|what| match what {
            InFlightRequest::Bind(binding) => Some(binding),
            InFlightRequest::Message(_) => None,
        })
    }

    /// Number of windows that are bound or being bound.
    pub fn windows_in_use(&self) -> usize {
        self.windows.len() + self.bindings().count()
    }

    /// Whether a window is bound or being bound for a key.
    pub fn has_window(&self, key_id: KeyId) -> bool {
        self.windows.contains_key(&key_id) || self.bindings().any(|binding| binding.key_id == key_id)
    }

    /// Queues an answer.
    pub fn queue_answer(&mut self, answer: &TargetMessage<'_>) {
        let mut message = Vec::new();
        answer.write(&mut message);
        self.queued.push_back(QueuedRequest::Message(message));
    }

    /// Closes the windows of an invalidated key.
    pub fn invalidate(&mut self, key: Key) {
        // When the window is freed it opens nothing any more.
        self.windows.remove(&KeyId::at(key, 0));
        for binding in self.bindings_mut().filter(|binding| binding.key_id.key == key) {
            binding.end = BindEnd::Discard;
        }
    }

    /// Closes the windows of key-table keys in a range. An initiator that requests a key again gets
    /// the current entry.
    pub fn expel(&mut self, range: &Range<u64>) {
        self.windows.retain(|key_id, bound| !bound.is_of_table_in(*key_id, range));
        for binding in
            self.bindings_mut().filter(|binding| binding.bound.is_of_table_in(binding.key_id, range))
        {
            binding.end = BindEnd::Discard;
        }
    }

    /// Whether a bind for a key-table key in the range is in flight.
    pub fn is_binding_in(&self, range: &Range<u64>) -> bool {
        self.bindings().any(|binding| binding.bound.is_of_table_in(binding.key_id, range))
    }

    /// Closes all windows of a region, and marks binds in flight to be repeated.
    pub fn close_windows(&mut self, region: usize) {
        self.windows.retain(|_, bound| bound.region != region);
        let opens =
            |binding: &&mut PendingBind| binding.bound.region == region && binding.end == BindEnd::Open;
        for binding in self.bindings_mut().filter(opens) {
            binding.end = BindEnd::Repeat;
        }
    }

    /// Whether a bind for the region is in flight.
    pub fn is_binding(&self, region: usize) -> bool {
        self.bindings().any(|binding| binding.bound.region == region)
    }

    fn bindings_mut(&mut self) -> impl Iterator<Item = &mut PendingBind> {
        self.in_flight.values_mut().filter_map(|what| match what {
            InFlightRequest::Bind(binding) => Some(binding),
            InFlightRequest::Message(_) => None,
        })
    }

    /// Whether the deadline of the handshake has passed.
    pub fn is_expired(&self, now: Instant) -> bool {
        match self.phase {
            SessionPhase::Authenticating(deadline)
            | SessionPhase::AwaitingHello(_, _, deadline)
            | SessionPhase::Refused(deadline) => now >= deadline,
            SessionPhase::Open(_) => false,
        }
    }
}

impl Drop for VerbsSession {
    fn drop(&mut self) {
        self.pair.stop();
        // Windows are freed before their queue pair, since devices may take long to free a queue
        // pair with windows.
        self.windows.clear();
        self.in_flight.clear();
        self.connection.disconnect();
    }
}

/// A stream with one received and one sent message, for the handshake.
#[derive(Debug, Default)]
struct BufferStream {
    received: Vec<u8>,
    read: usize,
    sent: Vec<u8>,
}

impl Read for BufferStream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let count = out.len().min(self.received.len() - self.read);
        out[..count].copy_from_slice(&self.received[self.read..self.read + count]);
        self.read += count;
        Ok(count)
    }
}

impl Write for BufferStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.sent.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A proven initiator: its cipher, and its ticket if it has no cluster key.
pub(super) type Proven = (RecordCipher, Option<Ticket>);

/// Handles the first handshake message. Returns the cipher and the ticket, or the error, and the
/// answer.
pub(super) fn authenticate(
    message: &[u8],
    key: &ClusterKey,
    admission: Admission,
) -> (Result<Proven, SecureError>, Vec<u8>) {
    let mut stream = BufferStream { received: message.to_vec(), ..BufferStream::default() };
    let outcome = respond_to(&mut stream, key, admission);
    let outcome = outcome.map(|(secured, ticket)| (secured.into_parts().1, ticket));
    (outcome, stream.sent)
}
