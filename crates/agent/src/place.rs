//! What an agent has of its own on its host, fresh or from one before it: its name in the cluster, its mempool, its socket.

use std::os::fd::OwnedFd;

use aquifer_channel::RestoredItem;
use aquifer_channel::socket::listen_at;
use aquifer_directory::names::AgentRecord;
use aquifer_ipc::HeldKind;
use aquifer_pager::{Memory, Mempool};

use crate::agent::{AgentError, AgentOptions};

/// See above.
#[derive(Debug)]
pub(crate) struct Place {
    /// What the directory has of the agent before this one.
    pub before: Option<AgentRecord>,
    pub mempool: Mempool,
    /// Programs that came while no agent was there wait in it.
    pub listener: OwnedFd,
    /// The same for other users, if they are served.
    pub shared: Option<OwnedFd>,
}

impl Place {
    /// The place that the keeper has, else a fresh one.
    pub fn find(options: &AgentOptions, kept: &[RestoredItem]) -> Result<Self, AgentError> {
        if let Some(kept) = kept.iter().find(|kept| kept.item.kind == HeldKind::Host) {
            match Self::again(kept, options) {
                Ok(place) => return Ok(place),
                Err(error) => tracing::error!(%error, "what the agent before this one left cannot be read"),
            }
        }
        Ok(Self {
            before: None,
            mempool: Mempool::new(options.mempool_bytes).map_err(AgentError::Mempool)?,
            listener: listener(options)
                .map_err(|source| AgentError::Listen { path: options.socket.clone(), source })?,
            shared: shared(options).map_err(|source| AgentError::Listen {
                path: options.shared_socket.clone().unwrap_or_default(),
                source,
            })?,
        })
    }

    fn again(kept: &RestoredItem, options: &AgentOptions) -> std::io::Result<Self> {
        let before = serde_json::from_str(&kept.item.record).map_err(std::io::Error::other)?;
        let [mempool, listener, kept_shared @ ..] = &kept.fds[..] else {
            return Err(std::io::Error::other("the keeper lacks descriptors of it"));
        };
        let mempool = Mempool::recover(Memory::whole(mempool.try_clone()?)?);
        let listener = options.listener.as_ref().unwrap_or(listener).try_clone()?;
        let shared = match kept_shared.first() {
            Some(kept) => Some(kept.try_clone()?),
            None => shared(options)?,
        };
        Ok(Self { before: Some(before), mempool, listener, shared })
    }
}

/// The agent's own socket, for programs of its user's. If that is root they may have become somebody else.
fn listener(options: &AgentOptions) -> std::io::Result<OwnedFd> {
    let mode = if rustix::process::geteuid().is_root() { 0o666 } else { 0o600 };
    match &options.listener {
        Some(given) => given.try_clone(),
        None => listen_at(&options.socket, mode),
    }
}

/// The socket for all users of this host.
fn shared(options: &AgentOptions) -> std::io::Result<Option<OwnedFd>> {
    options.shared_socket.as_deref().map(|path| listen_at(path, 0o666)).transpose()
}
