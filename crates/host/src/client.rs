//! Talking to an agent from another process of the same user.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use aquifer_channel::{ReceiveError, receive_frame, send_frame};
use aquifer_ipc::{Frame, SetLimit};

use crate::report::{AgentStatus, RunStatistics};

/// An agent that asks its nodes before it answers waits up to 5 s for one that stands still.
const PATIENCE: Duration = Duration::from_secs(8);
const ANSWERED_ELSE: &str = "the agent answered something else";

/// Connect to the agent that listens at `path`.
///
/// # Errors
/// If none does.
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    aquifer_channel::connect(path)
}

/// Change the limit of the run that a process belongs to; the run's figures afterwards.
///
/// # Errors
/// If no agent listens there, or it refuses.
pub fn set_limit(path: &Path, pid: u32, limit_bytes: u64) -> io::Result<RunStatistics> {
    let socket = connect(path)?;
    match ask(&socket, &Frame::SetLimit(SetLimit { pid, limit_bytes }))? {
        Frame::Statistics(text) => serde_json::from_str(&text).map_err(io::Error::other),
        _ => Err(io::Error::other(ANSWERED_ELSE)),
    }
}

/// Ask an agent how it is; `None` if none listens there.
///
/// # Errors
/// If what listens there does not answer as an agent of this version does.
pub fn status(path: &Path) -> io::Result<Option<AgentStatus>> {
    let Ok(socket) = connect(path) else {
        return Ok(None);
    };
    match ask(&socket, &Frame::StatusRequest)? {
        Frame::StatusReport(text) => serde_json::from_str(&text).map(Some).map_err(io::Error::other),
        _ => Err(io::Error::other(ANSWERED_ELSE)),
    }
}

/// Ask, and wait for the answer, but not for ever: an agent that stands still listens on.
fn ask(socket: &OwnedFd, question: &Frame) -> io::Result<Frame> {
    rustix::net::sockopt::set_socket_timeout(socket, rustix::net::sockopt::Timeout::Recv, Some(PATIENCE))?;
    send_frame(socket, question, &[])?;
    match receive_frame(socket) {
        Ok((Frame::Refused(reason), _)) => Err(io::Error::other(reason)),
        Ok((answer, _)) => Ok(answer),
        Err(ReceiveError::System(error)) if error.kind() == io::ErrorKind::WouldBlock => {
            let seconds = PATIENCE.as_secs();
            Err(io::Error::other(format!("the agent does not answer within {seconds} s; is it stopped?")))
        }
        Err(error) => Err(io::Error::other(error)),
    }
}
