//! Talking to an agent from another process of the same user.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use aquifer_faults::serve::attach::{receive_frame, send_frame};
use aquifer_ipc::{Frame, SetLimit};

use crate::report::{AgentStatus, RunStatistics};

/// Connect to the agent that listens at `path`.
///
/// # Errors
/// If none does.
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    crate::socket::connect_to(path)
}

/// Change the limit of the run that a process belongs to; the run's figures afterwards.
///
/// # Errors
/// If no agent listens there, or it refuses.
pub fn set_limit(path: &Path, pid: u32, limit_bytes: u64) -> io::Result<RunStatistics> {
    let socket = connect(path)?;
    send_frame(&socket, &Frame::SetLimit(SetLimit { pid, limit_bytes }), &[])?;
    match receive_frame(&socket) {
        Ok((Frame::Statistics(text), _)) => serde_json::from_str(&text).map_err(io::Error::other),
        Ok((Frame::Refused(reason), _)) => Err(io::Error::other(reason)),
        Ok(_) => Err(io::Error::other("the agent answered something else")),
        Err(error) => Err(io::Error::other(error)),
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
    send_frame(&socket, &Frame::Status, &[])?;
    match receive_frame(&socket) {
        Ok((Frame::StatusIs(text), _)) => serde_json::from_str(&text).map(Some).map_err(io::Error::other),
        Ok((Frame::Refused(reason), _)) => Err(io::Error::other(reason)),
        Ok(_) => Err(io::Error::other("the agent answered something else")),
        Err(error) => Err(io::Error::other(error)),
    }
}
