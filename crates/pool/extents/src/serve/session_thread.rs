//! The thread of a session: waits for requests, and answers them by the session's core.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use aquifer_channel::try_send_frame;
use aquifer_channel::wakeup::{self, WakeupEvent};
use aquifer_fabric::Tenant;
use aquifer_ipc::Frame;
use aquifer_ipc::ring::{CorruptRing, RingAnswer, RingRequest, SLOTS, SessionRing};

use super::{AgentRingMemory, SessionParts, SessionService, SharedSession};
use crate::core::SessionCore;
use crate::pool::ConnectedPool;

/// Time for which the thread polls the ring before it sleeps, because a wakeup costs more.
const POLL_TIME: Duration = Duration::from_micros(50);
/// Time without requests after which the stock is freed.
const IDLE_TIME: Duration = Duration::from_secs(1);
/// Interval at which a session that has ended retries to free extents on unreachable nodes.
const FREE_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum time between two rounds of maintenance of an idle session.
const SLEEP_MAX: Duration = Duration::from_secs(60);

/// The thread of a session.
#[derive(Debug)]
pub(super) struct SessionThread {
    shared: Arc<SharedSession>,
    ring: SessionRing<AgentRingMemory>,
    process: OwnedFd,
    session: SessionCore<ConnectedPool>,
    last_request_at: Instant,
    requests: Vec<Option<RingRequest>>,
    answers: Vec<RingAnswer>,
}

impl SessionThread {
    /// Connects to the nodes and resumes from the book. The extents count to the account of
    /// `owner`.
    pub(super) fn new(
        service: &SessionService,
        shared: Arc<SharedSession>,
        parts: SessionParts,
        owner: u32,
    ) -> Self {
        let SessionParts { ring, book, process } = parts;
        let tenant = Tenant(shared.record.tenant);
        let memory = Arc::clone(&ring.words().0);
        let connector = Arc::clone(&service.connector);
        let pool = ConnectedPool::new(connector, tenant, service.quota_bytes, memory, service.started);
        let session = SessionCore::new(pool, book, service.accounts.of(Tenant(owner)));
        Self {
            shared,
            ring,
            process,
            session,
            last_request_at: Instant::now(),
            requests: Vec::with_capacity(SLOTS as usize),
            answers: Vec::with_capacity(SLOTS as usize),
        }
    }

    /// Serves the session until its end, and then frees its extents.
    pub(super) fn run(mut self) {
        // An earlier agent may have been killed between its answers and their publication.
        self.publish();
        while !self.shared.stop.load(Relaxed) {
            match self.serve() {
                Ok(true) => {}
                Ok(false) if self.wait() => {}
                Ok(false) => break,
                Err(error) => {
                    tracing::warn!(pid = self.shared.record.pid, %error, "ended a session");
                    let _closed = try_send_frame(&self.shared.socket, &Frame::Ended(error.to_string()), &[]);
                    break;
                }
            }
        }
        // Closing the descriptor would not be enough, because the keeper has another one.
        let _closed = rustix::net::shutdown(&self.shared.socket, rustix::net::Shutdown::Both);
        while !self.session.close() && !self.shared.stop.load(Relaxed) {
            std::thread::park_timeout(FREE_RETRY_INTERVAL);
        }
    }

    /// Number of the next request, as in the ring's counters.
    fn next(&self) -> u32 {
        ring_number(self.session.next_request())
    }

    /// Answers all published requests. Returns whether there were any.
    fn serve(&mut self) -> Result<bool, CorruptRing> {
        let first = self.session.next_request();
        let count = self.ring.requested(ring_number(first))?.wrapping_sub(ring_number(first));
        if count == 0 {
            return Ok(false);
        }
        self.last_request_at = Instant::now();
        let end = first + u64::from(count);
        self.requests.clear();
        self.requests.extend((first..end).map(|number| self.ring.request(ring_number(number))));
        let mut next = first;
        while next < end && !self.shared.stop.load(Relaxed) {
            let from = self.requests.len() - usize::try_from(end - next).unwrap_or(0);
            self.session.answer(next, &self.requests[from..], &mut self.answers);
            for (number, answer) in (next..).zip(&self.answers) {
                self.ring.put_answer(ring_number(number), answer);
            }
            next += self.answers.len() as u64;
            self.session.conclude(next);
            self.publish();
        }
        self.shared.requests.fetch_add(next - first, Relaxed);
        self.report();
        Ok(true)
    }

    fn publish(&self) {
        if self.ring.publish_answers(self.next()) {
            wakeup::notify(&self.shared.socket);
        }
    }

    fn has_requests(&self) -> bool {
        self.ring.requested(self.next()) != Ok(self.next())
    }

    /// Waits for a request, with maintenance meanwhile. Returns false if the session is over.
    fn wait(&mut self) -> bool {
        if wakeup::poll_until(POLL_TIME, || self.has_requests()) {
            return true;
        }
        while !self.has_requests() && self.session.maintain_stock() {}
        self.session.pool().connect_new_nodes();
        let idle = self.last_request_at.elapsed();
        let has_stock = self.session.has_stock();
        if has_stock && idle >= IDLE_TIME {
            self.session.free_stock();
        }
        self.report();
        if !self.ring.begin_agent_sleep(self.next()) {
            return true;
        }
        let sleep = if has_stock && idle < IDLE_TIME { IDLE_TIME - idle } else { SLEEP_MAX };
        wakeup::wait(self.shared.socket.as_fd(), Some(self.process.as_fd()), sleep);
        loop {
            match wakeup::receive(&self.shared.socket) {
                WakeupEvent::Wakeup | WakeupEvent::Packet(_) => {}
                WakeupEvent::Nothing => break,
                WakeupEvent::Closed => return false,
            }
        }
        !has_exited(&self.process)
    }

    fn report(&self) {
        let usage = self.session.usage();
        self.shared.extents.store(usage.extents, Relaxed);
        self.shared.bytes.store(usage.bytes, Relaxed);
        self.shared.stocked_bytes.store(usage.stocked_bytes, Relaxed);
    }
}

/// Whether the process of a pidfd has exited.
fn has_exited(process: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut entries = [PollFd::new(process, PollFlags::IN)];
    poll(&mut entries, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
}

/// The lower half of a request's number, as in the ring's counters.
#[expect(clippy::cast_possible_truncation, reason = "the ring's counters wrap")]
fn ring_number(request: u64) -> u32 {
    request as u32
}
