//! The processes of this host that accept segments.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use parking_lot::Mutex;

use super::programs::ProcessIdentity;

/// The open processes by user and name, each with its identity if the agent can see the process.
#[derive(Debug, Default)]
pub(super) struct OpenProcesses(Mutex<BTreeMap<(u32, String), Option<ProcessIdentity>>>);

impl OpenProcesses {
    /// Adds a process. Returns false if another one has its name.
    pub fn add(&self, tenant: u32, process: &str, identity: Option<ProcessIdentity>) -> bool {
        match self.0.lock().entry((tenant, process.to_owned())) {
            Entry::Occupied(_) => false,
            Entry::Vacant(free) => {
                free.insert(identity);
                true
            }
        }
    }

    pub fn remove(&self, tenant: u32, process: &str) {
        self.0.lock().remove(&(tenant, process.to_owned()));
    }

    pub fn contains(&self, tenant: u32, process: &str) -> bool {
        self.0.lock().contains_key(&(tenant, process.to_owned()))
    }

    pub fn identity(&self, tenant: u32, process: &str) -> Option<ProcessIdentity> {
        self.0.lock().get(&(tenant, process.to_owned())).copied().flatten()
    }
}
