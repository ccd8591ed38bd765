//! Sessions as threads: each waits for its program's requests, answers them, and ends with it.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aquifer_channel::wakeup::{self, WakeupEvent};
use aquifer_channel::{send_frame, try_send_frame};
use aquifer_fabric::{Memory, Tenant};
use aquifer_ipc::ring::{
    CorruptRing, ExtentAnswer, ExtentRequest, RING_BYTES, RingWords, SLOTS, SessionRing,
};
use aquifer_ipc::{Frame, HeldItem, HeldKind, VERSION};
use aquifer_pool::NodeId;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};

use crate::account::{Accounts, UserReport};
use crate::book::Book;
use crate::cluster::{Cluster, Reach};
use crate::session::Session;

/// Sessions of one user at once.
const SESSIONS_PER_USER_MAX: usize = 64;
/// To be woken costs more than to look for so long.
const LOOK: Duration = Duration::from_micros(50);
/// A program that has asked for nothing for so long gets back to the pool what is kept ready for it.
const IDLE: Duration = Duration::from_secs(1);
/// What is on nodes that cannot be reached is given back when they can: how often that is looked for.
const OWED_EVERY: Duration = Duration::from_secs(1);
/// A session with nothing to do looks around all the same.
const SLEEP_MAX: Duration = Duration::from_secs(60);
/// When the agent stops, sessions have so long to give everything back.
const END_PATIENCE: Duration = Duration::from_secs(10);

/// What is held by a process that outlives the agent.
pub trait Keep: Send + Sync + std::fmt::Debug {
    /// Hold this.
    fn keep(&self, put: &HeldItem, fds: &[BorrowedFd<'_>]);
    /// It is over.
    fn unkeep(&self, kind: HeldKind, id: u64);
}

/// A session as the next agent finds it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Record {
    tenant: u32,
    pid: u32,
    /// Of the frames and the ring.
    version: u16,
}

/// A session's figures.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SessionReport {
    /// The user.
    pub tenant: u32,
    /// The program.
    pub pid: u32,
    /// Extents that it has.
    pub extents: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes that are kept ready for it.
    pub stocked_bytes: u64,
    /// Requests that were answered, by this agent.
    pub requests: u64,
}

/// All sessions of an agent.
#[derive(Debug)]
pub struct Sessions {
    reach: Arc<dyn Reach>,
    keep: Arc<dyn Keep>,
    quota_bytes: Option<u64>,
    accounts: Accounts,
    began: Instant,
    state: Mutex<State>,
    /// One of them has ended.
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// No more are opened.
    is_ending: bool,
    live: BTreeMap<u64, Arc<Shared>>,
    /// Of sessions that are left to another agent: what is in them stays known of.
    unserved: Vec<Arc<Book>>,
}

/// Of a session, what its thread and others have in common.
#[derive(Debug)]
struct Shared {
    record: Record,
    socket: OwnedFd,
    stop: AtomicBool,
    extents: AtomicU64,
    bytes: AtomicU64,
    stocked_bytes: AtomicU64,
    requests: AtomicU64,
}

/// The ring's memory.
#[derive(Clone, Debug)]
struct RingMemory(Arc<Memory>);

impl RingWords for RingMemory {
    fn word_u32(&self, offset: usize) -> &std::sync::atomic::AtomicU32 {
        self.0.atomic_u32(offset)
    }

    fn word_u64(&self, offset: usize) -> &AtomicU64 {
        self.0.atomic_u64(offset)
    }
}

/// What a session's thread works with.
#[derive(Debug)]
struct Parts {
    ring: SessionRing<RingMemory>,
    book: Arc<Book>,
    /// The program's, to see its end even if a child has its socket.
    process: OwnedFd,
}

/// A session that another agent left, not yet gone on with.
#[derive(Debug)]
pub struct Left {
    id: u64,
    shared: Arc<Shared>,
    parts: Parts,
}

