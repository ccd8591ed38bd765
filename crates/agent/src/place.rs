//! What an agent has of its own on its host, fresh or from one before it: its name in the cluster, its mempool, its socket.

use std::os::fd::OwnedFd;

use aquifer_directory::names::AgentRecord;
use aquifer_faults::serve::Kept;
use aquifer_ipc::KeptKind;
use aquifer_pager::{Memory, Mempool};

use crate::agent::{AgentError, AgentOptions};
use crate::socket::listen_or_take;

/// See above.
#[derive(Debug)]
pub(crate) struct Place {
    /// What the directory has of the agent before this one.
    pub before: Option<AgentRecord>,
    pub mempool: Mempool,
    /// Programs that came while no agent was there wait in it.
    pub listener: OwnedFd,
}

impl Place {
    /// The place that the keeper has, else a fresh one.
    pub fn find(options: &AgentOptions, kept: &[Kept]) -> Result<Self, AgentError> {
        if let Some(kept) = kept.iter().find(|kept| kept.put.kind == KeptKind::Host) {
            match Self::again(kept, options.listener.as_ref()) {
                Ok(place) => return Ok(place),
                Err(error) => tracing::error!(%error, "what the agent before this one left cannot be read"),
            }
        }
        Ok(Self {
            before: None,
            mempool: Mempool::new(options.mempool_bytes).map_err(AgentError::Mempool)?,
            listener: listen_or_take(&options.socket, options.listener.as_ref())
                .map_err(|source| AgentError::Listen { path: options.socket.clone(), source })?,
        })
    }

    fn again(kept: &Kept, given: Option<&OwnedFd>) -> std::io::Result<Self> {
        let before = serde_json::from_str(&kept.put.record).map_err(std::io::Error::other)?;
        let [mempool, listener] = &kept.fds[..] else {
            return Err(std::io::Error::other("the keeper lacks descriptors of it"));
        };
        let mempool = Mempool::recover(Memory::whole(mempool.try_clone()?)?);
        Ok(Self { before: Some(before), mempool, listener: given.unwrap_or(listener).try_clone()? })
    }
}
