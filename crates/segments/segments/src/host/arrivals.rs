//! Segments that have arrived for processes of this host, and the processes that wait for them.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::SegmentKey;

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

/// A segment that has arrived, or is wanted from its process, and the name of that.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Arrived {
    segment: SegmentKey,
    process: String,
    /// The process that is to have it.
    wanted_by: Option<String>,
}

/// What a process is told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum News {
    /// A segment is its from now on.
    Arrived(SegmentKey),
    /// It is wanted to hand a segment over to another process.
    Asked(SegmentKey, String),
}

/// A connection of a process that waits for a segment. The answer is sent by the thread in which
/// one arrives, without the wake-up of another.
#[derive(Clone, Debug)]
pub(super) struct Waiter {
    pub tenant: u32,
    pub process: String,
    pub socket: Arc<OwnedFd>,
    /// Whether it also waits for requests to hand a segment over.
    pub requests: bool,
}

impl Arrivals {
    /// Adds a segment, unless a connection waits for it, which is returned and waits no more: the
    /// caller answers it, or calls [`Self::put_back`].
    #[must_use]
    pub fn add(&self, segment: SegmentKey, process: &str) -> Option<Waiter> {
        let mut queue = self.queue.lock();
        let waits = |waiter: &Waiter| (waiter.tenant, &*waiter.process) == (segment.tenant, process);
        if let Some(at) = queue.waiters.iter().position(waits) {
            return Some(queue.waiters.remove(at));
        }
        queue.arrived.retain(|arrived| arrived.segment != segment || arrived.wanted_by.is_some());
        queue.arrived.push_back(Arrived { segment, process: process.to_owned(), wanted_by: None });
        self.has_arrived.notify_all();
        None
    }

    /// Adds a request to hand a segment over, in the same way. It replaces an earlier one.
    #[must_use]
    pub fn request(&self, segment: SegmentKey, process: &str, wanted_by: &str) -> Option<Waiter> {
        let mut queue = self.queue.lock();
        let waits = |waiter: &Waiter| {
            (waiter.tenant, &*waiter.process) == (segment.tenant, process) && waiter.requests
        };
        if let Some(at) = queue.waiters.iter().position(waits) {
            return Some(queue.waiters.remove(at));
        }
        queue.arrived.retain(|arrived| arrived.segment != segment || arrived.wanted_by.is_none());
        let wanted_by = Some(wanted_by.to_owned());
        queue.arrived.push_back(Arrived { segment, process: process.to_owned(), wanted_by });
        None
    }

    /// Adds a segment before all others, because its process has not got it.
    pub fn put_back(&self, segment: SegmentKey, process: &str) {
        let mut queue = self.queue.lock();
        queue.arrived.retain(|arrived| arrived.segment != segment || arrived.wanted_by.is_some());
        queue.arrived.push_front(Arrived { segment, process: process.to_owned(), wanted_by: None });
        self.has_arrived.notify_all();
    }

    /// Has a connection wait on, to which nothing was answered.
    pub fn wait_on(&self, waiter: Waiter) {
        self.queue.lock().waiters.push(waiter);
    }

    /// Takes the first news for a process; if there are none, its connection waits.
    pub fn next_or_wait(&self, waiter: Waiter) -> Option<News> {
        let mut queue = self.queue.lock();
        let next = queue.next(waiter.tenant, &waiter.process, waiter.requests);
        if next.is_none() {
            queue.waiters.push(waiter);
        }
        next
    }

    /// Has a connection wait no more. Returns false if it did not: it was or will be answered.
    #[must_use]
    pub fn leave(&self, socket: &Arc<OwnedFd>) -> bool {
        let mut queue = self.queue.lock();
        let at = queue.waiters.iter().position(|waiter| Arc::ptr_eq(&waiter.socket, socket));
        at.map(|at| queue.waiters.remove(at)).is_some()
    }

    /// Takes the first segment for a process, and waits for it.
    pub fn wait(&self, tenant: u32, process: &str, timeout: Duration) -> Option<SegmentKey> {
        let is_its = |arrived: &Arrived| arrived.is_of(tenant, process) && arrived.wanted_by.is_none();
        let must_wait = |queue: &mut Queue| !queue.arrived.iter().any(is_its);
        let mut queue = self.queue.lock();
        let _late = self.has_arrived.wait_while_for(&mut queue, must_wait, timeout);
        match queue.next(tenant, process, false)? {
            News::Arrived(segment) => Some(segment),
            News::Asked(..) => None,
        }
    }

    /// Forgets a segment that its process has in another way.
    pub fn forget(&self, segment: SegmentKey) {
        self.queue.lock().arrived.retain(|arrived| arrived.segment != segment);
    }

    /// Forgets all segments of a process.
    pub fn forget_process(&self, tenant: u32, process: &str) {
        let mut queue = self.queue.lock();
        queue.arrived.retain(|arrived| !arrived.is_of(tenant, process));
        queue.waiters.retain(|waiter| waiter.tenant != tenant || waiter.process != process);
    }
}

impl Queue {
    fn next(&mut self, tenant: u32, process: &str, requests: bool) -> Option<News> {
        let is_its =
            |arrived: &Arrived| arrived.is_of(tenant, process) && (requests || arrived.wanted_by.is_none());
        let at = self.arrived.iter().position(is_its)?;
        let Arrived { segment, wanted_by, .. } = self.arrived.remove(at)?;
        Some(wanted_by.map_or(News::Arrived(segment), |by| News::Asked(segment, by)))
    }
}

impl Arrived {
    fn is_of(&self, tenant: u32, process: &str) -> bool {
        self.segment.tenant == tenant && self.process == process
    }
}
