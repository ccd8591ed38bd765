//! Sessions of an earlier agent.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_fabric::Memory;
use aquifer_ipc::ring::{RING_BYTES, SessionRing};
use aquifer_ipc::{HeldItem, VERSION};
use aquifer_pool::NodeId;

use super::{AgentRingMemory, SessionParts, SessionRecord, SharedSession};
use crate::book::Book;

/// A session of an earlier agent, not yet resumed.
#[derive(Debug)]
pub struct InheritedSession {
    pub(super) id: u64,
    pub(super) shared: Arc<SharedSession>,
    pub(super) parts: SessionParts,
}

impl InheritedSession {
    /// Opens what the keeper held of a session.
    ///
    /// # Errors
    /// If record or descriptors are not those of a session, or a system call fails.
    pub fn open(item: &HeldItem, fds: Vec<OwnedFd>) -> io::Result<Self> {
        let record: SessionRecord = serde_json::from_str(&item.record).map_err(io::Error::other)?;
        let Ok([ring, book, socket, process]) = <[OwnedFd; 4]>::try_from(fds) else {
            return Err(io::Error::other("the keeper does not hold four descriptors of the session"));
        };
        let ring = AgentRingMemory(Arc::new(Memory::from_fd(ring, RING_BYTES)?));
        // Magic and version are written again, because the program could have changed them.
        let ring = SessionRing::initialise(ring);
        let book = Arc::new(Book::recover(Memory::whole(book)?)?);
        let shared = Arc::new(SharedSession::new(record, socket));
        // A program of another version cannot use this agent: its extents are freed.
        shared.stop.store(record.version != VERSION, Relaxed);
        Ok(Self { id: item.id, shared, parts: SessionParts { ring, book, process } })
    }

    /// The nodes on which the session has extents.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> {
        self.parts.book.entries().map(|(_, entry)| entry.extent.node)
    }

    /// Bytes of the extents in its book.
    pub(super) fn bytes(&self) -> u64 {
        self.parts.book.entries().map(|(_, entry)| entry.extent.class.bytes()).sum()
    }
}