impl Left {
    /// What the keeper held of it.
    ///
    /// # Errors
    /// If that is not what was put there.
    pub fn open(put: &HeldItem, fds: Vec<OwnedFd>) -> io::Result<Self> {
        let record: Record = serde_json::from_str(&put.record).map_err(io::Error::other)?;
        let Ok([ring, book, socket, process]) = <[OwnedFd; 4]>::try_from(fds) else {
            return Err(io::Error::other("the keeper lacks descriptors of it"));
        };
        let ring = RingMemory(Arc::new(Memory::from_fd(ring, RING_BYTES)?));
        // What the program may have written there decides nothing.
        let ring = SessionRing::initialise(ring);
        let book = Arc::new(Book::recover(Memory::whole(book)?)?);
        let shared = Arc::new(Shared::new(record, socket));
        // Its program speaks otherwise: what it has is given back.
        shared.stop.store(record.version != VERSION, Relaxed);
        Ok(Self { id: put.id, shared, parts: Parts { ring, book, process } })
    }

    /// The nodes that it has something of.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> {
        self.parts.book.entries().map(|(_, entry)| entry.extent.node)
    }

    /// What it has of the pool, as far as its agent could write it down.
    fn bytes(&self) -> u64 {
        self.parts.book.entries().map(|(_, entry)| entry.extent.class.bytes()).sum()
    }
}

impl Sessions {
    /// No sessions yet. Each user may have `quota_bytes`, or half of what nodes lend.
    #[must_use]
    pub fn new(reach: Arc<dyn Reach>, keep: Arc<dyn Keep>, quota_bytes: Option<u64>) -> Arc<Self> {
        // Numbers stay unique over restarts, as the keeper still knows those of before.
        let next = u64::from(std::process::id()) << 32;
        let state = Mutex::new(State { next, ..State::default() });
        Arc::new(Self {
            reach,
            keep,
            quota_bytes,
            accounts: Accounts::default(),
            began: Instant::now(),
            state,
            ended: Condvar::new(),
        })
    }

    /// Open a session for the program at the other end of a socket, and tell it so.
    ///
    /// # Errors
    /// A sentence for whoever runs the program.
    pub fn open(self: &Arc<Self>, socket: &OwnedFd, tenant: u32, pid: u32) -> Result<(), String> {
        let no_memory = |error: io::Error| format!("no memory for another session: {error}");
        let ring = Arc::new(Memory::create("aquifer-session-ring", RING_BYTES).map_err(no_memory)?);
        let book = Arc::new(Book::new().map_err(no_memory)?);
        self.reach.leak_detector().register_ledger(&book);
        let process = process(pid).map_err(|error| format!("your process cannot be watched: {error}"))?;
        let socket = socket.try_clone().map_err(no_memory)?;
        let mut state = self.lock();
        if state.is_ending {
            return Err("the agent is stopping".into());
        }
        let sessions = state.live.values().filter(|shared| shared.record.tenant == tenant).count();
        if sessions >= SESSIONS_PER_USER_MAX {
            return Err(format!(
                "user {tenant} has {SESSIONS_PER_USER_MAX} sessions already: end some first"
            ));
        }
        let id = state.next;
        state.next += 1;
        let record = Record { tenant, pid, version: VERSION };
        let shared = Arc::new(Shared::new(record, socket));
        state.live.insert(id, Arc::clone(&shared));
        drop(state);
        let parts = Parts { ring: SessionRing::initialise(RingMemory(Arc::clone(&ring))), book, process };
        self.keep(id, &shared, &parts);
        let told = send_frame(&shared.socket, &Frame::SessionOpened, &[ring.fd()]);
        if let Err(error) = told.and_then(|()| self.start(id, shared, parts)) {
            tracing::warn!(pid, %error, "a session cannot be opened");
            self.forget(id);
        }
        Ok(())
    }

