//! Segments that have arrived for processes of this host, and the processes that wait for them.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::SegmentKey;
use super::shared::lock;

/// What has arrived, in order.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    queue: Mutex<Queue>,
    has_arrived: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    arrived: VecDeque<Arrived>,
    waiters: Vec<Waiter>,
}

/// A segment that has arrived, and the name of its process.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Arrived {
    segment: SegmentKey,
    process: String,
}

/// A connection of a process that waits for a segment. The answer is sent by the thread in which
/// one arrives, without the wake-up of another.
#[derive(Clone, Debug)]
pub(super) struct Waiter {
    pub tenant: u32,
    pub process: String,
    pub socket: Arc<OwnedFd>,
}

impl Arrivals {
    /// Adds a segment, unless a connection waits for it, which is returned and waits no more: the
    /// caller answers it, or calls [`Self::put_back`].
    #[must_use]
    pub fn add(&self, segment: SegmentKey, process: &str) -> Option<Waiter> {
        let mut queue = lock(&self.queue);
        let waits = |waiter: &Waiter| (waiter.tenant, &*waiter.process) == (segment.tenant, process);
        if let Some(at) = queue.waiters.iter().position(waits) {
            return Some(queue.waiters.remove(at));
        }
        queue.arrived.push_back(Arrived { segment, process: process.to_owned() });
        self.has_arrived.notify_all();
        None
    }

    /// Adds a segment before all others, because its process has not got it.
    pub fn put_back(&self, segment: SegmentKey, process: &str) {
        lock(&self.queue).arrived.push_front(Arrived { segment, process: process.to_owned() });
        self.has_arrived.notify_all();
    }

    /// Takes the first segment for a process; if there is none, its connection waits.
    pub fn next_or_wait(&self, waiter: Waiter) -> Option<SegmentKey> {
        let mut queue = lock(&self.queue);
        let next = queue.next(waiter.tenant, &waiter.process);
        if next.is_none() {
            queue.waiters.push(waiter);
        }
        next
    }

    /// Has a connection wait no more. Returns false if it did not: it was or will be answered.
    #[must_use]
    pub fn leave(&self, socket: &Arc<OwnedFd>) -> bool {
        let mut queue = lock(&self.queue);
        let at = queue.waiters.iter().position(|waiter| Arc::ptr_eq(&waiter.socket, socket));
        at.map(|at| queue.waiters.remove(at)).is_some()
    }

    /// Takes the first segment for a process, and waits for it.
    pub fn wait(&self, tenant: u32, process: &str, timeout: Duration) -> Option<SegmentKey> {
        let must_wait =
            |queue: &mut Queue| !queue.arrived.iter().any(|arrived| arrived.is_of(tenant, process));
        let waited = self.has_arrived.wait_timeout_while(lock(&self.queue), timeout, must_wait);
        waited.unwrap_or_else(PoisonError::into_inner).0.next(tenant, process)
    }

    /// Forgets a segment that its process has in another way.
    pub fn forget(&self, segment: SegmentKey) {
        lock(&self.queue).arrived.retain(|arrived| arrived.segment != segment);
    }

    /// Forgets all segments of a process.
    pub fn forget_process(&self, tenant: u32, process: &str) {
        lock(&self.queue).arrived.retain(|arrived| !arrived.is_of(tenant, process));
    }
}

impl Queue {
    fn next(&mut self, tenant: u32, process: &str) -> Option<SegmentKey> {
        let at = self.arrived.iter().position(|arrived| arrived.is_of(tenant, process))?;
        self.arrived.remove(at).map(|arrived| arrived.segment)
    }
}

impl Arrived {
    fn is_of(&self, tenant: u32, process: &str) -> bool {
        self.segment.tenant == tenant && self.process == process
    }
}
