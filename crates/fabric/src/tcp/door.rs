//! Lets initiators in: a thread accepts, a short-lived thread for each hears who it is, so that a slow one delays nobody.

use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

use super::reply::Answers;
use super::serve::{Arrival, Hand};
use super::session::Session;
use super::stream::{Deadlined, tune};
use super::target::{OfSession, Peer, Shared, State};
use crate::handshake::hello::{self, Hello, Reply, Resume, Welcome};
use crate::handshake::secure::{SecureChannel, SecureError, respond};
use crate::handshake::{GOING_AWAY, HANDSHAKE_TIME, PENDING_LIMIT, TRY_AGAIN};
use crate::target::Identity;

/// The door looks so often whether a session has lingered for long enough.
const TICK: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// The thread that lets initiators in.
pub(super) struct Doorkeeper {
    shared: Arc<Shared>,
    listener: TcpListener,
    pending: Arc<AtomicUsize>,
}

/// Counts one who has not yet proved who it is.
struct Pending(Arc<AtomicUsize>);

impl Drop for Pending {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Doorkeeper {
    pub fn new(shared: Arc<Shared>, listener: TcpListener) -> Self {
        Self { shared, listener, pending: Arc::new(AtomicUsize::new(0)) }
    }

    pub fn run(self) {
        while !self.shared.stop.load(Ordering::SeqCst) {
            // Who comes when too many have not yet said who they are waits in the backlog.
            let has_room = self.pending.load(Ordering::SeqCst) < PENDING_LIMIT;
            let accepting = if has_room { PollFlags::IN } else { PollFlags::empty() };
            let mut polled = [
                PollFd::new(&self.shared.wake, PollFlags::IN),
                PollFd::from_borrowed_fd(self.listener.as_fd(), accepting),
            ];
            let may_sleep = has_room && self.shared.lock().lingering.is_empty();
            if let Err(error) = rustix::event::poll(&mut polled, (!may_sleep).then_some(&TICK))
                && error != rustix::io::Errno::INTR
            {
                tracing::error!(%error, "the fabric target cannot wait for its sockets");
            }
            if polled[0].revents().contains(PollFlags::IN) {
                self.shared.wake.clear();
            }
            if polled[1].revents().contains(PollFlags::IN) {
                self.accept();
            }
            self.shared.end_late();
        }
    }

    fn accept(&self) {
        let stream = match self.listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept an endpoint");
                // Out of descriptors or memory: trying at once again would only burn time.
                std::thread::sleep(Duration::from_millis(10));
                return;
            }
        };
        self.pending.fetch_add(1, Ordering::SeqCst);
        let pending = Pending(Arc::clone(&self.pending));
        let shared = Arc::clone(&self.shared);
        let greeter = std::thread::Builder::new().name("fabric-greet".into());
        let started = greeter.spawn(move || {
            let _pending = pending;
            if let Err(error) = greet(&shared, stream) {
                tracing::info!(%error, "an endpoint was turned away");
            }
        });
        if let Err(error) = started {
            tracing::warn!(%error, "no thread to hear an endpoint");
        }
    }
}

