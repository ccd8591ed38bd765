//! Handles a broken connection: resumes the session over another connection, or fails the
//! operations in flight.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use aquifer_secure_channel::RecordCipher;

use super::{PendingWork, TcpEndpoint, open_session};
use crate::background::BackgroundTask;
use crate::handshake::hello::{Hello, Resume, Welcome};
use crate::handshake::{Credential, HANDSHAKE_TIMEOUT, RefusalCode};
use crate::tcp::wire::{self, RequestHead};
use crate::work::{EndpointError, Verb, WorkError};

/// Interval between attempts to connect.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

impl TcpEndpoint {
    /// Breaks the endpoint. If it is known which operations were done, the first unanswered one
    /// gets the cause and the later ones are flushed. Otherwise all get the cause.
    pub(super) fn fail_all(&mut self, cause: Option<WorkError>) {
        self.broken = true;
        self.reconnecting = None;
        let mut cause = cause;
        let is_known = self.has_farewell || cause.is_none();
        for PendingWork { work, outcome } in std::mem::take(&mut self.pending) {
            let error = outcome.unwrap_or_else(|| {
                if is_known {
                    cause.take().unwrap_or(WorkError::Flushed)
                } else {
                    cause.unwrap_or(WorkError::Flushed)
                }
            });
            self.complete(work, Err(error));
        }
        self.requests.clear();
        self.outgoing.clear();
        self.sent = 0;
    }

    /// Starts to reconnect in the background, or fails the operations in flight if that is
    /// impossible.
    pub(super) fn recover(&mut self) {
        if self.has_farewell || self.broken {
            self.fail_reconnect(self.end_cause);
            return;
        }
        let resume = Resume {
            session: self.session,
            answered: self.answered,
            received: self.received,
            taken: self.taken,
        };
        let hello = Hello { who: self.who, encrypt: self.options.encrypt, resume: Some(resume) };
        let deadline = Instant::now() + self.options.reconnect_time;
        let (address, credential) = (self.address, self.credential.clone());
        let started = BackgroundTask::start("fabric-reconn", move |is_awaited| {
            open_session_until(address, &credential, &hello, deadline, is_awaited)
        });
        match started {
            Ok(task) => {
                self.reconnecting = Some(task);
                self.taken_at_break = self.taken;
            }
            Err(error) => {
                tracing::warn!(%error, "cannot start a thread to reconnect; the endpoint is broken");
                self.fail_reconnect(WorkError::PeerGone);
            }
        }
    }

    /// Takes the result of reconnecting, if there is one. Returns whether the endpoint is still
    /// reconnecting.
    pub(super) fn is_reconnecting(&mut self) -> bool {
        let Some(task) = &self.reconnecting else { return false };
        let Some(outcome) = task.poll_result() else { return true };
        self.reconnecting = None;
        let outcome = outcome.and_then(|(stream, cipher, welcome)| self.resume(stream, cipher, &welcome));
        match outcome {
            Ok(()) => self.credit_since(self.taken_at_break),
            Err(error) => {
                tracing::debug!(%error, "cannot resume a session");
                self.fail_reconnect(if error.is_fence() { WorkError::Fenced } else { WorkError::PeerGone });
            }
        }
        false
    }

    /// Handles the failure to reconnect.
    fn fail_reconnect(&mut self, cause: WorkError) {
        // With nothing in flight, the next posted operation gets the error.
        let is_idle = self.pending.iter().all(|pending| pending.outcome.is_some());
        if !self.broken && !is_idle {
            self.fail_all(Some(cause));
        }
        self.has_farewell = true;
        self.end_cause = cause;
    }

    /// Sends the target the number of messages that were taken since the connection broke. The
    /// resume contained the number of those before.
    fn credit_since(&mut self, taken_at_break: u64) {
        let newly = u32::try_from(self.taken - taken_at_break).expect("bounded by the receive depth");
        if newly > 0 {
            self.put(RequestHead::new(wire::CREDIT, newly));
        }
        self.flush();
    }

    fn resume(
        &mut self,
        stream: TcpStream,
        cipher: RecordCipher,
        welcome: &Welcome,
    ) -> Result<(), EndpointError> {
        let unanswered = self.pending.iter().filter(|pending| pending.outcome.is_none()).count() as u64;
        let done = welcome.done.checked_sub(self.answered).filter(|done| *done <= unanswered);
        let Some(done) = done else {
            let reason = "the target reports more requests as done than were sent".into();
            return Err(EndpointError::Protocol { address: self.address.to_string(), reason });
        };
        self.stream = stream;
        self.cipher = welcome.encrypt.then_some(cipher);
        self.requests.clear();
        self.outgoing.clear();
        self.sent = 0;
        self.filled = 0;
        self.opened.clear();
        self.reading = None;
        let again: Vec<Verb> = self
            .pending
            .iter()
            .filter(|pending| pending.outcome.is_none())
            .skip(usize::try_from(done).expect("fewer than are pending"))
            .map(|pending| pending.work.verb)
            .collect();
        again.iter().for_each(|verb| self.encode(verb));
        self.await_answer();
        Ok(())
    }
}

/// The result of reconnecting.
pub(super) type ReconnectReply = Result<(TcpStream, RecordCipher, Welcome), EndpointError>;

/// Tries to connect until `deadline`. Ends early if the target is gone or refuses, or the result is
/// not awaited any more.
fn open_session_until(
    address: SocketAddr,
    credential: &Credential,
    hello: &Hello,
    deadline: Instant,
    is_awaited: &dyn Fn() -> bool,
) -> ReconnectReply {
    loop {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let error = match open_session(address, credential, hello, left.min(HANDSHAKE_TIMEOUT)) {
            Ok(found) => return Ok(found),
            Err(error) => error,
        };
        let is_over = match &error {
            EndpointError::Unreachable { source, .. } => source.kind() == io::ErrorKind::ConnectionRefused,
            EndpointError::Refused { refusal, .. } => refusal.code != RefusalCode::TryAgain,
            _ => true,
        };
        if is_over || Instant::now() >= deadline || !is_awaited() {
            return Err(error);
        }
        std::thread::sleep(RETRY_INTERVAL);
    }
}
