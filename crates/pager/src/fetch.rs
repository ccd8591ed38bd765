//! Reads pages back from the memory nodes, and lets none pass whose checksum is wrong.
//!
//! A page with several copies is read from one of them; if that fails, is damaged or is late, from another. A READ that is not waited for
//! any longer may still be answered: its buffer is left to it, and another is used, until the answer has come or the endpoint is closed.

use std::sync::Arc;
use std::time::Duration;

use aquifer_fabric::{Completion, EndpointError, Memory, PostError, Verb, Work, WorkError};
use aquifer_pool::{Extent, NodeId};

use crate::integrity::page_crc;
use crate::mutation::Mutation;
use crate::page::{Location, PAGE_BYTES};
use crate::ports::{Connector, Ports};
use crate::slabs::{SlabId, SlabSet, page_of};
use crate::view;

/// Pages that are fetched at once, at most.
pub const FETCH_PAGES_MAX: usize = 64;
/// An endpoint that has nothing to say is asked again after so long: it may have waited for long enough itself.
const PATIENCE: Duration = Duration::from_millis(100);
/// A node that has not answered for so long is late: another copy is asked, if there is one.
const LATE_AFTER: Duration = Duration::from_millis(50);
/// Buffers that one fetcher may have: all but one may wait for late answers.
const BUFFERS_MAX: usize = 4;

/// Why a page could not be read back.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// Its memory node cannot be reached any more.
    #[error("memory node {node} is gone, and with it the last copy of the page: {cause}", node = node.0)]
    NodeGone {
        /// The node.
        node: NodeId,
        /// What the fabric said.
        cause: EndpointError,
    },
    /// The read failed.
    #[error("memory node {node} did not give the page: {cause}", node = node.0)]
    Refused {
        /// The node.
        node: NodeId,
        /// What the fabric said.
        cause: WorkError,
    },
    /// The bytes are not those that were written.
    #[error("the page at {address:#x} of memory node {node} is damaged: CRC32C {found:#010x} instead of {expected:#010x}", node = node.0)]
    Damaged {
        /// The node.
        node: NodeId,
        /// Its address there.
        address: u64,
        /// What was written.
        expected: u32,
        /// What was read, twice.
        found: u32,
    },
}

/// Reads pages into a buffer of its own. One thread uses it.
#[derive(Debug)]
pub struct Fetcher {
    ports: Ports,
    /// The buffer in use, among the local memories of the ports.
    buffer: usize,
    runs: Vec<ReadRun>,
    /// Nodes that did not give the pages that are read just now.
    failed: Vec<NodeId>,
    late: Vec<LateRead>,
    completions: Vec<Completion>,
    next_id: u64,
    reads: u64,
    bad_copies: u64,
}

/// Consecutive pages of one copy, read by one READ.
#[derive(Clone, Copy, Debug)]
struct ReadRun {
    first: usize,
    pages: usize,
    slab: SlabId,
    /// In the slab.
    index: u32,
    choice: ReplicaChoice,
}

/// A copy to read from.
#[derive(Clone, Copy, Debug)]
struct ReplicaChoice {
    copy: Extent,
    /// Whether another could be asked if this one is late.
    has_alternative: bool,
}

/// A READ that is not waited for any longer.
#[derive(Clone, Copy, Debug)]
struct LateRead {
    node: NodeId,
    id: u64,
    buffer: usize,
}

