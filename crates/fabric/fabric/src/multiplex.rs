//! One endpoint that several users share, each through an endpoint of its own.
//!
//! A target grants a bounded number of endpoints, and each costs both ends descriptors and memory.
//! A host with many programs shares some. Operations of one user take effect in the order of
//! posting; between users there is no order. An operation that breaks the endpoint breaks it for
//! all of its users.
//!
//! Each user has a part of the queue depth and of the local memories. Messages have no user, so a
//! [`MultiplexedEndpoint`] receives none.

mod drain;
mod table;

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::Memory;
use crate::target::Region;
use crate::wake::WakeFd;
use crate::work::{Completion, DrainHandle, Endpoint, EndpointError, Limits, LocalKey, PostError, Work};
use drain::MultiplexedDrain;
use table::WorkTable;

/// Longest time between two polls of the endpoint while an operation is in flight. Some operations
/// need more than input to make progress, such as a timeout.
const PROGRESS_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// Most completions of one poll of the endpoint.
const POLL_MAX: usize = 64;
/// Longest sleep of the thread while nothing is in flight. The thread then checks whether it holds
/// the last reference to the endpoint.
const IDLE_INTERVAL: Duration = Duration::from_secs(1);

/// Shares one endpoint. The endpoint closes when this value and all users are dropped.
#[derive(Debug)]
pub struct Multiplexer(Arc<Shared>);

/// A multiplexer that exists as long as it has a user.
#[derive(Debug)]
pub struct WeakMultiplexer(Weak<Shared>);

impl WeakMultiplexer {
    /// The multiplexer; `None` if it has ended because it had no user.
    #[must_use]
    pub fn upgrade(&self) -> Option<Multiplexer> {
        self.0.upgrade().map(Multiplexer)
    }
}

#[derive(Debug)]
struct Shared {
    state: Mutex<MultiplexState>,
    /// Notified when an operation is posted, and when a [`Multiplexer`] is dropped.
    begun: Condvar,
    regions: Vec<Region>,
    /// The limits of one user.
    limits: Limits,
    users_max: usize,
}

#[derive(Debug)]
struct MultiplexState {
    endpoint: Box<dyn Endpoint>,
    table: WorkTable,
    polled: Vec<Completion>,
    batch: Vec<Work>,
}

impl Multiplexer {
    /// Shares `endpoint` among at most `users_max` users at a time.
    ///
    /// # Errors
    /// If the thread that polls the endpoint cannot be started.
    ///
    /// # Panics
    /// If the endpoint's limits are less than `users_max`.
    pub fn new(endpoint: Box<dyn Endpoint>, users_max: usize) -> io::Result<Self> {
        let limits = endpoint.limits();
        let limits = Limits {
            queue_depth: limits.queue_depth / users_max,
            local_regions_max: limits.local_regions_max / users_max,
            ..limits
        };
        assert!(limits.queue_depth > 0 && limits.local_regions_max > 0, "each user has a part");
        let regions = endpoint.regions().to_vec();
        let table = WorkTable::new(limits.queue_depth * users_max);
        let state = MultiplexState { endpoint, table, polled: Vec::new(), batch: Vec::new() };
        let (state, begun) = (Mutex::new(state), Condvar::new());
        let shared = Arc::new(Shared { state, begun, regions, limits, users_max });
        let weak = Arc::downgrade(&shared);
        std::thread::Builder::new().name("multiplexer".into()).spawn(move || {
            while let Some(shared) = weak.upgrade() {
                shared.progress();
            }
        })?;
        Ok(Self(shared))
    }

    /// Adds a user. `None` at the limit of users, if the endpoint is broken, or if it has too few
    /// unregistered local memories for another user.
    #[must_use]
    pub fn add_user(&self) -> Option<MultiplexedEndpoint> {
        let mut state = self.0.state.lock();
        let registered = state.table.local_memories() + self.0.limits.local_regions_max;
        let has_room = state.table.users() < self.0.users_max
            && registered <= self.0.limits.local_regions_max * self.0.users_max;
        if !has_room || state.endpoint.is_broken() {
            return None;
        }
        let wake = Arc::new(OnceLock::new());
        let user = state.table.add_user(Arc::clone(&wake));
        drop(state);
        Some(MultiplexedEndpoint { shared: Arc::clone(&self.0), user, wake, local_memories: 0 })
    }

    /// A reference that does not keep the endpoint open.
    #[must_use]
    pub fn downgrade(&self) -> WeakMultiplexer {
        WeakMultiplexer(Arc::downgrade(&self.0))
    }

    /// The number of users, and of dropped users with operations in flight.
    #[must_use]
    pub fn users(&self) -> usize {
        self.0.state.lock().table.users()
    }
}

impl Drop for Multiplexer {
    fn drop(&mut self) {
        self.0.begun.notify_all();
    }
}

