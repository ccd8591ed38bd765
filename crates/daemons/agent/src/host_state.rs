//! The state of the host itself: its record in the directory, its mempool, and its sockets.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use aquifer_channel::socket::listen_at;
use aquifer_channel::{HoldRefused, RestoredItem};
use aquifer_directory::names::AgentRecord;
use aquifer_ipc::{HeldItem, HeldKind};
use aquifer_keeper::{KeeperClient, KeeperStore};
use aquifer_pager::{Memory, Mempool};

use crate::daemon::{AgentError, AgentOptions};

/// The state of a host, new or from the previous agent.
#[derive(Debug)]
pub(crate) struct HostState {
    /// The directory record of the previous agent, if this one resumes its programs.
    pub predecessor: Option<AgentRecord>,
    pub mempool: Mempool,
    /// The socket for programs of the agent's own user. Connections that were made while no agent
    /// was running wait in it.
    pub listener: OwnedFd,
    /// The socket for programs of all users, if the agent serves them.
    pub shared_listener: Option<OwnedFd>,
}

impl HostState {
    /// Restores the state that the keeper has held, or creates a new one if it holds none.
    ///
    /// # Errors
    /// If a new mempool or socket cannot be created.
    pub fn restore_or_create(options: &AgentOptions, kept: &[RestoredItem]) -> Result<Self, AgentError> {
        if let Some(kept) = kept.iter().find(|kept| kept.item.kind == HeldKind::Host) {
            match Self::restore(kept, options) {
                Ok(state) => return Ok(state),
                Err(error) => tracing::error!(
                    %error,
                    "cannot resume the programs of the previous agent: its state is unreadable; ending them"
                ),
            }
        }
        Ok(Self {
            predecessor: None,
            mempool: new_mempool(options)?,
            listener: listen(options)
                .map_err(|source| AgentError::Listen { path: options.socket.clone(), source })?,
            shared_listener: listen_shared(options).map_err(|source| AgentError::Listen {
                path: options.shared_socket.clone().unwrap_or_default(),
                source,
            })?,
        })
    }

    fn restore(kept: &RestoredItem, options: &AgentOptions) -> io::Result<Self> {
        let predecessor = serde_json::from_str(&kept.item.record).map_err(io::Error::other)?;
        let [mempool, listener, kept_shared @ ..] = &kept.fds[..] else {
            return Err(io::Error::other("descriptors are missing in the keeper's item"));
        };
        let mempool = Mempool::recover(Memory::whole(mempool.try_clone()?)?);
        let listener = options.listener.as_ref().unwrap_or(listener).try_clone()?;
        let shared_listener = match kept_shared.first() {
            Some(kept) => Some(kept.try_clone()?),
            None => listen_shared(options)?,
        };
        Ok(Self { predecessor: Some(predecessor), mempool, listener, shared_listener })
    }

    /// Stores the state in the keeper, with `record` as this agent's record in the directory.
    ///
    /// # Errors
    /// If the keeper is full.
    pub fn store(&self, record: &AgentRecord, keeper: &KeeperClient) -> Result<(), HoldRefused> {
        let record = serde_json::to_string(record).expect("plain structs are JSON");
        let fds: Vec<_> = [self.mempool.memory().fd(), self.listener.as_fd()]
            .into_iter()
            .chain(self.shared_listener.as_ref().map(AsFd::as_fd))
            .collect();
        keeper.hold(&HeldItem { kind: HeldKind::Host, id: 0, pid: 0, uid: 0, record }, &fds)
    }
}

/// Creates a mempool.
///
/// # Errors
/// If the machine has too little memory, or the mempool cannot be created.
pub(crate) fn new_mempool(options: &AgentOptions) -> Result<Mempool, AgentError> {
    let (mempool, available) = (options.mempool_bytes as u64, options.available_bytes);
    if mempool > available {
        return Err(AgentError::MempoolTooLarge { mempool, available });
    }
    Mempool::new(options.mempool_bytes).map_err(AgentError::Mempool)
}

/// Creates the socket for programs of the agent's own user. If that user is root, programs may have
/// changed their user, so all users may connect.
fn listen(options: &AgentOptions) -> io::Result<OwnedFd> {
    let mode = if rustix::process::geteuid().is_root() { 0o666 } else { 0o600 };
    match &options.listener {
        Some(listener) => listener.try_clone(),
        None => listen_at(&options.socket, mode),
    }
}

/// Creates the socket for programs of all users, if it is configured.
fn listen_shared(options: &AgentOptions) -> io::Result<Option<OwnedFd>> {
    options.shared_socket.as_deref().map(|path| listen_at(path, 0o666)).transpose()
}
