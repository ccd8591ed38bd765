//! The state that the threads of a host's segments share, and the state of a segment.

use std::sync::Arc;

use aquifer_arena::calls::{Answer, SegmentStatus, Tenure};
use aquifer_directory::{DirectoryError, LeaseId};
use aquifer_fabric::{ClusterKey, Identity, Memory};
use parking_lot::{Condvar, Mutex};
use rustix::net::{Shutdown, shutdown};

use super::arrivals::Arrivals;
use super::jobs::JobQueue;
use super::journal::JournalEntry;
use super::memories::Memories;
use super::memory::{PAGE_BYTES, SegmentMemory};
use super::open_processes::OpenProcesses;
use super::peers::Peers;
use super::precedence::Precedence;
use super::programs::{ProcessIdentity, answer, answer_segment};
use super::pull_rate_limiter::PullRateLimiter;
use super::registry::Registry;
use super::restores::Restores;
use super::segment_table::{SegmentTable, SharedSegment};
use super::served::ServedFaults;
use super::statistics::Statistics;
use super::wire::{Ask, CopyPlace, Request};
use super::{SegmentError, SegmentKey};
use crate::pulling::Puller;
use crate::pulling::lineage::LINKS_MAX;
use aquifer_ownership::{Holder, Holding, Life, Message, Stage};

/// The state that the threads of a host's segments share.
///
/// Lock order: `creating`, the table of segments, a segment, and then any other. `creating` is held
/// during requests to the directory and to other agents; a segment's lock is not. Only
/// [`SegmentTable::remove_if`] locks the table and a segment together, and a peer is never locked
/// together with either. All other locks are held for one access.
#[derive(Debug)]
pub(super) struct HostShared {
    pub own: Life,
    /// The lease to which the directory's records of this host's processes are attached.
    pub lease: LeaseId,
    pub registry: Registry,
    pub segments: SegmentTable,
    pub memories: Memories,
    pub restores: Restores,
    /// Locked from the directory's record of a new owner until the segment is in the table.
    pub creating: Mutex<()>,
    pub peers: Peers,
    /// How this host identifies itself to other agents.
    pub identity: Identity,
    pub key: ClusterKey,
    pub processes: OpenProcesses,
    /// Segments that processes of this host have not received yet.
    pub arrivals: Arrivals,
    pub precedence: Precedence,
    pub pull_limiter: PullRateLimiter,
    pub jobs: JobQueue,
    pub statistics: Statistics,
}

/// The state of a segment at this host.
#[derive(Debug)]
pub(super) struct Segment {
    pub holder: Holder,
    /// The memory of this host's copy; `None` if the host has no copy.
    pub memory: Option<SegmentMemory>,
    /// The copies, the newest first. While this host owns the segment, the first is its own.
    pub copies: Vec<CopyPlace>,
    /// `None` if all pages are present.
    pub puller: Option<Puller>,
    /// The page faults of the program's mapping, while pages are missing.
    pub served: Option<ServedFaults>,
    /// Notified when READs have ended, and when the holder has changed.
    pub pulled: Arc<Condvar>,
    /// The segment's first address in the arena.
    pub address: u64,
    /// The name of the process on this host that owns the segment, or is to own it.
    pub process: String,
    /// The identity of this process, if it is open and the agent can see it.
    pub identity: Option<ProcessIdentity>,
    /// Number of hand-overs between processes of this host.
    pub passes: u64,
    /// The process for which a hand-over is prepared; empty if none is.
    pub target: String,
    /// Whether the process waits for the outcome of a hand-over, or will repeat its request. If the
    /// hand-over is retracted, the answer to that request says so, and the segment is not queued as
    /// an arrival.
    pub is_awaited: bool,
    /// Whether the process has received the segment with missing pages, and has not sent its
    /// userfaultfd yet.
    pub is_arming: bool,
    /// The greatest generation whose copies other hosts do not need.
    pub released: u64,
}

/// A segment that a process has received.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// The segment.
    pub segment: SegmentKey,
    /// The segment's first address in the arena.
    pub address: u64,
    /// The memory with the segment's bytes.
    pub data: Arc<Memory>,
    /// Whether pages must be pulled before they are touched.
    pub is_partial: bool,
    /// The tenure of the process.
    pub tenure: Tenure,
}

impl HostShared {
    /// Returns a segment that is owned here.
    pub(super) fn owned(&self, segment: SegmentKey) -> Result<SharedSegment, SegmentError> {
        let entry = self.segments.get(segment);
        let is_owned = |entry: &SharedSegment| entry.lock().holder.has_access();
        entry.filter(is_owned).ok_or(SegmentError::NotOwned(segment))
    }

    /// Sends a segment to its process if that waits for one, and otherwise queues it. The segment
    /// must not be locked.
    pub(super) fn arrive(&self, segment: SegmentKey, process: &str) {
        let Some(waiter) = self.arrivals.add(segment, process) else { return };
        let Some(arrival) = self.arrival_for(segment, process) else {
            // The segment has left, or another process owns it by now.
            return self.arrivals.wait_again(waiter);
        };
        if !answer_segment(&waiter.socket, &arrival) {
            self.arrivals.put_back(segment, process);
            let _was_closed = shutdown(&*waiter.socket, Shutdown::Both);
        }
    }

