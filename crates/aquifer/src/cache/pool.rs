//! The pool as the cache uses it: an extent for each run of items.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use aquifer_cache::server::{RemoteError, RemoteMemory, RemoteRead};
use aquifer_channel::paths::{cluster_folder, own_or_shared_socket};
use aquifer_client::{Error, Extent, ReadJob, Session, WriteJob};
use clap::CommandFactory;
use clap::parser::ValueSource;

use crate::cli::Cli;

/// Smallest extent, in bytes.
const EXTENT_BYTES_MIN: usize = 4096;
/// Extents from this length on are multiples of it.
const SECTION_BYTES: usize = 2 << 20;

/// Extents of a session with the machine's agent.
#[derive(Debug)]
struct Extents {
    session: Session,
    extents: HashMap<u64, Extent>,
    last: u64,
    agent: PathBuf,
    /// The agent has ended the session, and has freed its extents.
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

/// The options and variables that name the agent.
#[derive(Clone, Copy, Default, Debug)]
pub struct AgentChoice<'a> {
    /// The option `--agent`.
    pub agent: Option<&'a Path>,
    /// The state folder, by the option `--state` or the environment.
    pub state: Option<&'a Path>,
    /// Whether that was the option.
    pub state_is_option: bool,
    /// The environment variable `AQUIFER_AGENT`.
    pub variable: Option<&'a Path>,
}

impl AgentChoice<'_> {
    /// The agent's socket: an option counts more than the environment, and that more than the
    /// default.
    pub fn socket(&self) -> PathBuf {
        let variable = self.variable.filter(|_| !self.state_is_option);
        if let Some(path) = self.agent.or(variable) {
            return path.to_owned();
        }
        let folder = self.state.map_or_else(cluster_folder, Path::to_owned);
        own_or_shared_socket(folder.join("agent.sock"))
    }
}

/// Whether the state folder is that of the option `--state`, and not that of the environment.
pub fn state_is_option() -> bool {
    let matches = Cli::command().try_get_matches_from(std::env::args_os());
    matches.is_ok_and(|matches| matches.value_source("state") == Some(ValueSource::CommandLine))
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
        // One of them failed: find out which.
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
            // Those of a node that has ended are freed with it.
            tracing::debug!(%error, "extents of the cache are not freed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_counts_more_than_the_environment_and_that_more_than_the_default() {
        let [given, folder, variable] = ["/a/agent.sock", "/state", "/v/agent.sock"].map(Path::new);
        let all = AgentChoice {
            agent: Some(given),
            state: Some(folder),
            state_is_option: true,
            variable: Some(variable),
        };
        assert_eq!(all.socket(), given);
        let without = AgentChoice { agent: None, ..all };
        assert_eq!(without.socket(), own_or_shared_socket("/state/agent.sock".into()));
        assert_eq!(AgentChoice { state_is_option: false, ..without }.socket(), variable);
        let of_environment = AgentChoice { state_is_option: false, variable: None, ..without };
        assert_eq!(of_environment.socket(), own_or_shared_socket("/state/agent.sock".into()));
        let default = own_or_shared_socket(cluster_folder().join("agent.sock"));
        assert_eq!(AgentChoice::default().socket(), default);
    }
}
