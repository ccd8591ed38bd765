//! An endpoint that was sent_answers up while something was under way. The target may have that in its buffers yet, and would do it when it comes to it.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::{TcpEndpoint, open_session};
use crate::handshake::ClusterKey;
use crate::handshake::hello::{Hello, Resume, SessionId};
use crate::handshake::{HANDSHAKE_TIME, TRY_AGAIN};
use crate::target::Identity;
use crate::work::{DrainHandle, EndpointError};

/// Between attempts while the target closes its end.
const RETRY_EVERY: Duration = Duration::from_millis(5);

/// See above.
#[derive(Debug)]
pub(super) struct TcpDrain {
    address: SocketAddr,
    key: ClusterKey,
    who: Identity,
    session: SessionId,
}

impl TcpDrain {
    pub(super) fn of(endpoint: &TcpEndpoint) -> Option<Self> {
        let is_awaited = endpoint.pending.iter().any(|pending| pending.outcome.is_none());
        let is_in_doubt = endpoint.broken || is_awaited;
        is_in_doubt.then(|| Self {
            address: endpoint.address,
            key: endpoint.key.clone(),
            who: endpoint.who,
            session: endpoint.session,
        })
    }
}

impl DrainHandle for TcpDrain {
    /// To go on with a session ends its old connection first: so it is asked for, with a count of answers that cannot be. What is refused for that, or because
    /// there is no such session, has no connection any more.
    fn drain(&mut self) -> Result<(), EndpointError> {
        let resume = Resume { session: self.session, answered: u64::MAX, heard: 0, taken: 0 };
        let hello = Hello { who: self.who, encrypt: false, resume: Some(resume) };
        let deadline = Instant::now() + HANDSHAKE_TIME;
        loop {
            let left = deadline.saturating_duration_since(Instant::now()).max(RETRY_EVERY);
            match open_session(self.address, &self.key, &hello, left) {
                Err(EndpointError::Refused { reason, .. }) if reason != TRY_AGAIN => return Ok(()),
                // Nobody is there any more, and its memory went with it.
                Err(EndpointError::Unreachable { source, .. })
                    if source.kind() == std::io::ErrorKind::ConnectionRefused =>
                {
                    return Ok(());
                }
                Err(EndpointError::Refused { .. }) if Instant::now() < deadline => {
                    std::thread::sleep(RETRY_EVERY);
                }
                Err(error) => return Err(error),
                // It counts otherwise; its connection is this one by now, and ends here.
                Ok(_) => return Ok(()),
            }
        }
    }
}
