//! What the parts of a host share.

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
use super::pace::Pace;
use super::peers::Peers;
use super::precedence::Precedence;
use super::programs::{ProcessIdentity, answer, answer_segment};
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

/// What the threads of a host's segments share.
///
/// Lock order: `creating`, the table of segments, a segment, and then any other. `creating` is held
/// during requests to the directory and to other agents, and a segment is not. The table is locked
/// together with a segment in [`SegmentTable::remove_if`] only, and a peer never together with
/// either. All other locks are held for one access.
#[derive(Debug)]
pub(super) struct HostShared {
    pub own: Life,
    /// The lease of the host, with which its processes end.
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
    /// The segments that have arrived for processes.
    pub arrivals: Arrivals,
    pub precedence: Precedence,
    pub pace: Pace,
    pub jobs: JobQueue,
    pub statistics: Statistics,
}

#[derive(Debug)]
pub(super) struct Segment {
    pub holder: Holder,
    /// Absent if it has left for good.
    pub memory: Option<SegmentMemory>,
    /// The copies, the newest first; the first is its own while it owns.
    pub copies: Vec<CopyPlace>,
    /// While pages are elsewhere.
    pub puller: Option<Puller>,
    /// The faults of its program, which sees each page through them when it has come.
    pub served: Option<ServedFaults>,
    /// Told when READs have ended, and when it is held otherwise.
    pub pulled: Arc<Condvar>,
    /// Where it is in the arena of a program.
    pub address: u64,
    /// The process on this host that owns it, or is to own it.
    pub process: String,
    /// That process, if it is open and can be seen.
    pub identity: Option<ProcessIdentity>,
    /// How often it was passed on between processes of this host.
    pub passes: u64,
    /// The process to which it is prepared to be handed over.
    pub target: String,
    /// Its process waits for the outcome of a hand-over, or will ask for it again. If it has the
    /// segment still, the answer says so, and it does not arrive.
    pub is_awaited: bool,
    /// Its process is to have its faults served, and has not asked for it yet.
    pub is_arming: bool,
    /// The last generation whose copies others do not need.
    pub released: u64,
}

/// A segment that is a process's from now on.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// Which.
    pub segment: SegmentKey,
    /// Where it is in the arena of a program.
    pub address: u64,
    /// Its bytes.
    pub data: Arc<Memory>,
    /// Whether pages must be pulled before they are touched.
    pub is_partial: bool,
    /// The tenure of the process.
    pub tenure: Tenure,
}

impl HostShared {
    /// A segment that is owned here.
    pub(super) fn owned(&self, segment: SegmentKey) -> Result<SharedSegment, SegmentError> {
        let entry = self.segments.get(segment);
        let is_owned = |entry: &SharedSegment| entry.lock().holder.has_access();
        entry.filter(is_owned).ok_or(SegmentError::NotOwned(segment))
    }

    /// Has a process of this host receive a segment, which must not be locked.
    pub(super) fn arrive(&self, segment: SegmentKey, process: &str) {
        let Some(waiter) = self.arrivals.add(segment, process) else { return };
        let Some(arrival) = self.arrival_for(segment, process) else {
            // It has left, or is another process's by now.
            return self.arrivals.wait_on(waiter);
        };
        if !answer_segment(&waiter.socket, &arrival) {
            self.arrivals.put_back(segment, process);
            let _was_closed = shutdown(&*waiter.socket, Shutdown::Both);
        }
    }

    /// A segment for a process, if that owns it.
    pub(super) fn arrival_for(&self, segment: SegmentKey, process: &str) -> Option<Arrival> {
        let entry = self.owned(segment).ok()?;
        let mut entry = entry.lock();
        let arrival = entry.arrival(segment).filter(|_| entry.process == process)?;
        entry.is_arming = arrival.is_partial;
        Some(arrival)
    }

    /// Has a process of this host learn that a segment of it is wanted by another process.
    pub(super) fn request(&self, segment: SegmentKey, owner: &str, process: &str) {
        let Some(waiter) = self.arrivals.request(segment, owner, process) else { return };
        // A program that has gone has no segments any more.
        let _is_sent = answer(&waiter.socket, &Answer::Asked { id: segment.id, process: process.to_owned() });
    }
}

impl Segment {
    /// A segment that is not here.
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

    /// Writes down what the next process of the agent must know, before anybody else learns of it.
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

    /// Whether faults may be served: it is owned here, or may be again.
    pub(super) fn may_serve(&self) -> bool {
        self.holder.has_access() || self.is_awaited
    }

    /// What a person sees of it; `None` if it is not owned here.
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

    /// That of its process.
    pub(super) fn tenure(&self) -> Tenure {
        let generation = self.copies.first().map_or(0, |copy| copy.link.generation);
        Tenure { generation, passes: self.passes }
    }

    /// What its process gets.
    pub(super) fn arrival(&self, segment: SegmentKey) -> Option<Arrival> {
        let data = self.memory.as_ref().map(|memory| Arc::clone(&memory.data))?;
        let (is_partial, tenure) = (self.puller.is_some(), self.tenure());
        Some(Arrival { segment, address: self.address, data, is_partial, tenure })
    }

    /// Whether the directory must be asked or told something before it can be handed over.
    pub(super) fn is_unsettled(&self) -> bool {
        matches!(
            self.holder.holding(),
            Holding::Sent { .. } | Holding::Owned { stage: Stage::Unconfirmed | Stage::Unknown, .. }
        )
    }

    /// The first address in a program, and the length; `None` if it has no memory.
    pub(super) fn place(&self) -> Option<(usize, usize)> {
        Some((usize::try_from(self.address).ok()?, usize::try_from(self.bytes()?).ok()?))
    }

    pub(super) fn bytes(&self) -> Option<u64> {
        self.memory.as_ref().map(SegmentMemory::bytes)
    }

    /// The message that a request is; `None` if it must be declined without a step.
    pub(super) fn admitted(&self, request: &Request) -> Option<Message> {
        let message = request.message()?;
        let is_idle = self.puller.as_ref().is_none_or(Puller::is_idle);
        Some(match &request.ask {
            // Its pages are still on their way here from the last time: as if the number was used.
            Ask::Prepare { bytes, .. } if !is_idle || self.bytes() != Some(*bytes) => Message::Prepare(0),
            // It cannot be accepted, so it never will be.
            Ask::Transfer { generation, copies } if copies.is_empty() || copies.len() >= LINKS_MAX => {
                Message::Query(*generation)
            }
            _ => message,
        })
    }
}

pub(super) fn warn_of_directory(error: &DirectoryError) {
    tracing::warn!(%error, "the directory failed during a hand-over");
}
