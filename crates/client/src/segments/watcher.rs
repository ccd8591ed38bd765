//! Watches over the agent: when it ends, pages that are elsewhere cannot come any more.
//!
//! The process keeps a reference to each userfaultfd that it has sent to its agent. With the last
//! reference, which may be the keeper's, the kernel would give zeros for missing pages.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aquifer_arena::PageFaults;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Interval at which events of mappings are read after the agent has ended.
const TICK: Duration = Duration::from_millis(20);

/// Segments whose faults the agent serves, by number.
#[derive(Debug, Default)]
pub(super) struct ArmedSegments(Mutex<HashMap<u64, Arc<PageFaults>>>);

impl ArmedSegments {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<PageFaults>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn insert(&self, id: u64, faults: PageFaults) {
        self.lock().insert(id, Arc::new(faults));
    }

    pub fn remove(&self, id: u64) {
        self.lock().remove(&id);
    }
}

/// Starts a thread that waits until the agent closes one of the connections. From then on each touch of a
/// page that is elsewhere is SIGBUS. The thread ends with the process, or when `armed` is dropped.
pub(super) fn start(connections: [OwnedFd; 2], armed: &Arc<ArmedSegments>) -> io::Result<()> {
    let armed = Arc::downgrade(armed);
    let watch = move || {
        // Answers are for the threads that wait for them: only the end matters here.
        let mut polled = connections.each_ref().map(|connection| PollFd::new(connection, PollFlags::RDHUP));
        while !poll(&mut polled, None).is_ok_and(|ready| ready > 0) {}
        drop(connections);
        let mut ended: HashMap<u64, Arc<PageFaults>> = HashMap::new();
        while let Some(armed) = armed.upgrade() {
            let now = armed.lock().clone();
            drop(armed);
            let mut events = Vec::new();
            for (id, faults) in &now {
                // A thread that moves the mapping waits until the event is read.
                let _has_ended = faults.read(&mut events);
                let is_known = ended.get(id).is_some_and(|known| Arc::ptr_eq(known, faults));
                if !is_known && faults.poison_all() {
                    ended.insert(*id, Arc::clone(faults));
                }
            }
            ended.retain(|id, _| now.contains_key(id));
            let tick = Timespec::try_from(TICK).unwrap_or_default();
            let _time = poll(&mut [], Some(&tick));
        }
    };
    std::thread::Builder::new().name("aquifer-segments".into()).spawn(watch).map(drop)
}
