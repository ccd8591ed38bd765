//! The processes of this host that accept segments.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::programs::ProcessIdentity;

/// Longest wait until a process that has ended is closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// The open processes.
#[derive(Debug, Default)]
pub(super) struct OpenProcesses {
    /// By user and name, the identity of each process if the agent can see the process.
    open: Mutex<BTreeMap<(u32, String), Option<ProcessIdentity>>>,
    /// Notified when a process is closed.
    closed: Condvar,
}

impl OpenProcesses {
    /// Adds a process. Returns false if another one has its name.
    pub fn add(&self, tenant: u32, process: &str, identity: Option<ProcessIdentity>) -> bool {
        match self.open.lock().entry((tenant, process.to_owned())) {
            Entry::Occupied(_) => false,
            Entry::Vacant(free) => {
                free.insert(identity);
                true
            }
        }
    }

    /// Waits until the process with this name is closed, if it has ended or is `identity`: whose
    /// connection the agent has not found closed yet.
    pub fn await_close(&self, tenant: u32, process: &str, identity: Option<ProcessIdentity>) {
        let until = Instant::now() + CLOSE_TIMEOUT;
        let name = (tenant, process.to_owned());
        let mut open = self.open.lock();
        let is_closing = |other: &ProcessIdentity| Some(*other) == identity || !other.is_running();
        while open.get(&name).copied().flatten().as_ref().is_some_and(is_closing)
            && !self.closed.wait_until(&mut open, until).timed_out()
        {}
    }

    pub fn remove(&self, tenant: u32, process: &str) {
        self.open.lock().remove(&(tenant, process.to_owned()));
        self.closed.notify_all();
    }

    pub fn contains(&self, tenant: u32, process: &str) -> bool {
        self.open.lock().contains_key(&(tenant, process.to_owned()))
    }

    pub fn identity(&self, tenant: u32, process: &str) -> Option<ProcessIdentity> {
        self.open.lock().get(&(tenant, process.to_owned())).copied().flatten()
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn the_name_of_a_process_that_has_ended_is_free_when_it_is_closed() {
        let processes = OpenProcesses::default();
        let mut ended = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let own = ProcessIdentity::of(std::process::id());
        assert!(processes.add(1, "worker", ProcessIdentity::of(ended.id())));
        processes.await_close(1, "worker", own);
        assert!(processes.contains(1, "worker"), "it runs, so nothing is awaited");
        ended.kill().unwrap();
        ended.wait().unwrap();
        let (begun, has_begun) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                begun.send(()).unwrap();
                processes.await_close(1, "worker", own);
                assert!(processes.add(1, "worker", own), "the name is free");
            });
            has_begun.recv().unwrap();
            processes.remove(1, "worker");
        });
    }
}
