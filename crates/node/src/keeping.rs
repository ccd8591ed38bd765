//! Memory that outlives this process: the keeper holds it, and the node that comes next under the number goes on with it.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use aquifer_fabric::{Key, Memory, Target, shm};
use aquifer_ipc::{HeldItem, HeldKind, KeeperShare};
use aquifer_keeper::KeeperClient;
use serde::{Deserialize, Serialize};

use crate::epochs::Epochs;
use crate::error::NodeError;

/// Where memory is kept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Keep {
    /// Where the keeper listens.
    pub keeper: PathBuf,
    /// For so long it keeps what nobody comes back for; others wait for the node as long.
    pub grace: Duration,
}

/// What the keeper holds for a node.
#[derive(Debug)]
pub(crate) struct Kept {
    port: KeeperClient,
    node: u16,
}

/// Memory of an earlier life of this process, and of the same life of the node.
#[derive(Debug)]
pub(crate) struct Before {
    pub memory: Arc<Memory>,
    /// The key of its region.
    pub key: Key,
    /// Which life of the node it is.
    pub epoch: u64,
    /// The hosts that were seen.
    pub epochs: Epochs,
}

/// What is written down with the memory. JSON: it is read once, by the next node, which may be of a newer build.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    epoch: u64,
    key: u32,
}

impl Kept {
    /// Connect to the keeper; what a process before this one has left there, if nobody is at it any more and it makes sense.
    ///
    /// # Errors
    /// If there is no keeper, or the node is running.
    pub fn open(keep: &Keep, node: u16) -> Result<(Self, Option<Before>), NodeError> {
        let connected = KeeperClient::connect(&keep.keeper, KeeperShare::Node(node));
        let (port, left) =
            connected.map_err(|source| NodeError::Keeper { path: keep.keeper.clone(), source })?;
        let mut before = None;
        for kept in left {
            match Before::open(&kept.item.record, kept.fds) {
                Ok(memory) => before = Some(memory),
                Err(error) => {
                    tracing::error!(node, %error, "the memory that was kept is of no use; what was in it is lost")
                }
            }
        }
        Ok((Self { port, node }, before))
    }

    /// Have it hold memory that is lent under this key, as a life of the node with this epoch.
    pub fn keep(&self, memory: &Memory, key: Key, epochs: &Epochs, target: &dyn Target, epoch: u64) {
        let record = Record { epoch, key: key.0 };
        let record = serde_json::to_string(&record).expect("plain structs are JSON");
        let put = HeldItem { kind: HeldKind::Node, id: u64::from(self.node), pid: 0, record };
        let fds: Vec<BorrowedFd<'_>> =
            [memory.fd(), epochs.fd()].into_iter().chain(target.control()).collect();
        self.port.hold(&put, &fds);
    }

    /// The memory is worth nothing any more.
    pub fn forget(&self) {
        self.port.release(HeldKind::Node, u64::from(self.node));
    }

    /// If there is another keeper, it is given what the last one had. To be called now and then.
    pub fn refresh(&self) {
        self.port.reconnect_if_closed();
    }
}

impl Before {
    /// What accesses of the dead process' peers are under way is waited for.
    fn open(record: &str, fds: Vec<OwnedFd>) -> io::Result<Self> {
        let Record { epoch, key } = serde_json::from_str(record)?;
        let mut fds = fds.into_iter();
        let mut next = || fds.next().ok_or_else(|| io::Error::other("a descriptor is missing"));
        let memory = Arc::new(Memory::whole(next()?)?);
        let epochs = Epochs::open(next()?)?;
        fds.try_for_each(shm::retire)?;
        Ok(Self { memory, key: Key(key), epoch, epochs })
    }
}

#[cfg(test)]
mod golden_tests;
