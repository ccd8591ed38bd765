//! Accepts initiators. One thread accepts connections, and a short-lived thread for each runs the
//! handshake, so a slow initiator delays no other.

use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use aquifer_secure_channel::{SecureChannel, SecureError};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::pending::PendingHandshakes;
use super::reply::AnswerBuffer;
use super::serve::{AcceptedConnection, ServeHandle};
use super::session::TcpSession;
use super::stream::{DeadlineStream, configure};
use super::target::{TcpPeerState, TcpShared, TcpTargetState};
use crate::handshake::hello::{self, Hello, Reply, Resume, Welcome};
use crate::handshake::secure::respond_to;
use crate::handshake::ticket::check_ticket;
use crate::handshake::{HANDSHAKE_TIMEOUT, PENDING_LIMIT, RefusalReason};
use crate::target::Identity;

/// The interval at which expired sessions are ended.
const EXPIRY_CHECK_INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// A target admits an unfinished handshake for each `ENDPOINTS_PER_HANDSHAKE` endpoints, if that is
/// more than [`PENDING_LIMIT`]: after a restart all may connect at the same time.
const ENDPOINTS_PER_HANDSHAKE: usize = 32;

/// The thread that accepts connections.
pub(super) struct TcpAcceptor {
    shared: Arc<TcpShared>,
    listener: TcpListener,
    pending: PendingHandshakes,
}

impl TcpAcceptor {
    pub fn new(shared: Arc<TcpShared>, listener: TcpListener) -> Self {
        let pending_max = PENDING_LIMIT.max(shared.options.endpoints_max / ENDPOINTS_PER_HANDSHAKE);
        Self { shared, listener, pending: PendingHandshakes::new(pending_max) }
    }

    pub fn run(self) {
        while !self.shared.stop.load(Ordering::SeqCst) {
            let mut polled = [
                PollFd::new(&self.shared.wake, PollFlags::IN),
                PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN),
            ];
            let may_sleep = self.shared.lock().parked.is_empty();
            if let Err(error) =
                rustix::event::poll(&mut polled, (!may_sleep).then_some(&EXPIRY_CHECK_INTERVAL))
                && error != rustix::io::Errno::INTR
            {
                tracing::error!(%error, "cannot poll the sockets of the TCP target; retrying");
            }
            if polled[0].revents().contains(PollFlags::IN) {
                self.shared.wake.clear();
            }
            if polled[1].revents().contains(PollFlags::IN) {
                self.accept();
            }
            self.shared.end_expired();
        }
    }

    fn accept(&self) {
        let accepted = self.listener.accept().and_then(|(stream, peer)| {
            let pending = self.pending.begin(&stream, peer.ip())?;
            Ok((stream, pending))
        });
        let (stream, pending) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection; retrying");
                // The process has no descriptors or memory left. Retrying at once would only
                // use the processor.
                std::thread::sleep(Duration::from_millis(10));
                return;
            }
        };
        let shared = Arc::clone(&self.shared);
        let builder = std::thread::Builder::new().name("fabric-hello".into());
        let started = builder.spawn(move || {
            let _pending = pending;
            if let Err(error) = handshake(&shared, stream) {
                tracing::info!(%error, "an endpoint was refused");
            }
        });
        if let Err(error) = started {
            tracing::warn!(%error, "cannot start a thread for a handshake; closing the connection");
        }
    }
}

