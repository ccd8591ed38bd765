//! Reads pages back from memory nodes and checks their checksums.
//!
//! A page with several replicas is read from one of them. If that read fails, is late, or returns
//! damaged bytes, the next replica is read. A late READ may still complete into its buffer, so that
//! buffer is not used again until the READ has completed or its endpoint is closed.

use std::sync::Arc;
use std::time::Duration;

use aquifer_fabric::{Completion, EndpointError, Memory, PostError, Verb, Work, WorkError};
use aquifer_pool::{Extent, NodeId};

use crate::integrity::page_crc;
use crate::mutation::Mutation;
use crate::page::{Location, PAGE_BYTES};
use crate::ports::{Connector, Ports};
use crate::slabs::{SlabId, SlabSet, is_backup_place, page_of};
use crate::view;

/// Maximum number of pages of one fetch.
pub const FETCH_PAGES_MAX: usize = 64;
/// The interval at which an endpoint is polled while no other replica can be read. The endpoint
/// itself has a timeout.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Time after which a READ is late, and another replica is read if there is one.
const LATE_TIMEOUT: Duration = Duration::from_millis(50);
/// Time after which a READ is replaced by a READ of a slow node, if no other node has a replica.
const SLOW_TIMEOUT: Duration = Duration::from_millis(250);
/// Maximum number of buffers of one fetcher. All but one may belong to late READs.
const BUFFERS_MAX: usize = 4;

/// Why a page could not be read back.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The memory node of the last replica cannot be reached.
    #[error(
        "memory node {node}, which has the last replica of the page, cannot be reached: {cause}",
        node = node.0
    )]
    NodeGone {
        /// The node.
        node: NodeId,
        /// The error of the connection.
        cause: EndpointError,
    },
    /// The READ failed.
    #[error("memory node {node} did not return the page: {cause}", node = node.0)]
    Refused {
        /// The node.
        node: NodeId,
        /// The error of the READ.
        cause: WorkError,
    },
    /// The bytes differ from those that were written.
    #[error(
        "the page at {address:#x} of memory node {node} is damaged: \
         CRC32C {found:#010x} instead of {expected:#010x}",
        node = node.0
    )]
    Damaged {
        /// The node.
        node: NodeId,
        /// The page's address in the node's region.
        address: u64,
        /// The CRC32C of the bytes that were written.
        expected: u32,
        /// The CRC32C of the bytes that were read, at the second attempt.
        found: u32,
    },
}

impl FetchError {
    /// Whether some of the pages are unreadable, and others of the node may be readable.
    fn is_of_pages(&self) -> bool {
        matches!(self, Self::Refused { cause: WorkError::Storage, .. })
    }
}

/// Reads pages into its own buffer. One thread uses it.
#[derive(Debug)]
pub struct Fetcher {
    ports: Ports,
    /// The number of the buffer in use, among the local memories of the ports.
    buffer: usize,
    ranges: Vec<ReadRange>,
    /// Nodes on which reading the current pages has failed.
    failed: Vec<NodeId>,
    late: Vec<LateRead>,
    completions: Vec<Completion>,
    next_id: u64,
    reads: u64,
    damaged_pages: u64,
}

/// Consecutive pages of one replica, which one READ reads.
#[derive(Clone, Copy, Debug)]
struct ReadRange {
    first: usize,
    pages: usize,
    slab: SlabId,
    /// The index of the first page in the slab.
    index: u32,
    choice: ReplicaChoice,
}

/// The replica to read from.
#[derive(Clone, Copy, Debug)]
struct ReplicaChoice {
    replica: Extent,
    /// Whether another replica may be read if this one is late.
    may_change: bool,
}

/// A READ that was late and has not completed yet.
#[derive(Clone, Copy, Debug)]
struct LateRead {
    node: NodeId,
    id: u64,
    buffer: usize,
}

/// The outcome of a READ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ReadOutcome {
    Complete,
    Late,
}

impl Fetcher {
    /// A fetcher with a buffer of [`FETCH_PAGES_MAX`] pages.
    ///
    /// # Errors
    /// If there is no memory for the buffer.
    pub fn new(connector: Arc<dyn Connector>) -> std::io::Result<Self> {
        Ok(Self {
            ports: Ports::new(connector, Arc::new(new_buffer()?)),
            buffer: 0,
            ranges: Vec::with_capacity(FETCH_PAGES_MAX),
            failed: Vec::new(),
            late: Vec::new(),
            completions: Vec::with_capacity(FETCH_PAGES_MAX),
            next_id: 0,
            reads: 0,
            damaged_pages: 0,
        })
    }

