//! Reads pages back from the memory nodes, and lets none pass whose checksum is wrong.

use std::sync::Arc;
use std::time::Duration;

use aquifer_fabric::{Completion, EndpointError, Memory, PostError, Verb, Work, WorkError};
use aquifer_pool::NodeId;

use crate::integrity::page_crc;
use crate::mutation::Mutation;
use crate::page::{Location, PAGE_BYTES};
use crate::ports::{Connector, Ports};
use crate::slabs::{Place, SlabSet};
use crate::view;

/// Pages that are fetched at once, at most.
pub const FETCH_PAGES_MAX: usize = 64;
/// An endpoint that has nothing to say is asked again after so long: it may have waited for long enough itself.
const PATIENCE: Duration = Duration::from_millis(100);

/// Why a page could not be read back.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// Its memory node cannot be reached any more.
    #[error("memory node {node} is gone, and with it the only copy of the page: {cause}", node = node.0)]
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
    places: Vec<Place>,
    runs: Vec<Run>,
    completions: Vec<Completion>,
    reads: u64,
    mutation: Mutation,
}

/// Consecutive pages of one node, read by one READ.
#[derive(Clone, Copy, Debug)]
struct Run {
    first: usize,
    pages: usize,
}

impl Fetcher {
    /// A fetcher with a buffer of [`FETCH_PAGES_MAX`] pages.
    ///
    /// # Errors
    /// If there is no memory for the buffer.
    pub fn new(connector: Arc<dyn Connector>) -> std::io::Result<Self> {
        let buffer = Memory::create("aquifer-fetch", FETCH_PAGES_MAX * PAGE_BYTES)?;
        Ok(Self {
            ports: Ports::new(connector, Arc::new(buffer)),
            places: Vec::with_capacity(FETCH_PAGES_MAX),
            runs: Vec::with_capacity(FETCH_PAGES_MAX),
            completions: Vec::with_capacity(FETCH_PAGES_MAX),
            reads: 0,
            mutation: Mutation::None,
        })
    }

    /// Break one protocol step on purpose, for tests.
    pub fn mutate(&mut self, mutation: Mutation) {
        self.mutation = mutation;
    }

    /// The buffer: page `i` of a fetch is at `i * PAGE_BYTES`.
    #[must_use]
    pub fn buffer(&self) -> &Arc<Memory> {
        self.ports.memory()
    }

    /// READs posted so far.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.reads
    }

    /// Read the pages into the buffer, in order. Returns how many of them, from the first, are whole; if that is
    /// none, why the first is not.
    ///
    /// # Errors
    /// If the first page cannot be had.
    pub fn fetch(&mut self, slabs: &SlabSet, locations: &[Location]) -> Result<usize, FetchError> {
        assert!((1..=FETCH_PAGES_MAX).contains(&locations.len()));
        self.places.clear();
        self.places.extend(locations.iter().map(|location| slabs.place(*location)));
        self.find_runs();
        for number in 0..self.runs.len() {
            let run = self.runs[number];
            if let Err(error) = self.read(run) {
                return if run.first == 0 { Err(error) } else { Ok(run.first) };
            }
            for index in run.first..run.first + run.pages {
                if let Err(error) = self.verify(index) {
                    return if index == 0 { Err(error) } else { Ok(index) };
                }
            }
        }
        Ok(locations.len())
    }

    fn find_runs(&mut self) {
        self.runs.clear();
        for (index, place) in self.places.iter().enumerate() {
            if let Some(run) = self.runs.last_mut() {
                let first = &self.places[run.first];
                let next = first.remote.addr + (run.pages * PAGE_BYTES) as u64;
                let same = first.node == place.node && first.remote.key == place.remote.key;
                if same && place.remote.addr == next {
                    run.pages += 1;
                    continue;
                }
            }
            self.runs.push(Run { first: index, pages: 1 });
        }
    }

    fn read(&mut self, run: Run) -> Result<(), FetchError> {
        let Place { node, remote, .. } = self.places[run.first];
        self.reads += 1;
        let port = self.ports.port(node).map_err(|cause| FetchError::NodeGone { node, cause })?;
        let local = port.slice(run.first * PAGE_BYTES, run.pages * PAGE_BYTES);
        let work = Work { id: 0, verb: Verb::Read { local, remote }, signalled: true };
        match port.endpoint.post(&[work]) {
            Ok(()) => {}
            Err(PostError::QueueFull { .. }) => unreachable!("one read is outstanding at a time"),
        }
        self.completions.clear();
        while port.endpoint.poll(&mut self.completions, 1) == 0 {
            port.endpoint.wait(PATIENCE);
        }
        match self.completions[0].outcome {
            Ok(_) => Ok(()),
            Err(cause) => {
                if port.endpoint.is_broken() {
                    self.ports.close(node);
                }
                Err(FetchError::Refused { node, cause })
            }
        }
    }

    /// Check a page; a wrong one is read once more, for the fault may have been on the way.
    fn verify(&mut self, index: usize) -> Result<(), FetchError> {
        let Place { node, remote, crc } = self.places[index];
        if self.mutation == Mutation::SkipChecksum {
            return Ok(());
        }
        let mut found = self.buffer_crc(index);
        if found != crc {
            self.read(Run { first: index, pages: 1 })?;
            found = self.buffer_crc(index);
        }
        if found == crc {
            return Ok(());
        }
        Err(FetchError::Damaged { node, address: remote.addr, expected: crc, found })
    }

    fn buffer_crc(&self, index: usize) -> u32 {
        page_crc(view::page(self.ports.memory(), index * PAGE_BYTES))
    }
}
