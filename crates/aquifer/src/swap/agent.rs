//! An eye on the agent, which keeps the lease of this host: without it the memory nodes turn this host away before long.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use aquifer_agent::lent::{Lent, borrow};
use aquifer_faults::serve::attach::receive_frame;
use aquifer_ipc::Frame;

/// An agent that died is waited for so long: as long as other programs wait for it.
const GRACE: Duration = Duration::from_secs(30);
/// How often to look for it.
const RETRY: Duration = Duration::from_secs(1);

/// The connection to the agent, or since when there is none.
pub(super) struct AgentWatch {
    path: PathBuf,
    socket: Option<OwnedFd>,
    host: u16,
    epoch: u64,
    gone_since: Instant,
    last_try: Instant,
}

impl AgentWatch {
    pub(super) fn new(path: PathBuf, socket: OwnedFd, lent: &Lent) -> Self {
        let now = Instant::now();
        let (host, epoch) = (lent.host, lent.epoch);
        Self { path, socket: Some(socket), host, epoch, gone_since: now, last_try: now }
    }

    /// What is readable when there is news.
    pub(super) fn socket(&self) -> Option<&OwnedFd> {
        self.socket.as_ref()
    }

    /// Hear the agent, or look whether it is back. Returns why the run cannot go on, if that is so.
    pub(super) fn look(&mut self) -> Option<String> {
        let Some(socket) = &self.socket else {
            return self.look_for_it();
        };
        if !super::is_readable(socket) {
            return None;
        }
        if let Ok((Frame::Ended(reason), _)) = receive_frame(socket) {
            return Some(reason);
        }
        tracing::warn!("the agent is gone; the swap device goes on as long as the memory nodes take it");
        self.socket = None;
        self.gone_since = Instant::now();
        self.last_try = self.gone_since;
        None
    }

    fn look_for_it(&mut self) -> Option<String> {
        if self.gone_since.elapsed() > GRACE {
            return Some(format!(
                "the agent that holds its host's lease died and did not come back within {} s",
                GRACE.as_secs()
            ));
        }
        if self.last_try.elapsed() < RETRY {
            return None;
        }
        self.last_try = Instant::now();
        let (socket, lent) = borrow(&self.path).ok()?;
        if (lent.host, lent.epoch) != (self.host, self.epoch) {
            return Some(
                "the agent was started anew as another host, and the memory nodes know this one no longer"
                    .into(),
            );
        }
        tracing::info!("the agent is back");
        self.socket = Some(socket);
        None
    }
}
