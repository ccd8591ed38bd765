//! The end of a connection, and what comes after: the session goes on over another one, or everything is told its fate.

use std::io;
use std::time::{Duration, Instant};

use super::{Pending, TcpEndpoint, knock};
use crate::tcp::HANDSHAKE_TIME;
use crate::tcp::door::TRY_AGAIN;
use crate::tcp::hello::{Hello, Resume};
use crate::work::{EndpointError, Verb, WorkError};

/// Between attempts to make a broken connection anew.
const RETRY_EVERY: Duration = Duration::from_millis(20);

impl TcpEndpoint {
    /// Nothing more will be done. The first unanswered operation gets the cause; the later ones were not done, or nobody knows.
    pub(super) fn give_up(&mut self, cause: Option<WorkError>) {
        self.broken = true;
        let mut cause = cause;
        let is_known = self.has_farewell || cause.is_none();
        for Pending { work, outcome } in std::mem::take(&mut self.pending) {
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

    /// The connection is over. Make it anew and go on, or say what became of everything.
    pub(super) fn recover(&mut self) {
        let deadline = Instant::now() + self.options.reconnect_time;
        while !self.has_farewell && !self.broken {
            match self.reconnect(deadline) {
                Ok(()) => return,
                Err(error) => {
                    let is_over = match &error {
                        EndpointError::Unreachable { source, .. } => {
                            source.kind() == io::ErrorKind::ConnectionRefused
                        }
                        EndpointError::Refused { reason, .. } => reason != TRY_AGAIN,
                        _ => true,
                    };
                    if is_over || Instant::now() >= deadline {
                        tracing::debug!(%error, "an endpoint cannot go on");
                        break;
                    }
                    std::thread::sleep(RETRY_EVERY);
                }
            }
        }
        // Without anything under way the next operation is told.
        let is_idle = self.pending.iter().all(|pending| pending.outcome.is_some());
        if !self.broken && !is_idle {
            self.give_up(Some(WorkError::PeerGone));
        }
        self.has_farewell = true;
    }

    fn reconnect(&mut self, deadline: Instant) -> Result<(), EndpointError> {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let resume =
            Resume { session: self.session, answered: self.answered, heard: self.heard, taken: self.taken };
        let hello = Hello { who: self.who, encrypt: self.options.encrypt, resume: Some(resume) };
        let (stream, seal, welcome) = knock(self.address, &self.key, &hello, left.min(HANDSHAKE_TIME))?;
        let unanswered = self.pending.iter().filter(|pending| pending.outcome.is_none()).count() as u64;
        let done = welcome.done.checked_sub(self.answered).filter(|done| *done <= unanswered);
        let Some(done) = done else {
            let reason = "it says that it has done what was never asked".into();
            return Err(EndpointError::Protocol { address: self.address.to_string(), reason });
        };
        self.stream = stream;
        self.seal = welcome.encrypt.then_some(seal);
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
        self.since = Instant::now();
        self.flush();
        Ok(())
    }
}
