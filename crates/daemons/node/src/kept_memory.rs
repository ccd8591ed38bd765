//! Memory that outlives this process: the keeper holds it for the node's next process.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use aquifer_fabric::{Key, Memory, Target, shm};
use aquifer_ipc::{HeldItem, HeldKind, KeeperShare};
use aquifer_keeper::{KeeperClient, KeeperStore};
use serde::{Deserialize, Serialize};

use crate::disk_store::DiskStore;
use crate::error::NodeError;
use crate::host_epochs::HostEpochs;

/// Options of a node whose memory is kept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeepOptions {
    /// The keeper's socket.
    pub keeper: PathBuf,
    /// The time for which hosts wait for the node after its process has ended.
    ///
    /// The keeper's own grace time, after which it frees the memory, must not be shorter.
    pub grace: Duration,
}

/// The connection to the keeper of this node's memory.
#[derive(Debug)]
pub(crate) struct MemoryKeeper {
    client: KeeperClient,
    node: u16,
}

/// Memory that an earlier process of the node has left.
#[derive(Debug)]
pub(crate) struct RestoredMemory {
    pub memory: Arc<Memory>,
    /// The key of the memory's region.
    pub key: Key,
    /// The epoch of the memory's life.
    pub epoch: u64,
    /// The data of a disk node.
    pub disk: Option<Arc<DiskStore>>,
}

/// Memory that the keeper is to hold.
#[derive(Clone, Copy)]
pub(crate) struct KeptMemory<'a> {
    pub memory: &'a Memory,
    /// The key of the memory's region.
    pub key: Key,
    /// The epoch of the memory's life.
    pub epoch: u64,
    /// The data of a disk node.
    pub disk: Option<&'a DiskStore>,
    /// The last epochs of hosts that this process has seen.
    pub epochs: &'a HostEpochs,
}

/// The keeper's record of the memory.
///
/// Stored as JSON, because the node that reads it may be of a newer build.
#[derive(PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct KeptMemoryRecord {
    pub epoch: u64,
    pub key: u32,
    /// Whether it is a disk node: its file and the seals follow the epochs.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_disk: bool,
}

impl MemoryKeeper {
    /// Connects to the keeper. Returns the memory that an earlier process has left, and the epochs
    /// of hosts that it has seen, if they are usable.
    ///
    /// Waits until no access of that process's peers to the memory is in flight.
    ///
    /// # Errors
    /// If the keeper cannot be reached, or another process runs as this node.
    pub fn connect(
        options: &KeepOptions,
        node: u16,
    ) -> Result<(Self, Option<(RestoredMemory, HostEpochs)>), NodeError> {
        let (client, kept) = KeeperClient::connect(&options.keeper, KeeperShare::Node(node), options.grace)
            .map_err(|source| NodeError::Keeper { path: options.keeper.clone(), source })?;
        let mut restored = None;
        for kept in kept {
            match RestoredMemory::open(&kept.item.record, kept.fds) {
                Ok(memory) => restored = Some(memory),
                Err(error) => {
                    tracing::error!(node, %error, "kept memory is unusable; what was on it is lost");
                }
            }
        }
        Ok((Self { client, node }, restored))
    }

    /// Gives the memory to the keeper.
    pub fn hold(&self, kept: &KeptMemory<'_>, target: &dyn Target) {
        let KeptMemory { memory, key, epoch, disk, epochs } = *kept;
        let record = KeptMemoryRecord { epoch, key: key.0, is_disk: disk.is_some() };
        let record = serde_json::to_string(&record).expect("plain structs are JSON");
        let item = HeldItem { kind: HeldKind::Node, id: u64::from(self.node), pid: 0, uid: 0, record };
        let disk = disk.into_iter().flat_map(DiskStore::fds);
        let fds: Vec<BorrowedFd<'_>> =
            [memory.fd(), epochs.fd()].into_iter().chain(disk).chain(target.control()).collect();
        if let Err(error) = self.client.hold(&item, &fds) {
            tracing::error!(node = self.node, %error, "the memory of this node is not kept");
        }
    }

    /// Requests that the keeper releases the memory.
    pub fn release(&self) {
        self.client.release(HeldKind::Node, u64::from(self.node));
    }

    /// If the keeper was restarted, gives the memory to the new one. Must be called regularly.
    pub fn reconnect_if_closed(&self) {
        self.client.reconnect_if_closed();
    }
}

impl RestoredMemory {
    /// Opens kept memory, and waits until no access of the dead process's peers is in flight.
    fn open(record: &str, fds: Vec<OwnedFd>) -> io::Result<(Self, HostEpochs)> {
        let KeptMemoryRecord { epoch, key, is_disk } = serde_json::from_str(record)?;
        let mut fds = fds.into_iter();
        let mut next = || fds.next().ok_or_else(|| io::Error::other("a descriptor is missing"));
        let memory = Arc::new(Memory::whole(next()?)?);
        let epochs = HostEpochs::open(next()?)?;
        let disk = if is_disk { Some(Arc::new(DiskStore::open(next()?, next()?)?)) } else { None };
        fds.try_for_each(shm::retire)?;
        Ok((Self { memory, key: Key(key), epoch, disk }, epochs))
    }
}

#[cfg(test)]
mod golden_tests;