    /// The buffer of the last fetch, in which page `i` begins at `i * PAGE_BYTES`. The next fetch
    /// may use another buffer.
    #[must_use]
    pub fn buffer(&self) -> &Arc<Memory> {
        self.ports.memory(self.buffer)
    }

    /// The number of READs posted so far.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.reads
    }

    /// The number of late READs that have not completed.
    #[must_use]
    pub fn late_reads(&self) -> usize {
        self.late.len()
    }

    /// The number of damaged pages found so far, each counted once per replica.
    #[must_use]
    pub fn damaged_pages(&self) -> u64 {
        self.damaged_pages
    }

    /// Reads the pages into the buffer, in order, and returns how many of them are whole, counted
    /// from the first.
    ///
    /// # Errors
    /// If the first page cannot be read.
    pub fn fetch(&mut self, slabs: &SlabSet, locations: &[Location]) -> Result<usize, FetchError> {
        assert!((1..=FETCH_PAGES_MAX).contains(&locations.len()));
        if !self.late.is_empty() {
            self.poll_late_reads(None);
        }
        self.plan_ranges(slabs, locations);
        for number in 0..self.ranges.len() {
            let mut range = self.ranges[number];
            let mut outcome = self.read_range(slabs, range);
            if range.first == 0 && range.pages > 1 && outcome.as_ref().is_err_and(FetchError::is_of_pages) {
                // One of the pages is unreadable, perhaps not the first.
                range.pages = 1;
                outcome = self.read_range(slabs, range);
            }
            let replica = match outcome {
                Ok(replica) => replica,
                Err(error) => return if range.first == 0 { Err(error) } else { Ok(range.first) },
            };
            let is_cut = range.pages < self.ranges[number].pages;
            for (index, location) in locations.iter().enumerate().skip(range.first).take(range.pages) {
                if let Err(error) = self.verify(slabs, *location, index, replica) {
                    return if index == 0 { Err(error) } else { Ok(index) };
                }
            }
            if is_cut {
                return Ok(1);
            }
        }
        Ok(locations.len())
    }

    fn plan_ranges(&mut self, slabs: &SlabSet, locations: &[Location]) {
        self.ranges.clear();
        self.failed.clear();
        for (first, location) in locations.iter().enumerate() {
            let (slab, index) = (location.slab(), location.index());
            if let Some(range) = self.ranges.last_mut()
                && range.slab == slab
                && locations[first - 1].0 + 1 == location.0
            {
                range.pages += 1;
                continue;
            }
            let choice = self.choose(slabs, slab).expect("a slab with a referenced page has a replica");
            slabs.touch(slab);
            self.ranges.push(ReadRange { first, pages: 1, slab, index, choice });
        }
    }

    /// A replica of the slab that has not failed: preferably in memory on a node that is not slow
    /// or late, then a backup, starting from the slab's number to spread the load. `None` if all
    /// have failed.
    fn choose(&self, slabs: &SlabSet, slab: SlabId) -> Option<ReplicaChoice> {
        let replicas = slabs.replicas(slab);
        let count = replicas.len();
        if count == 1 {
            let replica = replicas.iter().next().filter(|replica| !self.failed.contains(&replica.node))?;
            return Some(ReplicaChoice { replica, may_change: slabs.may_have_several_copies() });
        }
        let turned = (0..count).map(|turn| (slab.0 as usize + turn) % count);
        let usable = turned
            .filter_map(|at| replicas.placed().nth(at))
            .filter(|(_, replica)| !self.failed.contains(&replica.node));
        let reluctance = |(place, replica): &(usize, Extent)| {
            (slabs.is_slow(replica.node) || self.is_late(replica.node), is_backup_place(*place))
        };
        let chosen = usable.min_by_key(reluctance);
        chosen.map(|(_, replica)| ReplicaChoice { replica, may_change: true })
    }

    fn is_late(&self, node: NodeId) -> bool {
        self.late.iter().any(|late| late.node == node)
    }

    /// Reads a range from its replica, or else from another, and returns the replica that was read.
    fn read_range(&mut self, slabs: &SlabSet, mut range: ReadRange) -> Result<Extent, FetchError> {
        self.failed.clear();
        let mut retried_node = None;
        loop {
            let node = range.choice.replica.node;
            let error = match self.read(slabs, range) {
                Ok(ReadOutcome::Complete) => return Ok(range.choice.replica),
                Ok(ReadOutcome::Late) => FetchError::Refused { node, cause: WorkError::Timeout },
                Err(FetchError::Refused { .. })
                    if retried_node != Some(node)
                        && self.ports.open_port(node).is_none()
                        && !Mutation::TryOnce.is_active() =>
                {
                    // The endpoint broke. It may date from before the node's return, or others may
                    // have broken it.
                    retried_node = Some(node);
                    continue;
                }
                Err(error) => {
                    self.note_failure(slabs, &range);
                    error
                }
            };
            range.choice = self.choose(slabs, range.slab).ok_or(error)?;
        }
    }

    /// Records that reading a range has failed on its node. A replica that was moved meanwhile is
    /// no failure of the node: the slab may even have moved back to it.
    fn note_failure(&mut self, slabs: &SlabSet, range: &ReadRange) {
        let replica = range.choice.replica;
        if has_replica(slabs, range.slab, replica) || Mutation::BlameMovedReplica.is_active() {
            self.failed.push(replica.node);
        }
    }

    /// Whether another replica of a slab should be read because a READ of this node has taken
    /// `waited`. After [`SLOW_TIMEOUT`] a backup, or a replica on a slow node, counts, too.
    fn has_alternative(&self, slabs: &SlabSet, slab: SlabId, node: NodeId, waited: Duration) -> bool {
        let may_be_slow = waited >= SLOW_TIMEOUT;
        slabs.replicas(slab).placed().any(|(place, replica)| {
            let other = replica.node;
            let is_usable = other != node && !self.failed.contains(&other) && !self.is_late(other);
            is_usable && (may_be_slow || !slabs.is_slow(other) && !is_backup_place(place))
        })
    }

    /// Reads consecutive pages of a replica into the buffer.
    fn read(&mut self, slabs: &SlabSet, range: ReadRange) -> Result<ReadOutcome, FetchError> {
        let ReadRange { first, pages, slab, index, choice } = range;
        let node = choice.replica.node;
        let id = self.next_id;
        self.next_id += 1;
        self.reads += 1;
        let buffer = self.buffer;
        let since = choice.may_change.then(|| self.ports.now());
        let port = self.ports.port(node).map_err(|cause| FetchError::NodeGone { node, cause })?;
        let local = port.slice_of(buffer, first * PAGE_BYTES, pages * PAGE_BYTES);
        let verb = Verb::Read { local, remote: page_of(&choice.replica, index) };
        match port.endpoint.post(&[Work { id, verb, signalled: true }]) {
            Ok(()) => {}
            Err(PostError::QueueFull { .. }) => unreachable!("few READs are in flight at a time"),
        }
        loop {
            let port = self.ports.open_port(node).expect("it was used just now");
            self.completions.clear();
            if port.endpoint.poll(&mut self.completions, 1) > 0 {
                let Completion { id: answered, outcome } = self.completions[0];
                if answered != id {
                    self.late.retain(|late| late.node != node || late.id != answered);
                    continue;
                }
                let is_broken = outcome.is_err() && port.endpoint.is_broken();
                if is_broken {
                    self.close(node);
                }
                return outcome
                    .map(|_| ReadOutcome::Complete)
                    .map_err(|cause| FetchError::Refused { node, cause });
            }
            let Some(since) = since else {
                port.endpoint.wait(POLL_INTERVAL);
                continue;
            };
            port.endpoint.wait(LATE_TIMEOUT);
            // A node that was late may have answered meanwhile.
            self.poll_late_reads(Some(node));
            let waited = self.ports.now().saturating_sub(since);
            if waited >= LATE_TIMEOUT && self.has_alternative(slabs, slab, node, waited) {
                tracing::debug!(node = node.0, "READ is late; reading another replica");
                self.late.push(LateRead { node, id, buffer });
                self.change_buffer();
                return Ok(ReadOutcome::Late);
            }
        }
    }

    /// Leaves the buffer to a late READ, and copies the pages that are already in it to another.
    fn change_buffer(&mut self) {
        if Mutation::ReuseLateBuffer.is_active() {
            return;
        }
        let old = Arc::clone(self.buffer());
        self.buffer = self.free_buffer();
        let new = self.buffer();
        let mut page = [0; PAGE_BYTES];
        for offset in (0..FETCH_PAGES_MAX).map(|page| page * PAGE_BYTES) {
            old.read(offset, &mut page);
            new.write(offset, &page);
        }
    }

    fn free_buffer(&mut self) -> usize {
        loop {
            let is_free = |buffer: &usize| self.late.iter().all(|late| late.buffer != *buffer);
            if let Some(buffer) = (0..self.ports.memory_count()).find(is_free) {
                return buffer;
            }
            if self.ports.memory_count() < BUFFERS_MAX
                && let Ok(memory) = new_buffer()
                && let Ok(buffer) = self.ports.add_memory(Arc::new(memory))
            {
                return buffer;
            }
            // A closed endpoint does not write to the buffer any more.
            self.close(self.late[0].node);
        }
    }

    fn close(&mut self, node: NodeId) {
        self.ports.close(node);
        self.late.retain(|late| late.node != node);
    }

    /// Polls for late READs that have completed, except on a node from which another READ is
    /// awaited.
    fn poll_late_reads(&mut self, awaited: Option<NodeId>) {
        for at in (0..self.late.len()).rev() {
            // One poll may have removed several entries.
            let late = self.late.get(at).copied();
            let Some(LateRead { node, .. }) = late.filter(|late| Some(late.node) != awaited) else {
                continue;
            };
            let Some(port) = self.ports.open_port(node) else { continue };
            self.completions.clear();
            port.endpoint.poll(&mut self.completions, FETCH_PAGES_MAX);
            let is_broken = port.endpoint.is_broken();
            let answered = &self.completions;
            self.late.retain(|late| late.node != node || answered.iter().all(|answer| answer.id != late.id));
            if is_broken {
                self.close(node);
            }
        }
    }

    /// Checks a page's checksum. A damaged page is read again, because the damage may be in
    /// transit, and then from other replicas.
    fn verify(
        &mut self,
        slabs: &SlabSet,
        location: Location,
        index: usize,
        replica: Extent,
    ) -> Result<(), FetchError> {
        let expected = slabs.crc(location);
        if Mutation::SkipChecksum.is_active() || self.buffer_crc(index) == expected {
            return Ok(());
        }
        let (node, slab) = (replica.node, location.slab());
        let choice = ReplicaChoice { replica, may_change: true };
        let mut range = ReadRange { first: index, pages: 1, slab, index: location.index(), choice };
        let mut outcome = match self.read(slabs, range) {
            Ok(ReadOutcome::Late) => Err(FetchError::Refused { node, cause: WorkError::Timeout }),
            outcome => outcome.map(drop),
        };
        let found = self.buffer_crc(index);
        if outcome.is_ok() && found == expected {
            return Ok(());
        }
        let was_moved = !has_replica(slabs, slab, replica);
        if outcome.is_ok() {
            self.damaged_pages += u64::from(!was_moved);
            let address = page_of(&replica, location.index()).addr;
            outcome = Err(FetchError::Damaged { node: replica.node, address, expected, found });
        }
        self.failed.clear();
        self.note_failure(slabs, &range);
        while let Some(choice) = self.choose(slabs, slab) {
            range.choice = choice;
            match self.read(slabs, range) {
                Ok(ReadOutcome::Complete) if self.buffer_crc(index) == expected => {
                    if let Err(FetchError::Damaged { .. }) = outcome
                        && !was_moved
                    {
                        tracing::warn!(
                            node = replica.node.0,
                            "page is damaged on this node; read it from another replica"
                        );
                        slabs.report_damage(location, replica.node);
                    }
                    return Ok(());
                }
                Ok(ReadOutcome::Late) => {}
                Ok(ReadOutcome::Complete) | Err(_) => self.note_failure(slabs, &range),
            }
        }
        outcome
    }

    fn buffer_crc(&self, index: usize) -> u32 {
        page_crc(view::page(self.buffer(), index * PAGE_BYTES))
    }
}

/// Whether a slab has this replica, which may have been moved.
fn has_replica(slabs: &SlabSet, slab: SlabId, replica: Extent) -> bool {
    slabs.replicas(slab).iter().any(|other| other == replica)
}

fn new_buffer() -> std::io::Result<Memory> {
    Memory::private("aquifer-fetch", FETCH_PAGES_MAX * PAGE_BYTES)
}
