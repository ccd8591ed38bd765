//! Requests to an agent from another process of the same user.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use aquifer_arena::calls::{Answer, Call, CopiesStatus, LISTED_MAX, SegmentStatus, SegmentTotals};
use aquifer_channel::{ReceiveError, receive_frame, send_frame};
use aquifer_ipc::{Frame, SetLimit};

use aquifer_report::{AgentStatus, RunStatistics};

/// Timeout of an answer. Before it sends a status, the agent queries its nodes, and waits up to 5 s
/// for a node that hangs.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(8);
const UNEXPECTED_FRAME: &str =
    "the agent has answered with an unexpected frame; use an agent of the same build";

/// Connects to the agent that listens at `path`.
///
/// # Errors
/// If no agent listens there.
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    aquifer_channel::connect(path)
}

/// Changes the limit of the run that a process belongs to. Returns the run's statistics afterwards.
///
/// # Errors
/// If no agent listens there, with advice, or if the agent refuses.
pub fn set_limit(path: &Path, set: SetLimit) -> io::Result<RunStatistics> {
    let socket = connect(path).map_err(|error| {
        if error.kind() == io::ErrorKind::PermissionDenied {
            return error;
        }
        let path = path.display();
        io::Error::new(
            error.kind(),
            format!(
                "no agent answers at {path}: no cluster is up, or its agent has ended; start it with \
                 `aquifer up`, or name the state folder of the program's cluster with --state"
            ),
        )
    })?;
    match request(&socket, &Frame::SetLimit(set))? {
        Frame::Statistics(text) => serde_json::from_str(&text).map_err(io::Error::other),
        _ => Err(io::Error::other(UNEXPECTED_FRAME)),
    }
}

/// Requests an agent's status; `None` if no agent listens there.
///
/// # Errors
/// If no answer of an agent of this build arrives in time.
pub fn status(path: &Path) -> io::Result<Option<AgentStatus>> {
    status_within(path, ANSWER_TIMEOUT)
}

/// Requests an agent's status as [`status`] does, and waits at most `timeout` for it.
///
/// # Errors
/// Those of [`status`].
pub fn status_within(path: &Path, timeout: Duration) -> io::Result<Option<AgentStatus>> {
    let socket = match connect(path) {
        Ok(socket) => socket,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(error),
        Err(_) => return Ok(None),
    };
    match request_within(&socket, &Frame::StatusRequest, timeout)? {
        Frame::StatusReport(text) => serde_json::from_str(&text).map(Some).map_err(io::Error::other),
        _ => Err(io::Error::other(UNEXPECTED_FRAME)),
    }
}

/// Asks an agent about segments; `None` if no agent listens there.
///
/// # Errors
/// The agent's reason for a refusal, or an error if no answer of an agent of this build arrives in
/// time.
pub fn segments(path: &Path, call: &Call) -> io::Result<Option<Answer>> {
    let socket = match connect(path) {
        Ok(socket) => socket,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(error),
        Err(_) => return Ok(None),
    };
    let json = serde_json::to_string(call).map_err(io::Error::other)?;
    match request(&socket, &Frame::SegmentCall(json))? {
        Frame::SegmentAnswer(json) => match serde_json::from_str(&json).map_err(io::Error::other)? {
            Answer::Failed(reason) => Err(io::Error::other(reason)),
            answer => Ok(Some(answer)),
        },
        _ => Err(io::Error::other(UNEXPECTED_FRAME)),
    }
}

/// Requests the segments of an agent's host that are visible to the caller, and the host's totals;
/// `None` if no agent listens there.
///
/// # Errors
/// Those of [`segments`].
pub fn segment_report(path: &Path) -> io::Result<Option<(Vec<SegmentStatus>, SegmentTotals)>> {
    let mut all: Vec<SegmentStatus> = Vec::new();
    loop {
        let above = all.last().map(|last| (last.user, last.id));
        match segments(path, &Call::Report { above })? {
            None => return Ok(None),
            Some(Answer::Report { segments, totals }) => {
                let is_last = segments.len() < LISTED_MAX;
                all.extend(segments);
                if is_last {
                    return Ok(Some((all, totals)));
                }
            }
            Some(_) => return Err(io::Error::other(UNEXPECTED_FRAME)),
        }
    }
}

/// Requests the copies of segments on memory nodes that are visible to the caller; `None` if no
/// agent listens there.
///
/// # Errors
/// Those of [`segments`].
pub fn copies_report(path: &Path) -> io::Result<Option<Vec<CopiesStatus>>> {
    let mut all: Vec<CopiesStatus> = Vec::new();
    loop {
        let above = all.last().map(|last| (last.user, last.id));
        match segments(path, &Call::ReportCopies { above })? {
            None => return Ok(None),
            Some(Answer::ReportCopies(copies)) => {
                let is_last = copies.len() < LISTED_MAX;
                all.extend(copies);
                if is_last {
                    return Ok(Some(all));
                }
            }
            Some(_) => return Err(io::Error::other(UNEXPECTED_FRAME)),
        }
    }
}

/// Sends a request and waits for the answer until the timeout: an agent that hangs still has an
/// open socket.
fn request(socket: &OwnedFd, request: &Frame) -> io::Result<Frame> {
    request_within(socket, request, ANSWER_TIMEOUT)
}

fn request_within(socket: &OwnedFd, request: &Frame, timeout: Duration) -> io::Result<Frame> {
    rustix::net::sockopt::set_socket_timeout(socket, rustix::net::sockopt::Timeout::Recv, Some(timeout))?;
    send_frame(socket, request, &[])?;
    match receive_frame(socket) {
        Ok((Frame::Refused(reason), _)) => Err(io::Error::other(reason)),
        Ok((answer, _)) => Ok(answer),
        Err(ReceiveError::System(error)) if error.kind() == io::ErrorKind::WouldBlock => {
            let seconds = timeout.as_secs_f32();
            Err(io::Error::other(format!(
                "the agent has not answered within {seconds} s: check whether its process has ended, hangs \
                 or is stopped"
            )))
        }
        Err(error) => Err(io::Error::other(error)),
    }
}