/// Why somebody was turned away.
#[derive(Debug, thiserror::Error)]
enum Turned {
    #[error(transparent)]
    Secure(#[from] SecureError),
    #[error(transparent)]
    System(#[from] std::io::Error),
    #[error(transparent)]
    Hello(#[from] hello::HelloError),
    #[error("refused: {0}")]
    Refused(String),
}

fn greet(shared: &Arc<Shared>, stream: TcpStream) -> Result<(), Turned> {
    tune(&stream)?;
    let stream = Deadlined::new(stream, Instant::now() + HANDSHAKE_TIME);
    let mut secured = respond(stream, &shared.key)?;
    let hello = hello::parse_hello(&secured.receive()?)?;
    match admit(shared, &hello) {
        Ok((session, missing)) => {
            let result = welcome(shared, secured, &hello, session, missing);
            shared.welcoming.fetch_sub(1, Ordering::SeqCst);
            if shared.stop.load(Ordering::SeqCst) {
                shared.hands.iter().for_each(Hand::wake);
            }
            result
        }
        Err(reason) => {
            secured.send(&hello::encode_reply(&Reply::Refusal(reason.clone())))?;
            Err(Turned::Refused(reason))
        }
    }
}

/// Greet it, and hand it to its thread with the answers that it lacks.
fn welcome(
    shared: &Arc<Shared>,
    mut secured: SecureChannel<Deadlined>,
    hello: &Hello,
    session: Session,
    missing: Vec<u8>,
) -> Result<(), Turned> {
    let encrypt = hello.encrypt || shared.options.encrypt;
    let welcome = Welcome {
        session: session.peer.id,
        done: session.done(),
        encrypt,
        limits: shared.options.limits,
        regions: shared.lock().tables.visible_regions(hello.who),
    };
    let said = secured.send(&hello::encode_reply(&Reply::Welcome(welcome)));
    let (stream, cipher) = secured.into_parts();
    let socket = OwnedFd::from(stream.into_inner());
    if let Err(error) = said {
        shared.keep_for_a_while(session);
        return Err(error.into());
    }
    let hand = session.peer.own.hand;
    shared.hands[hand].give(Arrival { socket, session, cipher: encrypt.then_some(cipher), answers: missing });
    Ok(())
}

/// A new session, or the one that it goes on with and the answers that it lacks.
fn admit(shared: &Arc<Shared>, hello: &Hello) -> Result<(Session, Vec<u8>), String> {
    if let Some(epoch) = hello.who.epoch.checked_sub(1)
        && shared.lock().tables.refusal(hello.who).is_none()
    {
        // What the host's agent before this one still had under way must not be done any more.
        shared.fence(hello.who.host, epoch);
    }
    let mut state = shared.lock();
    if shared.stop.load(Ordering::SeqCst) {
        return Err(GOING_AWAY.into());
    }
    if let Some(reason) = state.tables.refusal(hello.who) {
        return Err(reason);
    }
    let admitted = match hello.resume {
        Some(resume) => go_on(shared, &mut state, hello.who, resume),
        None => begin(shared, &mut state, hello.who).map(|session| (session, Vec::new())),
    };
    // Under the same lock as the look at `stop`: a target that goes away waits for this one.
    shared.welcoming.fetch_add(usize::from(admitted.is_ok()), Ordering::SeqCst);
    admitted
}

fn begin(shared: &Arc<Shared>, state: &mut State, who: Identity) -> Result<Session, String> {
    let hands = shared.hands.len();
    let peer = state.peers.begin(who, |slot| OfSession { hand: slot % hands, ..OfSession::default() })?;
    shared.control.occupy(peer.slot, who);
    Ok(Session::new(shared, &peer, peer.slot))
}

fn go_on(
    shared: &Arc<Shared>,
    state: &mut State,
    who: Identity,
    resume: Resume,
) -> Result<(Session, Vec<u8>), String> {
    let is_it = |peer: &Peer| peer.id == resume.session && peer.who == who;
    if let Some(at) = state.lingering.iter().position(|(session, _)| is_it(&session.peer)) {
        let (mut session, _) = state.lingering.swap_remove(at);
        let mut answers = Answers::default();
        if session.resume(&resume, &mut answers) {
            return Ok((session, std::mem::take(answers.bytes())));
        }
        state.lingering.push((session, Instant::now()));
        return Err("the session has gone on without you".into());
    }
    // Its old connection has not been found broken yet: break it, and let it try again.
    if let Some(peer) = state.peers.iter().find(|peer| is_it(peer) && !peer.is_closed()) {
        peer.own.is_stale.store(true, Ordering::SeqCst);
        shared.hands[peer.own.hand].wake();
        return Err(TRY_AGAIN.into());
    }
    Err("there is no such session (any more)".into())
}
