//! Sessions: one thread for each, and resumption after a restart of the agent.

#[cfg(test)]
mod golden_tests;
mod inherited;
mod session_thread;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use aquifer_channel::descriptor_shares::{DescriptorCharge, DescriptorShares, ShareExceeded};
use aquifer_channel::owners::owner;
use aquifer_channel::peer::PeerProcess;
use aquifer_channel::{HoldRefused, send_frame, try_send_frame};
use aquifer_fabric::{Memory, Tenant};
use aquifer_ipc::ring::RING_VERSION;
use aquifer_ipc::ring::{RING_BYTES, RingWords, SessionRing};
use aquifer_ipc::{Frame, HeldItem, HeldKind};
use aquifer_keeper::KeeperStore;
use aquifer_report::{SessionStatistics, UserStatistics};
use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};

use crate::book::Book;
use crate::core::{SESSIONS_PER_USER_MAX, UserAccounts};
use crate::pool::NodeConnector;
pub use inherited::{InheritError, InheritedSession};
use session_thread::SessionThread;

/// Number of descriptors that a session and its thread need.
const SESSION_DESCRIPTORS: usize = 16;
/// Maximum time for which a stopping agent waits until sessions have freed their extents.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Why no session was opened. The text is sent to the program.
#[derive(Debug, thiserror::Error)]
pub enum OpenSessionError {
    /// A system call failed.
    #[error("cannot create memory for another session: {0}")]
    Memory(#[from] io::Error),
    /// There is no pidfd of the program.
    #[error("process {pid} has ended")]
    Process {
        /// The program.
        pid: u32,
    },
    /// The keeper does not hold the session.
    #[error(transparent)]
    NotHeld(#[from] HoldRefused),
    /// The user has used up its share of the agent's descriptors.
    #[error(transparent)]
    TooManyDescriptors(#[from] ShareExceeded),
    /// The agent is about to end.
    #[error("the agent is stopping")]
    Stopping,
    /// The user has the maximum number of sessions.
    #[error("user {tenant} has {SESSIONS_PER_USER_MAX} sessions already: end some first")]
    TooMany {
        /// The user.
        tenant: u32,
    },
}

/// The keeper's record of a session, for the next agent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct SessionRecord {
    pub tenant: u32,
    pub pid: u32,
    /// Version of frames and ring that the program uses.
    pub version: u16,
}

/// All sessions of an agent.
#[derive(Debug)]
pub struct SessionService {
    connector: Arc<dyn NodeConnector>,
    keeper: Arc<dyn KeeperStore>,
    descriptors: Arc<DescriptorShares>,
    /// Quota of each user; `None`: half of the memory that the nodes lend.
    quota_bytes: Option<u64>,
    accounts: UserAccounts,
    /// The time at which the agent started.
    started: Instant,
    sessions: Mutex<OpenSessions>,
    /// Notified when a session has ended.
    session_ended: Condvar,
}

#[derive(Debug, Default)]
struct OpenSessions {
    next_id: u64,
    /// Whether the agent is stopping. Then no session is opened.
    is_stopping: bool,
    live: BTreeMap<u64, Arc<SharedSession>>,
    /// Books of sessions that could not be resumed. They stay in memory, and so in the ledgers, so
    /// that the leak scan does not free extents that another agent can still resume.
    unserved: Vec<Arc<Book>>,
}

/// State that the thread of a session shares with other threads.
#[derive(Debug)]
struct SharedSession {
    record: SessionRecord,
    socket: OwnedFd,
    stop: AtomicBool,
    extents: AtomicU64,
    bytes: AtomicU64,
    stocked_bytes: AtomicU64,
    requests: AtomicU64,
}

/// The memory of a ring, mapped into the agent.
#[derive(Clone, Debug)]
struct AgentRingMemory(Arc<Memory>);

impl RingWords for AgentRingMemory {
    fn word_u32(&self, offset: usize) -> &AtomicU32 {
        self.0.atomic_u32(offset)
    }

    fn word_u64(&self, offset: usize) -> &AtomicU64 {
        self.0.atomic_u64(offset)
    }
}

/// Resources that the thread of a session owns.
#[derive(Debug)]
struct SessionParts {
    ring: SessionRing<AgentRingMemory>,
    book: Arc<Book>,
    /// Pidfd of the program. It shows the program's end even if a forked child has the socket.
    process: OwnedFd,
}

impl SessionService {
    /// Creates a service without sessions, which are charged to their users. The quota of each user
    /// is `quota_bytes`, or half of the memory that the nodes lend.
    #[must_use]
    pub fn new(
        connector: Arc<dyn NodeConnector>,
        keeper: Arc<dyn KeeperStore>,
        descriptors: Arc<DescriptorShares>,
        quota_bytes: Option<u64>,
    ) -> Arc<Self> {
        // Numbers must differ from those of earlier agents, which the keeper may still hold.
        let next_id = u64::from(std::process::id()) << 32;
        Arc::new(Self {
            connector,
            keeper,
            descriptors,
            quota_bytes,
            accounts: UserAccounts::default(),
            started: Instant::now(),
            sessions: Mutex::new(OpenSessions { next_id, ..OpenSessions::default() }),
            session_ended: Condvar::new(),
        })
    }

    /// Bytes of the extents of all users whose ids have this owner.
    #[must_use]
    pub fn allocated_bytes(&self, owner: u32) -> u64 {
        self.accounts.allocated_bytes(owner)
    }

    /// Opens a session for the program at the other end of a connection, and sends it the ring.
    ///
    /// # Errors
    /// If memory or a pidfd cannot be allocated, the agent is stopping, or the user has too many
    /// sessions.
    pub fn open(self: &Arc<Self>, socket: &OwnedFd, peer: PeerProcess) -> Result<(), OpenSessionError> {
        let PeerProcess { pid, uid: tenant, pidfd } = peer;
        let descriptors = self.descriptors.charge(tenant, SESSION_DESCRIPTORS)?;
        let ring = Arc::new(Memory::create("aquifer-session-ring", RING_BYTES)?);
        let book = Arc::new(Book::new()?);
        self.connector.leak_detector().register_ledger(&book);
        let process = pidfd.ok_or(OpenSessionError::Process { pid })?;
        let socket = socket.try_clone()?;
        let mut sessions = self.sessions.lock();
        if sessions.is_stopping {
            return Err(OpenSessionError::Stopping);
        }
        let of_user = sessions.live.values().filter(|shared| shared.record.tenant == tenant).count();
        if of_user >= SESSIONS_PER_USER_MAX as usize {
            return Err(OpenSessionError::TooMany { tenant });
        }
        let id = sessions.next_id;
        sessions.next_id += 1;
        let record = SessionRecord { tenant, pid, version: RING_VERSION };
        let shared = Arc::new(SharedSession::new(record, socket));
        sessions.live.insert(id, Arc::clone(&shared));
        drop(sessions);
        let ring_memory = AgentRingMemory(Arc::clone(&ring));
        let parts = SessionParts { ring: SessionRing::initialise(ring_memory), book, process };
        self.hold(id, &shared, &parts).inspect_err(|_| self.forget(id))?;
        let sent = send_frame(&shared.socket, &Frame::SessionOpened, &[ring.fd()]);
        if let Err(error) = sent.and_then(|()| self.start(id, shared, parts, descriptors)) {
            tracing::warn!(pid, %error, "cannot open a session");
            self.forget(id);
        }
        Ok(())
    }

    /// Resumes the sessions of an earlier agent.
    pub fn restore(self: &Arc<Self>, inherited: Vec<InheritedSession>) {
        // All books must be counted and in the ledgers before a session can allocate.
        for session in &inherited {
            self.accounts.of(Tenant(owner(session.shared.record.tenant))).add_inherited(session.bytes());
            self.connector.leak_detector().register_ledger(&session.parts.book);
        }
        for InheritedSession { id, shared, parts } in inherited {
            if parts.book.done_requests() == 0 {
                // The earlier agent may have been killed before it sent the ring. A program that
                // has the ring ignores the frame.
                let ring = parts.ring.words().0.fd();
                let _closed = try_send_frame(&shared.socket, &Frame::SessionOpened, &[ring]);
            }
            self.sessions.lock().live.insert(id, Arc::clone(&shared));
            let (pid, book) = (shared.record.pid, Arc::clone(&parts.book));
            let descriptors = self.descriptors.charge_always(shared.record.tenant, SESSION_DESCRIPTORS);
            if let Err(error) = self.start(id, shared, parts, descriptors) {
                tracing::error!(pid, %error, "cannot resume a session; the keeper holds it");
                let mut sessions = self.sessions.lock();
                sessions.live.remove(&id);
                sessions.unserved.push(book);
            }
        }
    }

    fn hold(&self, id: u64, shared: &SharedSession, parts: &SessionParts) -> Result<(), HoldRefused> {
        let record = serde_json::to_string(&shared.record).expect("numbers can be serialised");
        // Process id 0, because the keeper must not end the program: it can continue without a
        // session.
        let item = HeldItem { kind: HeldKind::Session, id, pid: 0, uid: 0, record };
        let ring = &parts.ring.words().0;
        let fds = [ring.fd(), parts.book.memory().fd(), shared.socket.as_fd(), parts.process.as_fd()];
        self.keeper.hold(&item, &fds)
    }

    fn start(
        self: &Arc<Self>,
        id: u64,
        shared: Arc<SharedSession>,
        parts: SessionParts,
        descriptors: DescriptorCharge,
    ) -> io::Result<()> {
        let service = Arc::clone(self);
        let name = format!("session-{}", shared.record.pid);
        std::thread::Builder::new().name(name).spawn(move || {
            SessionThread::new(&service, shared, parts, descriptors.owner()).run();
            service.forget(id);
            drop(descriptors);
        })?;
        Ok(())
    }

    fn forget(&self, id: u64) {
        self.keeper.release(HeldKind::Session, id);
        self.sessions.lock().live.remove(&id);
        self.session_ended.notify_all();
    }

    /// Ends all sessions for this reason, and waits until they have freed their extents.
    pub fn end(&self, reason: &str) {
        let mut sessions = self.sessions.lock();
        sessions.is_stopping = true;
        for shared in sessions.live.values() {
            shared.stop.store(true, Relaxed);
            // Errors are ignored: the program has closed the socket, or does not read it.
            let _ = try_send_frame(&shared.socket, &Frame::Ended(reason.to_owned()), &[]);
            let _ = rustix::net::shutdown(&shared.socket, rustix::net::Shutdown::Both);
        }
        let deadline = Instant::now() + END_TIMEOUT;
        while !sessions.live.is_empty() && Instant::now() < deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            self.session_ended.wait_for(&mut sessions, left);
        }
        if !sessions.live.is_empty() {
            let sessions = sessions.live.len();
            tracing::error!(sessions, timeout = ?END_TIMEOUT, "sessions did not end in time");
        }
    }

    /// Statistics of all sessions.
    #[must_use]
    pub fn sessions(&self) -> Vec<SessionStatistics> {
        self.sessions.lock().live.values().map(|shared| shared.report()).collect()
    }

    /// Statistics of all users that have or had sessions.
    #[must_use]
    pub fn users(&self) -> Vec<UserStatistics> {
        self.accounts.all().iter().map(|account| account.report()).collect()
    }
}

impl SharedSession {
    fn new(record: SessionRecord, socket: OwnedFd) -> Self {
        let zero = || AtomicU64::new(0);
        let (extents, bytes, stocked_bytes, requests) = (zero(), zero(), zero(), zero());
        Self { record, socket, stop: AtomicBool::new(false), extents, bytes, stocked_bytes, requests }
    }

    fn report(&self) -> SessionStatistics {
        SessionStatistics {
            tenant: self.record.tenant,
            pid: self.record.pid,
            extents: self.extents.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            stocked_bytes: self.stocked_bytes.load(Relaxed),
            requests: self.requests.load(Relaxed),
        }
    }
}