/// What became of a READ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ReadAnswer {
    Here,
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
            runs: Vec::with_capacity(FETCH_PAGES_MAX),
            failed: Vec::new(),
            late: Vec::new(),
            completions: Vec::with_capacity(FETCH_PAGES_MAX),
            next_id: 0,
            reads: 0,
            bad_copies: 0,
        })
    }

    /// The buffer of the last fetch: page `i` of it is at `i * PAGE_BYTES`. The next fetch may use another.
    #[must_use]
    pub fn buffer(&self) -> &Arc<Memory> {
        self.ports.memory(self.buffer)
    }

    /// READs posted so far.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.reads
    }

    /// READs that were late and are not answered yet.
    #[must_use]
    pub fn late(&self) -> usize {
        self.late.len()
    }

    /// Pages found so far that were not what was written, each time on one node.
    #[must_use]
    pub fn bad_copies(&self) -> u64 {
        self.bad_copies
    }

    /// Read the pages into the buffer, in order. Returns how many of them, from the first, are whole; if that is
    /// none, why the first is not.
    ///
    /// # Errors
    /// If the first page cannot be had.
    pub fn fetch(&mut self, slabs: &SlabSet, locations: &[Location]) -> Result<usize, FetchError> {
        assert!((1..=FETCH_PAGES_MAX).contains(&locations.len()));
        if !self.late.is_empty() {
            self.poll_late_reads();
        }
        self.plan_runs(slabs, locations);
        for number in 0..self.runs.len() {
            let run = self.runs[number];
            let copy = match self.read_run(slabs, run) {
                Ok(copy) => copy,
                Err(error) => return if run.first == 0 { Err(error) } else { Ok(run.first) },
            };
            // A run that reaches into another slab was read from the copy that it names for both.
            for (page, index) in (run.index..).zip(run.first..run.first + run.pages) {
                if let Err(error) = self.verify(slabs, locations[index], index, copy, page) {
                    return if index == 0 { Err(error) } else { Ok(index) };
                }
            }
        }
        Ok(locations.len())
    }

    fn plan_runs(&mut self, slabs: &SlabSet, locations: &[Location]) {
        self.runs.clear();
        self.failed.clear();
        for (first, location) in locations.iter().enumerate() {
            let (slab, index) = (location.slab(), location.index());
            if let Some(run) = self.runs.last_mut()
                && run.slab == slab
                && locations[first - 1].0 + 1 == location.0
            {
                run.pages += 1;
                continue;
            }
            let choice = self.choose(slabs, slab).expect("who refers to a page finds a copy of its slab");
            if let Some(run) = self.runs.last_mut() {
                // Slabs that lie side by side, and are nowhere else, are as one.
                let same = run.choice.copy.node == choice.copy.node && run.choice.copy.key == choice.copy.key;
                let next = page_of(&run.choice.copy, run.index).addr + (run.pages * PAGE_BYTES) as u64;
                let is_next = page_of(&choice.copy, index).addr == next;
                if same && is_next && slabs.replicas_wanted() == 1 {
                    run.pages += 1;
                    run.slab = slab;
                    continue;
                }
            }
            self.runs.push(ReadRun { first, pages: 1, slab, index, choice });
        }
    }

    /// A copy of the slab that has not failed; those that are not late first, spread over the nodes. `None` if all have failed.
    fn choose(&self, slabs: &SlabSet, slab: SlabId) -> Option<ReplicaChoice> {
        let copies = slabs.replicas(slab);
        let count = copies.len();
        if count == 1 {
            let copy = copies.iter().next().filter(|copy| !self.failed.contains(&copy.node))?;
            return Some(ReplicaChoice { copy, has_alternative: false });
        }
        let mut chosen: Option<Extent> = None;
        let mut is_slow = false;
        let mut others = 0;
        for turn in 0..count {
            let copy = copies.iter().nth((slab.0 as usize + turn) % count)?;
            if self.failed.contains(&copy.node) {
                continue;
            }
            let slow = slabs.is_slow(copy.node) || self.is_late(copy.node);
            others += usize::from(!slow);
            if chosen.is_none() || is_slow && !slow {
                chosen = Some(copy);
                is_slow = slow;
            }
        }
        let has_alternative = others > usize::from(!is_slow);
        chosen.map(|copy| ReplicaChoice { copy, has_alternative })
    }

    fn is_late(&self, node: NodeId) -> bool {
        self.late.iter().any(|late| late.node == node)
    }

    /// Read a run from the copy that was chosen for it, else from another; from which in the end.
    fn read_run(&mut self, slabs: &SlabSet, run: ReadRun) -> Result<Extent, FetchError> {
        self.failed.clear();
        let mut choice = run.choice;
        let mut tried_again = None;
        loop {
            let node = choice.copy.node;
            let was_open = self.ports.open_port(node).is_some() && !Mutation::TryOnce.is_active();
            let error = match self.read(&choice, run.index, run.first, run.pages) {
                Ok(ReadAnswer::Here) => return Ok(choice.copy),
                Ok(ReadAnswer::Late) => FetchError::Refused { node, cause: WorkError::Timeout },
                Err(_) if tried_again != Some(node) && was_open && self.ports.open_port(node).is_none() => {
                    // The endpoint was of before the node came back.
                    tried_again = Some(node);
                    continue;
                }
                Err(error) => {
                    self.failed.push(node);
                    error
                }
            };
            choice = self.choose(slabs, run.slab).ok_or(error)?;
        }
    }

    /// Read consecutive pages of a copy into the buffer.
    fn read(
        &mut self,
        choice: &ReplicaChoice,
        index: u32,
        first: usize,
        pages: usize,
    ) -> Result<ReadAnswer, FetchError> {
        let node = choice.copy.node;
        let id = self.next_id;
        self.next_id += 1;
        self.reads += 1;
        let buffer = self.buffer;
        let since = choice.has_alternative.then(|| self.ports.now());
        let port = self.ports.port(node).map_err(|cause| FetchError::NodeGone { node, cause })?;
        let local = port.slice_of(buffer, first * PAGE_BYTES, pages * PAGE_BYTES);
        let verb = Verb::Read { local, remote: page_of(&choice.copy, index) };
        match port.endpoint.post(&[Work { id, verb, signalled: true }]) {
            Ok(()) => {}
            Err(PostError::QueueFull { .. }) => unreachable!("few reads are outstanding at a time"),
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
                    .map(|_| ReadAnswer::Here)
                    .map_err(|cause| FetchError::Refused { node, cause });
            }
            let Some(since) = since else {
                port.endpoint.wait(PATIENCE);
                continue;
            };
            port.endpoint.wait(LATE_AFTER);
            if self.ports.now().saturating_sub(since) >= LATE_AFTER {
                tracing::debug!(node = node.0, "a memory node is late; another copy is read");
                self.late.push(LateRead { node, id, buffer });
                self.change_buffer();
                return Ok(ReadAnswer::Late);
            }
        }
    }

    /// The buffer is left to a late answer; what else is in it is kept.
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
            // What is closed writes nothing any more.
            self.close(self.late[0].node);
        }
    }

    fn close(&mut self, node: NodeId) {
        self.ports.close(node);
        self.late.retain(|late| late.node != node);
    }

    /// Whether late answers have come.
    fn poll_late_reads(&mut self) {
        for at in (0..self.late.len()).rev() {
            // One look may have settled several.
            let Some(LateRead { node, .. }) = self.late.get(at).copied() else { continue };
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

    /// Check a page; a wrong one is read once more, for the fault may have been on the way, and then from other copies.
    fn verify(
        &mut self,
        slabs: &SlabSet,
        location: Location,
        index: usize,
        copy: Extent,
        page: u32,
    ) -> Result<(), FetchError> {
        let expected = slabs.crc(location);
        if Mutation::SkipChecksum.is_active() || self.buffer_crc(index) == expected {
            return Ok(());
        }
        let again = ReplicaChoice { copy, has_alternative: false };
        let mut outcome = self.read(&again, page, index, 1).map(|_| ());
        let found = self.buffer_crc(index);
        if outcome.is_ok() && found == expected {
            return Ok(());
        }
        if outcome.is_ok() {
            self.bad_copies += 1;
            let address = page_of(&copy, page).addr;
            outcome = Err(FetchError::Damaged { node: copy.node, address, expected, found });
        }
        self.failed.clear();
        self.failed.push(copy.node);
        while let Some(choice) = self.choose(slabs, location.slab()) {
            match self.read(&choice, location.index(), index, 1) {
                Ok(ReadAnswer::Here) if self.buffer_crc(index) == expected => {
                    if let Err(FetchError::Damaged { .. }) = outcome {
                        tracing::warn!(node = copy.node.0, "a damaged page was read from another copy");
                        slabs.report_damage(location, copy.node);
                    }
                    return Ok(());
                }
                Ok(ReadAnswer::Late) => {}
                Ok(ReadAnswer::Here) | Err(_) => self.failed.push(choice.copy.node),
            }
        }
        outcome
    }

    fn buffer_crc(&self, index: usize) -> u32 {
        page_crc(view::page(self.buffer(), index * PAGE_BYTES))
    }
}

fn new_buffer() -> std::io::Result<Memory> {
    Memory::create("aquifer-fetch", FETCH_PAGES_MAX * PAGE_BYTES)
}