/// Why an initiator was not admitted.
#[derive(Debug, thiserror::Error)]
enum AdmissionError {
    #[error(transparent)]
    Secure(#[from] SecureError),
    #[error(transparent)]
    System(#[from] std::io::Error),
    #[error(transparent)]
    Hello(#[from] hello::HelloError),
    #[error("refused: {0}")]
    Refused(RefusalReason),
}

fn handshake(shared: &Arc<TcpShared>, stream: TcpStream) -> Result<(), AdmissionError> {
    configure(&stream)?;
    let stream = DeadlineStream::new(stream, Instant::now() + HANDSHAKE_TIMEOUT);
    let (mut secured, ticket) = respond_to(stream, &shared.key, shared.options.admission)?;
    let hello = hello::parse_hello(&secured.receive()?)?;
    let checked = ticket.map_or(Ok(()), |ticket| check_ticket(&ticket, hello.who, &shared.options.clock));
    match checked.and_then(|()| admit(shared, &hello)) {
        Ok((session, lost_answers)) => {
            let result = welcome(shared, secured, &hello, session, lost_answers);
            shared.handshakes_in_progress.fetch_sub(1, Ordering::SeqCst);
            if shared.stop.load(Ordering::SeqCst) {
                shared.handles.iter().for_each(ServeHandle::wake);
            }
            result
        }
        Err(reason) => {
            secured.send(&hello::encode_reply(&Reply::Refusal(reason.to_refusal())))?;
            Err(AdmissionError::Refused(reason))
        }
    }
}

/// Sends the welcome and passes the connection to its serving thread, with the answers that the
/// initiator lacks.
fn welcome(
    shared: &Arc<TcpShared>,
    mut secured: SecureChannel<DeadlineStream>,
    hello: &Hello,
    session: TcpSession,
    lost_answers: Vec<u8>,
) -> Result<(), AdmissionError> {
    let encrypt = hello.encrypt || shared.options.encrypt;
    let welcome = Welcome {
        session: session.peer.id,
        done: session.done(),
        encrypt,
        limits: shared.options.limits,
        regions: shared.lock().tables.visible_regions(hello.who),
    };
    let sent = secured.send(&hello::encode_reply(&Reply::Welcome(welcome)));
    let (stream, cipher) = secured.into_parts();
    let socket = OwnedFd::from(stream.into_inner());
    if let Err(error) = sent {
        shared.park(session);
        return Err(error.into());
    }
    let thread = session.peer.own.thread;
    shared.handles[thread].add(AcceptedConnection {
        socket,
        session,
        cipher: encrypt.then_some(cipher),
        answers: lost_answers,
    });
    Ok(())
}

/// Begins or resumes a session. Also returns the answers that the initiator lacks.
fn admit(shared: &Arc<TcpShared>, hello: &Hello) -> Result<(TcpSession, Vec<u8>), RefusalReason> {
    if let Some(epoch) = hello.who.epoch.checked_sub(1)
        && shared.lock().tables.refusal(hello.who).is_none()
    {
        // Operations in flight of an earlier epoch of this host must not take effect later.
        shared.fence(hello.who.host, epoch);
    }
    let mut state = shared.lock();
    if shared.stop.load(Ordering::SeqCst) {
        return Err(RefusalReason::GoingAway);
    }
    if let Some(reason) = state.tables.refusal(hello.who) {
        return Err(reason);
    }
    let admitted = match hello.resume {
        Some(resume) => resume_session(shared, &mut state, hello.who, resume),
        None => begin_session(shared, &mut state, hello.who).map(|session| (session, Vec::new())),
    };
    // Counted under the lock under which `stop` was read, so a target that stops waits for this
    // handshake.
    shared.handshakes_in_progress.fetch_add(usize::from(admitted.is_ok()), Ordering::SeqCst);
    admitted
}

fn begin_session(
    shared: &Arc<TcpShared>,
    state: &mut TcpTargetState,
    who: Identity,
) -> Result<TcpSession, RefusalReason> {
    let handles = shared.handles.len();
    let peer =
        state.peers.begin(who, |slot| TcpPeerState { thread: slot % handles, ..TcpPeerState::default() })?;
    shared.control.open_slot(peer.slot, who);
    Ok(TcpSession::new(shared, &peer, peer.slot))
}

fn resume_session(
    shared: &Arc<TcpShared>,
    state: &mut TcpTargetState,
    who: Identity,
    resume: Resume,
) -> Result<(TcpSession, Vec<u8>), RefusalReason> {
    let is_own = state.peers.find(resume.session).is_some_and(|peer| peer.who == who);
    if !is_own {
        return Err(RefusalReason::UnknownSession);
    }
    if let Some((mut session, _)) = state.parked.remove(&resume.session) {
        let mut answers = AnswerBuffer::default();
        if session.resume(&resume, &mut answers) {
            return Ok((session, std::mem::take(answers.bytes())));
        }
        state.parked.insert(resume.session, (session, Instant::now()));
        return Err(RefusalReason::ResumePosition);
    }
    // The target has not yet detected that the old connection is broken. Its thread closes it, and
    // the initiator retries.
    if let Some(peer) = state.peers.find(resume.session) {
        peer.own.is_stale.store(true, Ordering::SeqCst);
        shared.handles[peer.own.thread].notify(peer);
        return Err(RefusalReason::TryAgain);
    }
    Err(RefusalReason::UnknownSession)
}