    /// Returns a segment for a process that owns it; `None` if the process does not.
    pub(super) fn arrival_for(&self, segment: SegmentKey, process: &str) -> Option<Arrival> {
        let entry = self.owned(segment).ok()?;
        let mut entry = entry.lock();
        let arrival = entry.arrival(segment).filter(|_| entry.process == process)?;
        entry.is_arming = arrival.is_partial;
        Some(arrival)
    }

    /// Notifies the owner of a segment, a process of this host, that `process` requests it.
    pub(super) fn request(&self, segment: SegmentKey, owner: &str, process: &str) {
        let Some(waiter) = self.arrivals.request(segment, owner, process) else { return };
        // Fails if the program has ended; then the request is void.
        let _is_sent = answer(&waiter.socket, &Answer::Asked { id: segment.id, process: process.to_owned() });
    }
}

impl Segment {
    /// A segment of which this host has nothing.
    pub fn absent(own: Life) -> Self {
        Self {
            holder: Holder::absent(own),
            memory: None,
            copies: Vec::new(),
            puller: None,
            served: None,
            pulled: Arc::default(),
            address: 0,
            process: String::new(),
            identity: None,
            passes: 0,
            target: String::new(),
            is_awaited: false,
            is_arming: false,
            released: 0,
        }
    }

    /// Journals the state for the next process of the agent. Must be called before a change of it
    /// is visible to other hosts or programs.
    pub(super) fn save(&mut self) {
        let Some(memory) = &mut self.memory else { return };
        let entry = JournalEntry {
            holder: self.holder.clone(),
            copies: self.copies.clone(),
            maps: memory.maps(),
            address: self.address,
            process: self.process.clone(),
            identity: self.identity,
            passes: self.passes,
        };
        memory.write_journal(&entry);
    }

    /// Whether faults may be served: the segment is owned here, or will be if its hand-over is
    /// retracted.
    pub(super) fn may_serve(&self) -> bool {
        self.holder.has_access() || self.is_awaited
    }

    /// The segment's status for reports; `None` if it is not owned here.
    pub(super) fn status(&self, segment: SegmentKey) -> Option<SegmentStatus> {
        let bytes = self.bytes().filter(|_| self.holder.has_access())?;
        let missing = self.puller.as_ref().map_or(0, Puller::missing);
        Some(SegmentStatus {
            user: segment.tenant,
            id: segment.id,
            address: self.address,
            bytes,
            missing_bytes: u64::from(missing) * PAGE_BYTES,
            process: self.process.clone(),
            is_open: false,
            target: Some(self.target.clone()).filter(|target| !target.is_empty()),
        })
    }

    /// The tenure of the segment's process.
    pub(super) fn tenure(&self) -> Tenure {
        let generation = self.copies.first().map_or(0, |copy| copy.link.generation);
        Tenure { generation, passes: self.passes }
    }

    /// The segment as its process receives it; `None` if it has no memory.
    pub(super) fn arrival(&self, segment: SegmentKey) -> Option<Arrival> {
        let data = self.memory.as_ref().map(|memory| Arc::clone(&memory.data))?;
        let (is_partial, tenure) = (self.puller.is_some(), self.tenure());
        Some(Arrival { segment, address: self.address, data, is_partial, tenure })
    }

    /// Whether the directory must be read or written before the segment can be handed over.
    pub(super) fn needs_directory(&self) -> bool {
        matches!(
            self.holder.holding(),
            Holding::Sent { .. } | Holding::Owned { stage: Stage::Unconfirmed | Stage::Unknown, .. }
        )
    }

    /// The first address and the length in a program; `None` if the segment has no memory.
    pub(super) fn place(&self) -> Option<(usize, usize)> {
        Some((usize::try_from(self.address).ok()?, usize::try_from(self.bytes()?).ok()?))
    }

    pub(super) fn bytes(&self) -> Option<u64> {
        self.memory.as_ref().map(SegmentMemory::bytes)
    }

    /// Returns the message of a request for the holder, or a message that makes the holder refuse
    /// a request that cannot be carried out. `None` if the request has no message.
    pub(super) fn admitted(&self, request: &Request) -> Option<Message> {
        let message = request.message()?;
        let is_idle = self.puller.as_ref().is_none_or(Puller::is_idle);
        Some(match &request.ask {
            // READs of an earlier ownership are still in flight. Number 0 is declined, because it
            // is decided.
            Ask::Prepare { bytes, .. } if !is_idle || self.bytes() != Some(*bytes) => Message::Prepare(0),
            // The lineage is not valid: refuse this hand-over for good.
            Ask::Transfer { generation, copies } if copies.is_empty() || copies.len() >= LINKS_MAX => {
                Message::Query(*generation)
            }
            _ => message,
        })
    }
}

pub(super) fn log_directory_failure(error: &DirectoryError) {
    tracing::warn!(%error, "a request to the directory failed during a hand-over");
}
