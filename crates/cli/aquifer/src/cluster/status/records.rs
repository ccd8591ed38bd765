//! Reads the records of the directory and of services of heaps within a limited time.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use aquifer_directory::names::{self, AgentRecord, HeapsRecord, LifeRecord, NodeRecord};
use aquifer_directory::{Directory, DirectoryError};
use aquifer_objects::service::report::HeapReport;

use super::super::location::DirectoryLocation;
use super::super::{heap, key};
use super::{HeapsStatus, LOCAL_TIMEOUT, REMOTE_TIMEOUT};
use crate::state::StateDir;

/// A thread that reads a result. It is abandoned if it takes too long.
pub(super) struct Reader<T> {
    received: Receiver<T>,
    deadline: Instant,
}

impl<T: Send + 'static> Reader<T> {
    /// Starts to read.
    pub(super) fn start(timeout: Duration, read: impl FnOnce() -> T + Send + 'static) -> Self {
        Self::start_many(timeout, move |sender| drop(sender.send(read())))
    }

    /// Starts to read a result that arrives in several parts.
    fn start_many(timeout: Duration, read: impl FnOnce(Sender<T>) + Send + 'static) -> Self {
        let (sender, received) = channel();
        // Without a thread the sender is dropped, and there is no answer.
        let _no_thread = std::thread::Builder::new().name("status-reader".into()).spawn(move || read(sender));
        Self { received, deadline: Instant::now() + timeout }
    }

    /// The next part; `None` after the timeout or the last part.
    pub(super) fn wait(&self) -> Option<T> {
        self.next().ok()
    }

    /// The next part, if it has arrived.
    pub(super) fn now(&self) -> Option<T> {
        self.received.try_recv().ok()
    }

    fn next(&self) -> Result<T, RecvTimeoutError> {
        self.received.recv_timeout(self.deadline.saturating_duration_since(Instant::now()))
    }
}

/// Records of a cluster in the directory.
#[derive(Debug)]
pub(super) struct Records {
    pub nodes: Vec<NodeRecord>,
    pub lives: Vec<LifeRecord>,
    pub heaps: Vec<HeapsStatus>,
    pub agents: Vec<AgentRecord>,
}

/// A part of the result.
enum Part {
    Records(Result<Records, DirectoryError>),
    Heaps(u16, Vec<HeapReport>),
}

impl Records {
    /// Reads the records of nodes, services of heaps and agents from the directory, and asks the
    /// services. Returns `None` and adds a problem if the directory does not answer.
    pub(super) fn read(
        state: &StateDir,
        location: &DirectoryLocation,
        problems: &mut Vec<String>,
    ) -> Option<Self> {
        let timeout = if location.is_own() { LOCAL_TIMEOUT } else { REMOTE_TIMEOUT };
        let (state, for_thread) = (state.clone(), location.clone());
        let reader = Reader::start_many(timeout, move |sender| read_parts(&state, &for_thread, &sender));
        let mut records = match reader.next() {
            Ok(Part::Records(Ok(records))) => records,
            Ok(Part::Records(Err(error))) => {
                problems.push(error.to_string());
                return None;
            }
            Ok(Part::Heaps(..)) | Err(_) => {
                let (location, seconds) = (location.to_string(), timeout.as_secs_f32());
                problems.push(format!("the directory at {location} has not answered within {seconds} s"));
                return None;
            }
        };
        while let Ok(Part::Heaps(node, reports)) = reader.next() {
            let service = records.heaps.iter_mut().find(|service| service.node == node);
            service.into_iter().for_each(|service| service.heaps = Some(reports.clone()));
        }
        Some(records)
    }

    /// Whether the directory has no record of a cluster.
    pub(super) fn is_empty(&self) -> bool {
        self.nodes.is_empty() && self.lives.is_empty() && self.heaps.is_empty() && self.agents.is_empty()
    }
}

fn read_parts(state: &StateDir, location: &DirectoryLocation, sender: &Sender<Part>) {
    let read = || {
        let directory = location.connect(state)?;
        let services = names::heaps(&*directory)?;
        Ok((read_records(&*directory, &services)?, services))
    };
    let services = match read() {
        Ok((records, services)) => {
            // The receiver has stopped waiting.
            if sender.send(Part::Records(Ok(records))).is_err() {
                return;
            }
            services
        }
        Err(error) => return drop(sender.send(Part::Records(Err(error)))),
    };
    let Ok(key) = key::load(&state.key_file()) else { return };
    for service in services {
        if let Some(reports) = heap::reports(&service, &key)
            && sender.send(Part::Heaps(service.node, reports)).is_err()
        {
            return;
        }
    }
}

fn read_records(directory: &dyn Directory, services: &[HeapsRecord]) -> Result<Records, DirectoryError> {
    let status = |service: &HeapsRecord| HeapsStatus {
        heaps: None,
        node: service.node,
        address: service.address.clone(),
        memory_bytes: service.memory_bytes,
    };
    Ok(Records {
        nodes: names::nodes(directory)?,
        lives: names::lives(directory)?,
        heaps: services.iter().map(status).collect(),
        agents: names::agents(directory)?,
    })
}
