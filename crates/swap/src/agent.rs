//! An eye on the agent: it tells when the cluster goes down. If it dies nothing is lost, and the next one is asked to tell.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use aquifer_channel::receive_frame;
use aquifer_host::lent::borrow;
use aquifer_ipc::Frame;

/// How often to look for an agent that died.
const RETRY: Duration = Duration::from_secs(1);

/// The connection to the agent, if there is one.
pub(crate) struct AgentWatch {
    path: PathBuf,
    socket: Option<OwnedFd>,
    last_try: Instant,
}

impl AgentWatch {
    pub(crate) fn new(path: PathBuf, socket: OwnedFd) -> Self {
        Self { path, socket: Some(socket), last_try: Instant::now() }
    }

    /// What is readable when there is news.
    pub(crate) fn socket(&self) -> Option<&OwnedFd> {
        self.socket.as_ref()
    }

    /// Hear the agent, or look whether it is back. Returns why the run cannot go on, if that is so.
    pub(crate) fn look(&mut self) -> Option<String> {
        match &self.socket {
            Some(socket) if !crate::server::is_readable(socket) => {}
            Some(socket) => {
                if let Ok((Frame::Ended(reason), _)) = receive_frame(socket) {
                    return Some(reason);
                }
                tracing::warn!("the agent is gone; the swap device does not need it");
                self.socket = None;
            }
            None if self.last_try.elapsed() < RETRY => {}
            None => {
                self.last_try = Instant::now();
                self.socket = borrow(&self.path).ok().map(|(socket, _)| socket);
            }
        }
        None
    }
}