    /// Go on with sessions that another agent left.
    pub fn restore(self: &Arc<Self>, left: Vec<Left>) {
        // Before any of them can take more.
        for left in &left {
            self.accounts.of(Tenant(left.shared.record.tenant)).charge(left.bytes());
            self.reach.leak_detector().register_ledger(&left.parts.book);
        }
        for Left { id, shared, parts } in left {
            if parts.book.done() == 0 {
                // It may not have been told that it has a session. If it was, it does not heed this.
                let ring = parts.ring.words().0.fd();
                let _gone = try_send_frame(&shared.socket, &Frame::SessionOpened, &[ring]);
            }
            self.lock().live.insert(id, Arc::clone(&shared));
            let book = Arc::clone(&parts.book);
            // If it cannot be gone on with, it stays with the keeper, for another agent.
            if let Err(error) = self.start(id, shared, parts) {
                tracing::error!(%error, "a session cannot be gone on with");
                let mut state = self.lock();
                state.live.remove(&id);
                state.unserved.push(book);
            }
        }
    }

    fn keep(&self, id: u64, shared: &Shared, parts: &Parts) {
        let record = serde_json::to_string(&shared.record).expect("numbers can be written");
        // Its program does not depend on us for its life: the keeper shall not end it.
        let put = HeldItem { kind: HeldKind::Session, id, pid: 0, record };
        let ring = &parts.ring.words().0;
        let fds = [ring.fd(), parts.book.memory().fd(), shared.socket.as_fd(), parts.process.as_fd()];
        self.keep.keep(&put, &fds);
    }

    fn start(self: &Arc<Self>, id: u64, shared: Arc<Shared>, parts: Parts) -> io::Result<()> {
        let sessions = Arc::clone(self);
        let name = format!("session-{}", shared.record.pid);
        std::thread::Builder::new().name(name).spawn(move || {
            Server::new(&sessions, shared, parts).run();
            sessions.forget(id);
        })?;
        Ok(())
    }

    fn forget(&self, id: u64) {
        self.keep.unkeep(HeldKind::Session, id);
        self.lock().live.remove(&id);
        self.ended.notify_all();
    }

    /// End all sessions, and wait until they have given back what they had.
    pub fn end(&self, reason: &str) {
        let mut state = self.lock();
        state.is_ending = true;
        for shared in state.live.values() {
            shared.stop.store(true, Relaxed);
            // Who has gone already, or does not listen, needs no telling, nor waking.
            let _ = try_send_frame(&shared.socket, &Frame::Ended(reason.to_owned()), &[]);
            let _ = rustix::net::shutdown(&shared.socket, rustix::net::Shutdown::Both);
        }
        let deadline = Instant::now() + END_PATIENCE;
        while !state.live.is_empty() && Instant::now() < deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            state = self.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        if !state.live.is_empty() {
            tracing::error!(sessions = state.live.len(), "some sessions do not end");
        }
    }

    /// Figures of all sessions.
    #[must_use]
    pub fn sessions(&self) -> Vec<SessionReport> {
        self.lock().live.values().map(|shared| shared.report()).collect()
    }

