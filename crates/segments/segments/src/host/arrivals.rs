//! Segments that have arrived for processes of this host, and the processes that wait for them.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::SegmentKey;

/// The queue of arrived segments and of requests to hand segments over, in order, and the
/// connections that wait for them.
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

/// An entry of the queue: a segment that has arrived for a process, or that is requested from it.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Arrived {
    segment: SegmentKey,
    process: String,
    /// The process that requests the segment; `None` if the segment has arrived.
    wanted_by: Option<String>,
}

/// An event for a process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum ProcessEvent {
    /// The process owns a segment from now on.
    Arrived(SegmentKey),
    /// Another process, the one with the given name, requests a segment.
    Asked(SegmentKey, String),
}

/// A connection of a process that waits for a segment. The thread in which a segment arrives sends
/// the answer itself, so that no other thread has to wake up.
#[derive(Clone, Debug)]
pub(super) struct Waiter {
    pub tenant: u32,
    pub process: String,
    pub socket: Arc<OwnedFd>,
    /// Whether the process also waits for requests to hand a segment over.
    pub requests: bool,
}

impl Arrivals {
    /// Adds a segment that has arrived for a process, unless a connection of the process waits.
    ///
    /// A waiting connection is removed and returned: the caller must answer it, or call
    /// [`Self::put_back`] or [`Self::wait_again`].
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

    /// Adds a request to hand a segment over, which replaces an earlier request for the segment.
    /// If a connection of its process waits for requests, it is removed and returned instead.
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

    /// Adds a segment at the front of the queue, because its process did not receive the answer.
    pub fn put_back(&self, segment: SegmentKey, process: &str) {
        let mut queue = self.queue.lock();
        queue.arrived.retain(|arrived| arrived.segment != segment || arrived.wanted_by.is_some());
        queue.arrived.push_front(Arrived { segment, process: process.to_owned(), wanted_by: None });
        self.has_arrived.notify_all();
    }

    /// Adds a connection again that [`Self::add`] has returned and that was not answered.
    pub fn wait_again(&self, waiter: Waiter) {
        self.queue.lock().waiters.push(waiter);
    }

    /// Removes and returns the first event for a process. If there is none, adds its connection to
    /// those that wait.
    pub fn next_or_wait(&self, waiter: Waiter) -> Option<ProcessEvent> {
        let mut queue = self.queue.lock();
        let next = queue.next(waiter.tenant, &waiter.process, waiter.requests);
        if next.is_none() {
            queue.waiters.push(waiter);
        }
        next
    }

    /// Removes a connection from those that wait. Returns false if it was not among them: another
    /// thread has answered it or is about to.
    #[must_use]
    pub fn cancel_wait(&self, socket: &Arc<OwnedFd>) -> bool {
        let mut queue = self.queue.lock();
        let at = queue.waiters.iter().position(|waiter| Arc::ptr_eq(&waiter.socket, socket));
        at.map(|at| queue.waiters.remove(at)).is_some()
    }

    /// Waits until a segment has arrived for a process, and removes it from the queue.
    pub fn wait(&self, tenant: u32, process: &str, timeout: Duration) -> Option<SegmentKey> {
        let is_match = |arrived: &Arrived| arrived.is_of(tenant, process) && arrived.wanted_by.is_none();
        let must_wait = |queue: &mut Queue| !queue.arrived.iter().any(is_match);
        let mut queue = self.queue.lock();
        let _late = self.has_arrived.wait_while_for(&mut queue, must_wait, timeout);
        match queue.next(tenant, process, false)? {
            ProcessEvent::Arrived(segment) => Some(segment),
            ProcessEvent::Asked(..) => None,
        }
    }

    /// Removes the entries of a segment, because its process has received it in another way.
    pub fn forget(&self, segment: SegmentKey) {
        self.queue.lock().arrived.retain(|arrived| arrived.segment != segment);
    }

    /// Removes the entries and the waiting connections of a process.
    pub fn forget_process(&self, tenant: u32, process: &str) {
        let mut queue = self.queue.lock();
        queue.arrived.retain(|arrived| !arrived.is_of(tenant, process));
        queue.waiters.retain(|waiter| waiter.tenant != tenant || waiter.process != process);
    }
}

impl Queue {
    fn next(&mut self, tenant: u32, process: &str, requests: bool) -> Option<ProcessEvent> {
        let is_match =
            |arrived: &Arrived| arrived.is_of(tenant, process) && (requests || arrived.wanted_by.is_none());
        let at = self.arrived.iter().position(is_match)?;
        let Arrived { segment, wanted_by, .. } = self.arrived.remove(at)?;
        Some(wanted_by.map_or(ProcessEvent::Arrived(segment), |by| ProcessEvent::Asked(segment, by)))
    }
}

impl Arrived {
    fn is_of(&self, tenant: u32, process: &str) -> bool {
        self.segment.tenant == tenant && self.process == process
    }
}
