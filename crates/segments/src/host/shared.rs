//! What the parts of a host share.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;

use aquifer_arena::calls::{Answer, SegmentStatus, Tenure};
use aquifer_channel::descriptor_shares::DescriptorShares;
use aquifer_directory::{DirectoryError, LeaseId};
use aquifer_fabric::tcp::TcpTarget;
use aquifer_fabric::{ClusterKey, Identity, Memory};
use aquifer_ipc::{HeldItem, HeldKind};
use aquifer_keeper::KeeperStore;
use parking_lot::{Condvar, Mutex};
use rustix::net::{Shutdown, shutdown};

use super::arrivals::Arrivals;
use super::copies::RestoringMemory;
use super::held_bytes::HeldBytes;
use super::journal::JournalEntry;
use super::memory::{PAGE_BYTES, SEGMENT_DESCRIPTORS, SegmentMemory};
use super::numbers::UsedNumbers;
use super::pace::Pace;
use super::peer::{Lane, Peer};
use super::precedence::Precedence;
use super::programs::{ProcessIdentity, answer, answer_segment};
use super::registry::Registry;
use super::served::ServedFaults;
use super::statistics::Statistics;
use super::wire::{Ask, CopyPlace, Request};
use super::{SegmentError, SegmentKey};
use crate::ownership::{Holder, Holding, Life, Message, Output, Stage};
use crate::pulling::Puller;
use crate::pulling::lineage::LINKS_MAX;

/// Connections to other agents.
type Peers = HashMap<(Life, Lane), Arc<Mutex<Peer>>>;

#[derive(Debug)]
pub(super) struct HostShared {
    pub own: Life,
    pub identity: Identity,
    pub key: ClusterKey,
    pub registry: Registry,
    pub target: TcpTarget,
    pub segments: Mutex<BTreeMap<SegmentKey, Arc<Mutex<Segment>>>>,
    /// Those that processes are restoring, which nothing else sees.
    pub restoring: Mutex<BTreeMap<SegmentKey, RestoringMemory>>,
    /// Held from the directory's record of a new owner until the segment is among the others.
    pub creating: Mutex<()>,
    pub peers: Mutex<Peers>,
    /// The host's lease, with which its processes end.
    pub lease: LeaseId,
    /// The processes that accept segments, by tenant and name.
    pub processes: Mutex<BTreeMap<(u32, String), Option<ProcessIdentity>>>,
    pub keeper: Arc<dyn KeeperStore>,
    /// Under which the keeper holds the next memory.
    pub next_number: AtomicU64,
    /// What has arrived for them.
    pub arrivals: Arrivals,
    /// The memory of segments of each user on this host.
    pub held_bytes: Arc<HeldBytes>,
    pub numbers: Mutex<UsedNumbers>,
    pub precedence: Precedence,
    /// The descriptors of the agent, which are charged to tenants.
    pub descriptors: Arc<DescriptorShares>,
    pub pace: Pace,
    pub statistics: Statistics,
    /// For the worker; `None` at the end.
    pub jobs: Mutex<Option<Sender<Job>>>,
}

/// Work that must not be done in the thread that answers messages.
#[derive(Debug)]
pub(super) enum Job {
    CarryOut(SegmentKey, Vec<Output>),
    /// The copies of generations up to this one are not needed.
    Release(SegmentKey, u64),
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
    pub(super) fn owned(&self, segment: SegmentKey) -> Result<Arc<Mutex<Segment>>, SegmentError> {
        let entry = self.segments.lock().get(&segment).cloned();
        let is_owned = |entry: &Arc<Mutex<Segment>>| entry.lock().holder.has_access();
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

    /// Memory for a segment.
    ///
    /// # Errors
    /// If the tenant would have too much, or the system refuses.
    pub(super) fn new_memory(&self, segment: SegmentKey, bytes: u64) -> Result<SegmentMemory, SegmentError> {
        let descriptors = self.descriptors.charge(segment.tenant, SEGMENT_DESCRIPTORS)?;
        let owner = descriptors.owner();
        self.numbers.lock().add(owner, segment)?;
        self.held_bytes.charge(owner, bytes)?;
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let memory = match SegmentMemory::create(&self.target, number, segment.tenant, bytes, descriptors) {
            Ok(memory) => memory,
            Err(error) => {
                self.held_bytes.release(owner, bytes);
                return Err(error.into());
            }
        };
        let record = serde_json::to_string(&segment).expect("numbers can be serialised");
        let item = HeldItem { kind: HeldKind::Segment, id: number, pid: 0, uid: segment.tenant, record };
        match self.keeper.hold(&item, &memory.fds()) {
            Ok(()) => Ok(memory),
            Err(refused) => {
                memory.close(&self.target);
                self.held_bytes.release(owner, bytes);
                Err(refused.into())
            }
        }
    }

    /// Frees the memory of a segment. No READ into it is in flight.
    pub(super) fn close_memory(&self, memory: &SegmentMemory) {
        self.keeper.release(HeldKind::Segment, memory.number);
        memory.close(&self.target);
        self.held_bytes.free_in_background(memory.owner(), &memory.data);
    }

    /// Frees the memory of a segment as [`Self::close_memory`] does, before it returns: the program
    /// that waits may allocate as much.
    pub(super) fn close_memory_now(&self, memory: &SegmentMemory) {
        self.keeper.release(HeldKind::Segment, memory.number);
        memory.close(&self.target);
        self.held_bytes.free(memory.owner(), &memory.data);
    }

    /// The process that is open under a name.
    pub(super) fn identity_of(&self, tenant: u32, process: &str) -> Option<ProcessIdentity> {
        self.processes.lock().get(&(tenant, process.to_owned())).copied().flatten()
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
