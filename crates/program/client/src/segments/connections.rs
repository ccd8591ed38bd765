//! The connections of a process to one agent.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use aquifer_arena::calls::{Answer, Call, Tenure};
use aquifer_channel::boot_time::BootInstant;
use aquifer_channel::{receive_frame, send_frame, set_timeout};
use aquifer_ipc::Frame;
use rustix::net::{Shutdown, shutdown};

use super::Error;
use crate::error::connect_with_timeout;

/// Timeout of each answer of an agent while the connections to it are opened.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// The connections to an agent, and the agent's answer to [`Call::Open`].
pub(super) struct Connections {
    pub calls: OwnedFd,
    pub arrivals: OwnedFd,
    pub end_watch: AgentEndWatch,
    /// The time for which the process may use its segments without an answer of an agent.
    pub grace: Duration,
    /// The segments that the process still has, of those that it named in [`Call::Open`].
    pub still_held: Vec<u64>,
    /// The segments whose hand-over is in progress, of those that the process named.
    pub awaited: Vec<u64>,
}

/// The keep-alive connection and duplicates of the other sockets. They are polled to detect that
/// the agent ended, and used to close the connections. The originals are locked during a call.
#[derive(Debug)]
pub(super) struct AgentEndWatch {
    pub calls: OwnedFd,
    pub arrivals: OwnedFd,
    /// The connection for [`Call::KeepAlive`].
    pub keep_alive: OwnedFd,
    /// The time at which the first call was sent, from which the grace time counts.
    pub asked: BootInstant,
}

impl AgentEndWatch {
    /// Closes the connections. Calls that wait for an answer fail.
    pub fn shut_down(&self) {
        for socket in [&self.calls, &self.arrivals, &self.keep_alive] {
            let _was_closed = shutdown(socket, Shutdown::Both);
        }
    }
}

impl Connections {
    /// Opens the connections for a process that has the segments `held`. Fails at the time `until`
    /// if no agent has answered. A connection alone proves nothing: the kernel accepts it for a
    /// suspended agent, and for a keeper that holds the listening socket of an agent that has
    /// ended.
    pub fn open(
        agent: &Path,
        process: &str,
        held: Vec<(u64, Tenure)>,
        until: Option<BootInstant>,
    ) -> Result<Self, Error> {
        let connect = || connect_with_timeout(agent, answer_timeout(until, BootInstant::now()));
        let (calls, arrivals, keep_alive) = (connect()?, connect()?, connect()?);
        let ask = |socket: &OwnedFd, call: &Call| {
            set_timeout(socket, Some(answer_timeout(until, BootInstant::now()))).map_err(Error::System)?;
            ask(socket, call)
        };
        let asked = BootInstant::now();
        let (still_held, awaited, grace_ms) =
            match ask(&calls, &Call::Open { process: process.to_owned(), held })?.0 {
                Answer::Opened { held, awaited, grace_ms } => (held, awaited, grace_ms),
                answer => return Err(super::error_of(answer)),
            };
        super::done(ask(&arrivals, &Call::Attend { process: process.to_owned() })?)?;
        super::done(ask(&keep_alive, &Call::KeepAlive)?)?;
        for socket in [&calls, &arrivals] {
            set_timeout(socket, None).map_err(Error::System)?;
        }
        let grace = Duration::from_millis(grace_ms);
        let copy = |socket: &OwnedFd| socket.try_clone().map_err(Error::System);
        let end_watch = AgentEndWatch { calls: copy(&calls)?, arrivals: copy(&arrivals)?, keep_alive, asked };
        Ok(Self { calls, arrivals, end_watch, grace, still_held, awaited })
    }
}

/// The timeout of one answer of an agent: at most until the time `until`.
fn answer_timeout(until: Option<BootInstant>, now: BootInstant) -> Duration {
    until.map_or(ANSWER_TIMEOUT, |until| ANSWER_TIMEOUT.min(until.saturating_duration_since(now)))
}

/// Sends a call to the agent, and receives the answer with its descriptors.
pub(super) fn ask(socket: &OwnedFd, call: &Call) -> Result<(Answer, Vec<OwnedFd>), Error> {
    send(socket, call, &[])?;
    match receive_frame(socket)? {
        (Frame::SegmentAnswer(json), fds) => {
            Ok((serde_json::from_str(&json).map_err(|_| Error::Answer)?, fds))
        }
        (Frame::Refused(reason), _) => Err(Error::Failed(reason)),
        _ => Err(Error::Answer),
    }
}

/// Sends a call to the agent, and does not wait for an answer.
pub(super) fn send(socket: &OwnedFd, call: &Call, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
    let json = serde_json::to_string(call).map_err(|_| Error::Answer)?;
    send_frame(socket, &Frame::SegmentCall(json), fds).map_err(Error::Gone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timeout_of_an_answer_ends_at_the_deadline() {
        let now = BootInstant::now();
        let at = |ms| Some(now + Duration::from_millis(ms));
        assert_eq!(answer_timeout(None, now), ANSWER_TIMEOUT);
        assert_eq!(answer_timeout(at(60_000), now), ANSWER_TIMEOUT);
        assert_eq!(answer_timeout(at(3), now), Duration::from_millis(3));
        assert_eq!(answer_timeout(Some(now), now + Duration::from_millis(1)), Duration::ZERO);
    }
}
