//! The connection of a swap server to the agent, on which the agent notifies it of its stop.
//!
//! If the agent dies, the swap device continues, and the server connects to the next agent.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use aquifer_channel::receive_frame;
use aquifer_host::cluster_access::request_cluster_access;
use aquifer_ipc::Frame;

/// Interval between attempts to connect to the next agent.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The connection to the agent, if there is one.
pub(crate) struct AgentWatch {
    path: PathBuf,
    socket: Option<OwnedFd>,
    last_attempt: Instant,
}

impl AgentWatch {
    pub(crate) fn new(path: PathBuf, socket: OwnedFd) -> Self {
        Self { path, socket: Some(socket), last_attempt: Instant::now() }
    }

    /// The socket to poll; it is readable when [`poll`](Self::poll) has something to do.
    pub(crate) fn socket(&self) -> Option<&OwnedFd> {
        self.socket.as_ref()
    }

    /// Reads from the agent, or connects to the next one. Returns the reason if the run must end.
    pub(crate) fn poll(&mut self) -> Option<String> {
        match &self.socket {
            Some(socket) if !crate::server::is_readable(socket) => {}
            Some(socket) => {
                if let Ok((Frame::Ended(reason), _)) = receive_frame(socket) {
                    return Some(reason);
                }
                tracing::warn!("connection to the agent lost; the swap device continues without it");
                self.socket = None;
            }
            None if self.last_attempt.elapsed() < RETRY_INTERVAL => {}
            None => {
                self.last_attempt = Instant::now();
                self.socket = request_cluster_access(&self.path).ok().map(|(socket, _)| socket);
            }
        }
        None
    }
}