impl Shared {
    /// One turn of the thread: polls the endpoint, and waits for it or for work.
    fn progress(&self) {
        let mut state = self.state.lock();
        state.collect(None);
        if state.table.in_flight() == 0 {
            self.begun.wait_for(&mut state, IDLE_INTERVAL);
            return;
        }
        let ready = state.endpoint.poll_fd().and_then(|fd| fd.as_fd().try_clone_to_owned().ok());
        drop(state);
        let mut fds: Vec<_> = ready.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        // The next turn polls after any outcome.
        let _ = poll(&mut fds, Some(&PROGRESS_INTERVAL));
    }
}

impl MultiplexState {
    /// Polls the endpoint and passes the completions to their users. Wakes all of them but
    /// `caller`.
    fn collect(&mut self, caller: Option<usize>) {
        while self.table.in_flight() > 0 {
            self.polled.clear();
            if self.endpoint.poll(&mut self.polled, POLL_MAX) == 0 {
                return;
            }
            self.polled.iter().for_each(|completion| self.table.complete(completion, caller));
        }
    }
}

/// A user's endpoint.
#[derive(Debug)]
pub struct MultiplexedEndpoint {
    shared: Arc<Shared>,
    user: usize,
    /// Readable while another thread has left completions. Created by the first wait.
    wake: Arc<OnceLock<WakeFd>>,
    local_memories: usize,
}

impl Endpoint for MultiplexedEndpoint {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        let mut guard = self.shared.state.lock();
        let state = &mut *guard;
        let room = self.shared.limits.queue_depth.saturating_sub(state.table.pending(self.user));
        let accepted = batch.len().min(room);
        let was_idle = state.table.in_flight() == 0;
        state.batch.clear();
        for work in &batch[..accepted] {
            let id = state.table.insert(self.user, work);
            // Success must be reported, so that operations in flight are counted.
            state.batch.push(Work { id, verb: work.verb, signalled: true });
        }
        // The parts of all users together are the whole queue.
        state.endpoint.post(&state.batch).expect("the queue has room for the parts of all users");
        state.collect(None);
        let is_waited_for = was_idle && state.table.in_flight() > 0;
        drop(guard);
        if is_waited_for {
            self.shared.begun.notify_all();
        }
        if accepted == batch.len() { Ok(()) } else { Err(PostError::QueueFull { accepted }) }
    }

    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let mut state = self.shared.state.lock();
        state.collect(Some(self.user));
        let count = state.table.drain_done(self.user, out, max);
        // With the lock held, so that no wake-up is lost.
        match self.wake.get() {
            Some(wake) if state.table.has_done(self.user) => wake.wake(),
            Some(wake) => wake.clear(),
            None => {}
        }
        count
    }

    fn wait(&mut self, timeout: Duration) {
        let timeout = Timespec::try_from(timeout).ok();
        // The caller polls after any outcome. Without a descriptor it polls at once.
        if let Some(wake) = self.poll_fd() {
            let _ = poll(&mut [wake], timeout.as_ref());
        }
    }

    fn poll_fd(&self) -> Option<PollFd<'_>> {
        if self.wake.get().is_none() {
            let wake = WakeFd::new().ok()?;
            // With the lock held, so that no completion is missed.
            let state = self.shared.state.lock();
            if state.table.has_done(self.user) {
                wake.wake();
            }
            let _ = self.wake.set(wake);
        }
        Some(PollFd::from_borrowed_fd(self.wake.get()?.as_fd(), PollFlags::IN))
    }

    fn register_local(&mut self, memory: Arc<Memory>) -> Result<LocalKey, EndpointError> {
        let limit = self.shared.limits.local_regions_max;
        if self.local_memories >= limit {
            return Err(EndpointError::TooManyLocal { limit });
        }
        let mut state = self.shared.state.lock();
        let key = state.endpoint.register_local(memory)?;
        state.table.count_local_memory();
        self.local_memories += 1;
        Ok(key)
    }

    fn receive(&mut self, _out: &mut Vec<u8>) -> bool {
        false
    }

    fn regions(&self) -> &[Region] {
        &self.shared.regions
    }

    fn limits(&self) -> Limits {
        self.shared.limits
    }

    fn is_broken(&self) -> bool {
        self.shared.state.lock().endpoint.is_broken()
    }

    fn is_away(&self) -> bool {
        self.shared.state.lock().endpoint.is_away()
    }

    /// The work of the other users ends, too.
    fn treat_as_away(&mut self) {
        let mut state = self.shared.state.lock();
        state.endpoint.treat_as_away();
        state.collect(Some(self.user));
    }

    fn drain_handle(&self) -> Option<Box<dyn DrainHandle>> {
        let state = self.shared.state.lock();
        let unfinished = state.table.in_flight_of(self.user);
        let drain = state.endpoint.drain_handle();
        (!unfinished.is_empty()).then(|| {
            Box::new(MultiplexedDrain { shared: Arc::clone(&self.shared), unfinished, drain })
                as Box<dyn DrainHandle>
        })
    }
}

impl Drop for MultiplexedEndpoint {
    fn drop(&mut self) {
        self.shared.state.lock().table.remove_user(self.user);
        self.shared.begun.notify_all();
    }
}
