//! Handles the end of a connection.
//!
//! After a refusal neither device executes further work, so later work is posted again over another
//! connection. The refused work is posted again, too, if the target still opens the key for it.
//! After any other end the outcome of work in flight is unknown, and the endpoint breaks. The
//! target reports the cause, if it answers.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::{EndpointState, VerbsEndpoint};
use crate::link::{VerbsLink, open_session};
use crate::messages::InitiatorMessage;
use aquifer_fabric::background::BackgroundTask;
use aquifer_fabric::handshake::hello::{Hello, Resume, Welcome};
use aquifer_fabric::handshake::{Credential, HANDSHAKE_TIMEOUT};
use aquifer_fabric::keys::KeyId;
use aquifer_fabric::work::{EndpointError, Verb, WorkError};

/// Most consecutive repetitions of work that the device refuses although the target opens its key.
const REFUSALS_MAX: u32 = 16;

/// Longest time for which a target that changes the pages of many addresses does not answer.
const REMAP_TIMEOUT: Duration = Duration::from_secs(60);

/// The result of reconnecting.
#[derive(Debug)]
pub(super) struct ReconnectAttempt {
    found: Result<(VerbsLink, Welcome), EndpointError>,
    /// Whether the session resumes. Otherwise only the cause of the end is requested.
    resumes: bool,
}

impl VerbsEndpoint {
    /// Closes the connection. `refused` is the number of the work that the peer's device refused,
    /// if that was the cause.
    pub(super) fn disconnect(&mut self, refused: Option<u64>) {
        if let Some(number) = refused {
            if let Some(key) = self.queue.work(number).and_then(|work| key_of(&work.verb)) {
                self.keys.forget(key);
            }
            if !self.should_repeat(number) {
                self.queue.complete(number, Err(WorkError::RemoteAccess));
            }
        }
        // Work in flight ends with the link. Then the device accesses no memory of this process.
        drop(self.link.take());
        self.is_armed = false;
        if self.state != EndpointState::Open || self.reconnecting.is_some() {
            return;
        }
        let (address, credential) = (self.address, self.credential.clone());
        let resume =
            Resume { session: self.session, answered: 0, received: self.received, taken: self.taken };
        let hello = Hello { who: self.who, encrypt: false, resume: Some(resume) };
        let resumes = refused.is_some();
        let deadline = Instant::now() + if resumes { REMAP_TIMEOUT } else { HANDSHAKE_TIMEOUT };
        let started = BackgroundTask::start("fabric-reconn", move |is_awaited| ReconnectAttempt {
            found: open_session_until(address, &credential, &hello, deadline, is_awaited),
            resumes,
        });
        match started {
            Ok(task) => {
                if let Err(error) = self.watch(task.ready_fd()) {
                    tracing::warn!(%error, "cannot add a reconnect to epoll");
                }
                self.reconnecting = Some(task);
            }
            Err(error) => {
                tracing::warn!(%error, "cannot start a thread to reconnect; the endpoint is broken");
                self.fail_all(WorkError::PeerGone);
            }
        }
    }

    /// Whether to request the key of refused work again. A target closes windows while
    /// it changes pages, and opens the key again afterwards. Refused work was not done.
    fn should_repeat(&mut self, number: u64) -> bool {
        let (last, times) = self.refused;
        self.refused = (number, if last == number { times + 1 } else { 1 });
        self.keys.checks() && self.refused.1 <= REFUSALS_MAX
    }

    pub(super) fn check_reconnect(&mut self) {
        let Some(ReconnectAttempt { found, resumes }) =
            self.reconnecting.as_ref().and_then(BackgroundTask::poll_result)
        else {
            return;
        };
        self.reconnecting = None;
        match found {
            Ok((link, _)) if resumes => self.resume(link),
            Ok(_) => self.fail_all(WorkError::PeerGone),
            Err(error) if error.is_fence() => self.fail_all(WorkError::Fenced),
            Err(error) => {
                tracing::debug!(address = %self.address, %error, "cannot resume a session");
                self.fail_all(WorkError::PeerGone);
            }
        }
    }

    fn resume(&mut self, link: VerbsLink) {
        let watched = self.watch(link.completions().fd()).and_then(|()| self.watch(link.events_fd()));
        if let Err(error) = watched {
            tracing::warn!(%error, "cannot add a connection to epoll");
        }
        self.link = Some(link);
        self.keys.clear();
        // Messages are numbered. The target answers those that it has already received without
        // delivering them again.
        self.unsent.clear();
        self.queue.repost_all();
        // Messages may have been taken while there was no connection.
        self.send(InitiatorMessage::Taken(self.taken));
    }

    fn fail_all(&mut self, cause: WorkError) {
        let was_told = self.queue.fail_all(cause);
        self.state = EndpointState::Over((!was_told).then_some(cause));
    }
}

/// Tries to connect while the target does not answer. Ends early if the result is not awaited any
/// more.
fn open_session_until(
    address: SocketAddr,
    credential: &Credential,
    hello: &Hello,
    deadline: Instant,
    is_awaited: &dyn Fn() -> bool,
) -> Result<(VerbsLink, Welcome), EndpointError> {
    loop {
        let error = match open_session(address, credential, hello, HANDSHAKE_TIMEOUT) {
            Ok(found) => return Ok(found),
            Err(error) => error,
        };
        let was_silent = matches!(
            &error,
            EndpointError::Unreachable { source, .. } if source.kind() == io::ErrorKind::TimedOut
        );
        if !was_silent || Instant::now() >= deadline || !is_awaited() {
            return Err(error);
        }
    }
}

fn key_of(verb: &Verb) -> Option<KeyId> {
    match verb {
        Verb::Read { remote, .. }
        | Verb::Write { remote, .. }
        | Verb::CompareSwap { remote, .. }
        | Verb::FetchAdd { remote, .. } => Some(KeyId::at(remote.key, remote.addr)),
        Verb::Send { .. } => None,
    }
}
