//! Remote memory of the cache: an extent of the pool for each run of items.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use aquifer_cache::server::{RemoteError, RemoteMemory, RemoteRead};
use aquifer_client::{Error, Extent, ReadJob, Session, WriteJob};

/// Smallest extent, in bytes.
const EXTENT_BYTES_MIN: usize = 4096;
/// Length of a section, in bytes. Larger extents are multiples of it.
const SECTION_BYTES: usize = 2 << 20;

/// Extents of a session with the machine's agent.
#[derive(Debug)]
struct Extents {
    session: Session,
    extents: HashMap<u64, Extent>,
    last: u64,
    agent: PathBuf,
    /// Whether the agent has ended the session and freed its extents.
    is_ended: bool,
}

/// Opens a session with the agent at a path.
///
/// # Errors
/// If no agent answers, or it refuses.
pub fn open(agent: &Path) -> Result<Box<dyn RemoteMemory>, String> {
    let session = Session::open_at(agent)
        .map_err(|error| format!("--pool needs an agent, at {}: {error}", agent.display()))?;
    let agent = agent.to_owned();
    Ok(Box::new(Extents { session, extents: HashMap::new(), last: 0, agent, is_ended: false }))
}

impl RemoteMemory for Extents {
    fn store(&mut self, runs: &[&[u8]]) -> Result<Vec<u64>, RemoteError> {
        if self.is_ended {
            let session = Session::open_at(&self.agent);
            self.session = session.map_err(|error| RemoteError(error.to_string()))?;
            self.is_ended = false;
        }
        let mut extents = Vec::with_capacity(runs.len());
        for run in runs {
            match self.session.allocate(run.len() as u64) {
                Ok(extent) => extents.push(extent),
                Err(error) => {
                    self.free_extents(&extents);
                    return Err(self.failed(&error));
                }
            }
        }
        let jobs: Vec<WriteJob<'_>> = extents
            .iter()
            .zip(runs)
            .map(|(extent, bytes)| WriteJob { extent: *extent, offset: 0, bytes })
            .collect();
        if let Err(error) = self.session.write_many(&jobs) {
            self.free_extents(&extents);
            return Err(self.failed(&error));
        }
        let mut places = Vec::with_capacity(extents.len());
        for extent in extents {
            self.last += 1;
            self.extents.insert(self.last, extent);
            places.push(self.last);
        }
        Ok(places)
    }

    fn read(&mut self, reads: &mut [RemoteRead<'_>]) {
        let mut jobs = Vec::new();
        for read in reads.iter_mut() {
            if let Some(extent) = self.extents.get(&read.place) {
                jobs.push(ReadJob { extent: *extent, offset: read.offset as u64, out: &mut *read.out });
            }
        }
        if self.session.read_many(&mut jobs).is_ok() {
            for read in reads {
                read.is_done = self.extents.contains_key(&read.place);
            }
            return;
        }
        // At least one read failed: repeat each alone to find out which.
        for read in reads {
            let Some(extent) = self.extents.get(&read.place).copied() else { continue };
            read.is_done = self.session.read(&extent, read.offset as u64, read.out).is_ok();
        }
    }

    fn free(&mut self, places: &[u64]) {
        let extents: Vec<Extent> = places.iter().filter_map(|place| self.extents.remove(place)).collect();
        self.free_extents(&extents);
    }

    fn bytes_of(&self, len: usize) -> u64 {
        let bytes = if len <= SECTION_BYTES {
            len.next_power_of_two().max(EXTENT_BYTES_MIN)
        } else {
            len.next_multiple_of(SECTION_BYTES)
        };
        bytes as u64
    }
}

impl Extents {
    fn failed(&mut self, error: &Error) -> RemoteError {
        if matches!(error, Error::AgentGone | Error::SessionEnded(_)) {
            self.is_ended = true;
            self.extents.clear();
        }
        RemoteError(error.to_string())
    }

    fn free_extents(&mut self, extents: &[Extent]) {
        if !extents.is_empty()
            && let Err(error) = self.session.free_many(extents)
        {
            // Extents of a node that has ended are freed with the node.
            tracing::debug!(%error, "extents of the cache are not freed");
        }
    }
}
