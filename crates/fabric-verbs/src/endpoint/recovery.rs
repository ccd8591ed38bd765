//! The end of a connection, and what comes after.
//!
//! A device that was refused does nothing more, and neither does its peer: what was posted behind is posted again over another connection. After any
//! other end nobody knows what was done, and the endpoint is over; why, the target tells, if it lives.
//!
//! What was refused is itself posted again if the target, asked anew, opens the key for it.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::{EndpointState, VerbsEndpoint};
use crate::link::{VerbsLink, open_session};
use crate::messages::Request;
use aquifer_fabric::ClusterKey;
use aquifer_fabric::background::BackgroundTask;
use aquifer_fabric::handshake::HANDSHAKE_TIME;
use aquifer_fabric::handshake::hello::{Hello, Resume, Welcome};
use aquifer_fabric::keys::KeyId;
use aquifer_fabric::work::{EndpointError, Verb, WorkError};

/// So many times in a row work is posted once more that a device was refused for though the target opens its key.
const REFUSALS_MAX: u32 = 16;

/// A target that puts many pages under other addresses hears nobody meanwhile.
const REMAP_TIME: Duration = Duration::from_secs(60);

/// What a target answered.
#[derive(Debug)]
pub(super) struct ReconnectAttempt {
    found: Result<(VerbsLink, Welcome), EndpointError>,
    /// Whether the session goes on.
    resumes: bool,
}

impl VerbsEndpoint {
    /// The connection is over: because the device was refused for the work with that number, or else.
    pub(super) fn disconnect(&mut self, refused: Option<u64>) {
        if let Some(number) = refused {
            if let Some(key) = self.queue.work(number).and_then(|work| key_of(&work.verb)) {
                self.keys.forget(key);
            }
            if !self.should_repeat(number) {
                self.queue.complete(number, Err(WorkError::RemoteAccess));
            }
        }
        // With it goes what is under way; nothing of ours is touched after this.
        drop(self.link.take());
        self.is_armed = false;
        if self.life != EndpointState::Open || self.reconnecting.is_some() {
            return;
        }
        let (address, key) = (self.address, self.cluster_key.clone());
        let resume = Resume { session: self.session, answered: 0, heard: self.heard, taken: self.taken };
        let hello = Hello { who: self.who, encrypt: false, resume: Some(resume) };
        let resumes = refused.is_some();
        let deadline = Instant::now() + if resumes { REMAP_TIME } else { HANDSHAKE_TIME };
        let started = BackgroundTask::start("fabric-reconn", move |is_awaited| ReconnectAttempt {
            found: open_session_until(address, &key, &hello, deadline, is_awaited),
            resumes,
        });
        match started {
            Ok(task) => {
                if let Err(error) = self.watch(task.ready_fd()) {
                    tracing::warn!(%error, "a rescue cannot be waited for");
                }
                self.reconnecting = Some(task);
            }
            Err(error) => {
                tracing::warn!(%error, "no thread to make a broken connection anew");
                self.fail_all(WorkError::PeerGone);
            }
        }
    }

    /// Whether to ask the target whether it meant the refusal: windows are closed while pages move under them, and it opens the key again. What was refused was not
    /// done.
    fn should_repeat(&mut self, number: u64) -> bool {
        let (last, times) = self.refused;
        self.refused = (number, if last == number { times + 1 } else { 1 });
        self.keys.checks() && self.refused.1 <= REFUSALS_MAX
    }

    pub(super) fn check_reconnect(&mut self) {
        let Some(ReconnectAttempt { found, resumes }) =
            self.reconnecting.as_ref().and_then(BackgroundTask::take_result)
        else {
            return;
        };
        self.reconnecting = None;
        match found {
            Ok((link, _)) if resumes => self.resume(link),
            Ok(_) => self.fail_all(WorkError::PeerGone),
            Err(error) if error.is_fence() => self.fail_all(WorkError::Fenced),
            Err(error) => {
                tracing::debug!(address = %self.address, %error, "an endpoint cannot go on");
                self.fail_all(WorkError::PeerGone);
            }
        }
    }

    fn resume(&mut self, link: VerbsLink) {
        let watched = self.watch(link.completions().fd()).and_then(|()| self.watch(link.events_fd()));
        if let Err(error) = watched {
            tracing::warn!(%error, "a connection cannot be waited for");
        }
        self.link = Some(link);
        self.keys.clear();
        // Messages are numbered: what the target has had already it only answers.
        self.unsent.clear();
        self.queue.repost_all();
        // Some may have been taken since the connection was lost.
        self.send(Request::Taken(self.taken));
    }

    fn fail_all(&mut self, cause: WorkError) {
        let was_told = self.queue.fail_all(cause);
        self.life = EndpointState::Over((!was_told).then_some(cause));
    }
}

/// Knock again while there is no answer. In vain if nobody waits for it any more.
fn open_session_until(
    address: SocketAddr,
    key: &ClusterKey,
    hello: &Hello,
    deadline: Instant,
    is_awaited: &dyn Fn() -> bool,
) -> Result<(VerbsLink, Welcome), EndpointError> {
    loop {
        let error = match open_session(address, key, hello, HANDSHAKE_TIME) {
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
