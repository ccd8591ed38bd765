//! Sessions of an earlier agent.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_fabric::Memory;
use aquifer_ipc::HeldItem;
use aquifer_ipc::ring::RING_VERSION;
use aquifer_ipc::ring::{RING_BYTES, SessionRing};
use aquifer_pool::NodeId;

use super::{AgentRingMemory, SessionParts, SessionRecord, SharedSession};
use crate::book::{Book, InvalidBook};

/// Why an item of the keeper is not a session.
#[derive(Debug, thiserror::Error)]
pub enum InheritError {
    /// The record is not that of a session.
    #[error("cannot parse the record of the session: {0}")]
    Record(#[from] serde_json::Error),
    /// The keeper returned another number of descriptors.
    #[error("the keeper holds {0} descriptors of the session instead of 4")]
    Descriptors(usize),
    /// The book was written by a build with another version.
    #[error(transparent)]
    Book(#[from] InvalidBook),
    /// A memfd of the session cannot be mapped.
    #[error("cannot map the memory of the session: {0}")]
    Memory(#[from] io::Error),
}

/// A session of an earlier agent, not yet resumed.
#[derive(Debug)]
pub struct InheritedSession {
    pub(super) id: u64,
    pub(super) shared: Arc<SharedSession>,
    pub(super) parts: SessionParts,
}

impl InheritedSession {
    /// Opens a session that the keeper held.
    ///
    /// # Errors
    /// If record or descriptors are not those of a session, or a system call fails.
    pub fn open(item: &HeldItem, fds: Vec<OwnedFd>) -> Result<Self, InheritError> {
        let record: SessionRecord = serde_json::from_str(&item.record)?;
        let [ring, book, socket, process] =
            <[OwnedFd; 4]>::try_from(fds).map_err(|fds| InheritError::Descriptors(fds.len()))?;
        let ring = AgentRingMemory(Arc::new(Memory::from_fd(ring, RING_BYTES)?));
        // Magic and version are written again, because the program could have changed them.
        let ring = SessionRing::initialise(ring);
        let book = Arc::new(Book::recover(Memory::whole(book)?)?);
        let shared = Arc::new(SharedSession::new(record, socket));
        // A program of another version cannot use this agent: its extents are freed.
        shared.stop.store(record.version != RING_VERSION, Relaxed);
        Ok(Self { id: item.id, shared, parts: SessionParts { ring, book, process } })
    }

    /// The nodes on which the session has extents.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> {
        self.parts.book.entries().map(|(_, entry)| entry.extent.node)
    }

    /// Bytes of the extents in the session's book.
    pub(super) fn bytes(&self) -> u64 {
        self.parts.book.entries().map(|(_, entry)| entry.extent.class.bytes()).sum()
    }
}
