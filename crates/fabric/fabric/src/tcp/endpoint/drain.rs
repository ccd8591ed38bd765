//! Drains an endpoint that was dropped or broke with operations in flight. The target may still
//! have them in its buffers, and would execute them later.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::{TcpEndpoint, open_session};
use crate::handshake::Credential;
use crate::handshake::hello::{Hello, Resume, SessionId};
use crate::handshake::{HANDSHAKE_TIMEOUT, RefusalCode};
use crate::target::Identity;
use crate::work::{DrainHandle, EndpointError};

/// Interval between attempts while the target closes its end.
const RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// The identity of a session that may have operations in flight.
#[derive(Debug)]
pub(super) struct TcpDrain {
    address: SocketAddr,
    credential: Credential,
    who: Identity,
    session: SessionId,
}

impl TcpDrain {
    pub(super) fn of(endpoint: &TcpEndpoint) -> Option<Self> {
        let is_awaited = endpoint.pending.iter().any(|pending| pending.outcome.is_none());
        let is_in_doubt = endpoint.broken || is_awaited;
        is_in_doubt.then(|| Self {
            address: endpoint.address,
            credential: endpoint.credential.clone(),
            who: endpoint.who,
            session: endpoint.session,
        })
    }
}

impl DrainHandle for TcpDrain {
    /// Asks to resume the session with an impossible number of answers. The target first closes the
    /// session's connection, then refuses. A refusal, for this reason or because the session does
    /// not exist, proves that no connection is left.
    fn drain(&mut self) -> Result<(), EndpointError> {
        let resume = Resume { session: self.session, answered: u64::MAX, received: 0, taken: 0 };
        let hello = Hello { who: self.who, encrypt: false, resume: Some(resume) };
        let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now()).max(RETRY_INTERVAL);
            match open_session(self.address, &self.credential, &hello, left) {
                Err(EndpointError::Refused { refusal, .. }) if refusal.code != RefusalCode::TryAgain => {
                    return Ok(());
                }
                // The target and its memory are gone.
                Err(EndpointError::Unreachable { source, .. })
                    if source.kind() == std::io::ErrorKind::ConnectionRefused =>
                {
                    return Ok(());
                }
                Err(EndpointError::Refused { .. }) if Instant::now() < deadline => {
                    std::thread::sleep(RETRY_INTERVAL);
                }
                Err(error) => return Err(error),
                // The target accepted the position. The session's only connection is this one,
                // which ends here.
                Ok(_) => return Ok(()),
            }
        }
    }
}
