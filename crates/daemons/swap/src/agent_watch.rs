//! The connection of a swap server to the agent: the server reports its statistics, and the agent
//! sends new limits and notifies the server of its own stop.
//!
//! If the agent dies, the swap device continues, and the server connects to the next agent.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use aquifer_channel::{receive_frame, try_send_frame};
use aquifer_host::cluster_access::{ClusterAccess, SwapReport, request_cluster_access};
use aquifer_ipc::{Frame, SetLimit};

/// Interval between attempts to connect to the next agent.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// A request of the agent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum AgentRequest {
    /// The run must end, for this reason.
    End(String),
    /// The run gets a new limit.
    SetLimit(SetLimit),
}

/// The connection to the agent, if there is one.
pub(crate) struct AgentWatch {
    path: PathBuf,
    connection: Option<Connection>,
    last_attempt: Instant,
}

struct Connection {
    socket: OwnedFd,
    /// False for an agent of the previous version, which would close the connection.
    takes_reports: bool,
    has_report: bool,
}

impl Connection {
    fn new(socket: OwnedFd, access: &ClusterAccess) -> Self {
        Self { socket, takes_reports: access.takes_reports, has_report: false }
    }
}

impl AgentWatch {
    pub(crate) fn new(path: PathBuf, socket: OwnedFd, access: &ClusterAccess) -> Self {
        Self { path, connection: Some(Connection::new(socket, access)), last_attempt: Instant::now() }
    }

    /// The socket to poll, which is readable when [`poll`](Self::poll) must be called; `None`
    /// without a connection.
    pub(crate) fn socket(&self) -> Option<&OwnedFd> {
        self.connection.as_ref().map(|connection| &connection.socket)
    }

    /// Reads from the agent, or connects to the next agent.
    pub(crate) fn poll(&mut self) -> Option<AgentRequest> {
        match &self.connection {
            Some(connection) if !crate::server::is_readable(&connection.socket) => {}
            Some(connection) => match receive_frame(&connection.socket) {
                Ok((Frame::Ended(reason), _)) => return Some(AgentRequest::End(reason)),
                Ok((Frame::SetLimit(set), _)) => return Some(AgentRequest::SetLimit(set)),
                _ => {
                    tracing::warn!("connection to the agent lost; the swap device continues without it");
                    self.connection = None;
                }
            },
            None if self.last_attempt.elapsed() < RETRY_INTERVAL => {}
            None => {
                self.last_attempt = Instant::now();
                let connection = request_cluster_access(&self.path);
                self.connection = connection.ok().map(|(socket, access)| Connection::new(socket, &access));
            }
        }
        None
    }

    /// Whether the agent accepts reports, and has none yet.
    pub(crate) fn needs_first_report(&self) -> bool {
        self.connection.as_ref().is_some_and(|connection| connection.takes_reports && !connection.has_report)
    }

    /// Reports to the agent, if it accepts reports. If the socket is full the report is dropped: a
    /// stopped agent must not stop the device.
    pub(crate) fn report(&mut self, report: &SwapReport) {
        if let Some(connection) = self.connection.as_mut().filter(|connection| connection.takes_reports) {
            let json = serde_json::to_string(report).expect("numbers and texts can be written");
            connection.has_report = try_send_frame(&connection.socket, &Frame::Statistics(json), &[]).is_ok();
        }
    }
}