    /// Figures of all users that have or had sessions.
    #[must_use]
    pub fn users(&self) -> Vec<UserReport> {
        self.accounts.all().iter().map(|account| account.report()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn process(pid: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

impl Shared {
    fn new(record: Record, socket: OwnedFd) -> Self {
        let zero = || AtomicU64::new(0);
        let (extents, bytes, stocked_bytes, requests) = (zero(), zero(), zero(), zero());
        Self { record, socket, stop: AtomicBool::new(false), extents, bytes, stocked_bytes, requests }
    }

    fn report(&self) -> SessionReport {
        SessionReport {
            tenant: self.record.tenant,
            pid: self.record.pid,
            extents: self.extents.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            stocked_bytes: self.stocked_bytes.load(Relaxed),
            requests: self.requests.load(Relaxed),
        }
    }
}

/// A session's thread.
#[derive(Debug)]
struct Server {
    shared: Arc<Shared>,
    ring: SessionRing<RingMemory>,
    process: OwnedFd,
    session: Session<Cluster>,
    began: Instant,
    heard_at: Instant,
    requests: Vec<Option<ExtentRequest>>,
    answers: Vec<ExtentAnswer>,
}

impl Server {
    fn new(sessions: &Sessions, shared: Arc<Shared>, parts: Parts) -> Self {
        let Parts { ring, book, process } = parts;
        let tenant = Tenant(shared.record.tenant);
        let memory = Arc::clone(&ring.words().0);
        let cluster = Cluster::new(Arc::clone(&sessions.reach), tenant, sessions.quota_bytes, memory);
        let session = Session::new(cluster, book, sessions.accounts.of(tenant));
        Self {
            shared,
            ring,
            process,
            session,
            began: sessions.began,
            heard_at: Instant::now(),
            requests: Vec::with_capacity(SLOTS as usize),
            answers: Vec::with_capacity(SLOTS as usize),
        }
    }

    fn run(mut self) {
        // What an agent before us answered may not have been told.
        self.publish();
        while !self.shared.stop.load(Relaxed) {
            match self.serve() {
                Ok(true) => {}
                Ok(false) if self.wait() => {}
                Ok(false) => break,
                Err(error) => {
                    tracing::warn!(pid = self.shared.record.pid, %error, "a session is ended");
                    let _gone = try_send_frame(&self.shared.socket, &Frame::Ended(error.to_string()), &[]);
                    break;
                }
            }
        }
        // The program hears of it, whoever has its socket.
        let _gone = rustix::net::shutdown(&self.shared.socket, rustix::net::Shutdown::Both);
        while !self.session.close() && !self.shared.stop.load(Relaxed) {
            std::thread::park_timeout(OWED_EVERY);
        }
    }

    /// The number of the next request, as the ring counts.
    fn next(&self) -> u32 {
        ring_number(self.session.next_request())
    }

    /// Answer what was asked; whether there was anything.
    fn serve(&mut self) -> Result<bool, CorruptRing> {
        let first = self.session.next_request();
        let count = self.ring.requested(ring_number(first))?.wrapping_sub(ring_number(first));
        if count == 0 {
            return Ok(false);
        }
        self.heard_at = Instant::now();
        let end = first + u64::from(count);
        self.requests.clear();
        self.requests.extend((first..end).map(|number| self.ring.request(ring_number(number))));
        let now = self.heard_at - self.began;
        let mut next = first;
        while next < end && !self.shared.stop.load(Relaxed) {
            let from = self.requests.len() - usize::try_from(end - next).unwrap_or(0);
            self.session.answer(next, &self.requests[from..], &mut self.answers, now);
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

    /// Wait for a request, and use the time; false if the session is over.
    fn wait(&mut self) -> bool {
        if wakeup::poll_until(LOOK, || self.has_requests()) {
            return true;
        }
        while !self.has_requests() && self.session.tend_stock() {}
        self.session.pool().meet_nodes();
        let idle = self.heard_at.elapsed();
        let has_spare = self.session.has_spare();
        if has_spare && idle >= IDLE {
            self.session.drop_stock();
        }
        self.report();
        if !self.ring.begin_agent_sleep(self.next()) {
            return true;
        }
        let patience = if has_spare && idle < IDLE { IDLE - idle } else { SLEEP_MAX };
        wakeup::wait(self.shared.socket.as_fd(), Some(self.process.as_fd()), patience);
        loop {
            match wakeup::receive(&self.shared.socket) {
                WakeupEvent::Wakeup | WakeupEvent::Packet(_) => {}
                WakeupEvent::Nothing => break,
                WakeupEvent::Closed => return false,
            }
        }
        !has_ended(&self.process)
    }

    fn report(&self) {
        let holdings = self.session.holdings();
        self.shared.extents.store(holdings.extents, Relaxed);
        self.shared.bytes.store(holdings.bytes, Relaxed);
        self.shared.stocked_bytes.store(holdings.stocked_bytes, Relaxed);
    }
}

/// Whether the process behind a pidfd has ended.
fn has_ended(process: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut entries = [PollFd::new(process, PollFlags::IN)];
    poll(&mut entries, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
}

/// The ring's counters are the lower half.
#[expect(clippy::cast_possible_truncation, reason = "the ring's counters wrap")]
fn ring_number(request: u64) -> u32 {
    request as u32
}

#[cfg(test)]
mod golden_tests;
