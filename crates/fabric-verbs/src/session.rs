//! One connection at the target: from a stranger's first message to the windows that are bound for it.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::answered::VerbsPeer;
use super::messages::{Answer, OpenedKey};
use super::sys::connection::CmConnection;
use super::sys::queue_pair::QueuePair;
use super::sys::window::Window;
use aquifer_fabric::handshake::secure::{ClusterKey, RecordCipher, SecureError, respond};
use aquifer_fabric::keys::KeyId;
use aquifer_fabric::work::Key;

/// How far it has come.
#[derive(Debug)]
pub(super) enum SessionPhase {
    /// It must prove by then that it has the cluster's key.
    Proving(Instant),
    /// It has; now it must say who it is, by then.
    Greeting(RecordCipher, Instant),
    Open(Arc<VerbsPeer>),
    /// It was refused, and told so.
    Refused(Instant),
}

/// A window that is being bound.
#[derive(Debug)]
pub(super) struct PendingBind {
    pub name: KeyId,
    pub bound: BoundWindow,
    pub opened: OpenedKey,
    pub fate: BindFate,
}

/// What is to become of a window when it is bound.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum BindFate {
    Opens,
    /// Its key was invalidated meanwhile.
    Dead,
    /// Its region's pages move: it must be bound once more.
    Again,
}

/// A window and the number of the region that it opens.
#[derive(Debug)]
pub(super) struct BoundWindow {
    /// Only kept: it is open until it is dropped.
    #[expect(dead_code, reason = "it is open for as long as it is kept")]
    pub window: Window,
    pub region: usize,
    /// The addresses that it opens.
    pub range: Range<u64>,
}

impl BoundWindow {
    /// Whether it is for a key of a table, and opens something of the range.
    fn is_of_table_in(&self, name: KeyId, range: &Range<u64>) -> bool {
        name.key.is_table_key() && self.range.start < range.end && range.start < self.range.end
    }
}

/// What the device has to do for a session.
#[derive(Debug)]
pub(super) enum InFlightRequest {
    /// The message in that slot of the outbox.
    Message(u32),
    Bind(PendingBind),
}

/// What is to be done for a session when the device can take it.
#[derive(Debug)]
pub(super) enum QueuedRequest {
    Message(Vec<u8>),
    Bind(KeyId),
}

#[derive(Debug)]
pub(super) struct VerbsSession {
    pub windows: HashMap<KeyId, BoundWindow>,
    /// By the ids of their completions.
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
            phase: SessionPhase::Proving(deadline),
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

    /// Windows that are bound or being bound.
    pub fn windows_taken(&self) -> usize {
        self.windows.len() + self.bindings().count()
    }

    /// Whether one is bound or being bound for that key.
    pub fn has_window(&self, name: KeyId) -> bool {
        self.windows.contains_key(&name) || self.bindings().any(|binding| binding.name == name)
    }

    /// Say something when its turn comes.
    pub fn queue_answer(&mut self, answer: &Answer<'_>) {
        let mut message = Vec::new();
        answer.write(&mut message);
        self.queued.push_back(QueuedRequest::Message(message));
    }

    /// Nothing is served by that key any more.
    pub fn invalidate(&mut self, key: Key) {
        // A window that is freed opens nothing any more when this returns.
        self.windows.remove(&KeyId::at(key, 0));
        for binding in self.bindings_mut().filter(|binding| binding.name.key == key) {
            binding.fate = BindFate::Dead;
        }
    }

    /// Nothing of that range is served any more by keys of a table; who request again is told what the table says then.
    pub fn expel(&mut self, range: &Range<u64>) {
        self.windows.retain(|name, bound| !bound.is_of_table_in(*name, range));
        for binding in self.bindings_mut().filter(|binding| binding.bound.is_of_table_in(binding.name, range))
        {
            binding.fate = BindFate::Dead;
        }
    }

    /// Whether the device is still to bind a window for such a key there.
    pub fn is_binding_in(&self, range: &Range<u64>) -> bool {
        self.bindings().any(|binding| binding.bound.is_of_table_in(binding.name, range))
    }

    /// Nothing of that region is served any more, until windows are bound once more.
    pub fn close_windows(&mut self, region: usize) {
        self.windows.retain(|_, bound| bound.region != region);
        let opens =
            |binding: &&mut PendingBind| binding.bound.region == region && binding.fate == BindFate::Opens;
        for binding in self.bindings_mut().filter(opens) {
            binding.fate = BindFate::Again;
        }
    }

    /// Whether the device is still to bind a window of that region.
    pub fn is_binding(&self, region: usize) -> bool {
        self.bindings().any(|binding| binding.bound.region == region)
    }

    fn bindings_mut(&mut self) -> impl Iterator<Item = &mut PendingBind> {
        self.in_flight.values_mut().filter_map(|what| match what {
            InFlightRequest::Bind(binding) => Some(binding),
            InFlightRequest::Message(_) => None,
        })
    }

    /// Whether it took too long to say who it is.
    pub fn is_expired(&self, now: Instant) -> bool {
        match self.phase {
            SessionPhase::Proving(deadline)
            | SessionPhase::Greeting(_, deadline)
            | SessionPhase::Refused(deadline) => now >= deadline,
            SessionPhase::Open(_) => false,
        }
    }
}

impl Drop for VerbsSession {
    fn drop(&mut self) {
        self.pair.stop();
        // Windows go before the queue pair that they are bound to: devices may wait for that for long.
        self.windows.clear();
        self.in_flight.clear();
        self.connection.disconnect();
    }
}

/// One message in, one message out, to those who expect a stream.
#[derive(Debug, Default)]
struct BufferStream {
    heard: Vec<u8>,
    taken: usize,
    said: Vec<u8>,
}

impl Read for BufferStream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let count = out.len().min(self.heard.len() - self.taken);
        out[..count].copy_from_slice(&self.heard[self.taken..self.taken + count]);
        self.taken += count;
        Ok(count)
    }
}

impl Write for BufferStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.said.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a stranger's first message proves, and what it is answered.
pub(super) fn prove(message: &[u8], key: &ClusterKey) -> (Result<RecordCipher, SecureError>, Vec<u8>) {
    let mut script = BufferStream { heard: message.to_vec(), ..BufferStream::default() };
    let outcome = respond(&mut script, key).map(|secured| secured.into_parts().1);
    (outcome, script.said)
}
