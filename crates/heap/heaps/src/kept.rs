//! Heaps that outlive this process: the keeper holds their memory for the next one.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use aquifer_ipc::{HeldItem, HeldKind, KeeperShare};
use aquifer_keeper::{KeeperClient, KeeperStore};
use aquifer_objects::bytes::HeapBytes;
use aquifer_objects::service::{HeapKeeper, HeapRecord};

/// The connection to the keeper of the heaps.
#[derive(Debug)]
pub(crate) struct HeapKeeperClient {
    client: KeeperClient,
    node: u16,
}

/// A heap that an earlier process has left.
#[derive(Debug)]
pub(crate) struct KeptHeap {
    pub record: HeapRecord,
    pub bytes: HeapBytes,
}

impl HeapKeeperClient {
    /// Connects to the keeper. Returns the heaps that an earlier process has left.
    ///
    /// # Errors
    /// If the keeper cannot be reached, or another process serves these heaps.
    pub fn connect(path: &Path, node: u16, grace: Duration) -> io::Result<(Arc<Self>, Vec<KeptHeap>)> {
        let (client, kept) = KeeperClient::connect(path, KeeperShare::Heaps(node), grace)?;
        let keeper = Arc::new(Self { client, node });
        let mut heaps = Vec::new();
        for kept in kept {
            match open(&kept.item.record, kept.fds) {
                Ok(heap) => heaps.push(heap),
                Err(error) => {
                    tracing::error!(node, uid = kept.item.uid, %error, "cannot open a kept heap; it is lost");
                    keeper.client.release(HeldKind::Heap, kept.item.id);
                }
            }
        }
        Ok((keeper, heaps))
    }

    /// Releases a heap from the keeper.
    pub fn release(&self, heap: u16) {
        self.client.release(HeldKind::Heap, self.item_number(heap));
    }

    /// Stores the heaps in the new keeper if the keeper was restarted. Must be called regularly.
    pub fn reconnect_if_closed(&self) {
        self.client.reconnect_if_closed();
    }

    fn item_number(&self, heap: u16) -> u64 {
        u64::from(self.node) << 16 | u64::from(heap)
    }
}

fn open(record: &str, fds: Vec<OwnedFd>) -> io::Result<KeptHeap> {
    let record = serde_json::from_str(record)?;
    let fds = <[OwnedFd; 3]>::try_from(fds).map_err(|_| io::Error::other("a descriptor is missing"))?;
    Ok(KeptHeap { record, bytes: HeapBytes::open(fds)? })
}

/// Implements the service's interface to the keeper.
#[derive(Debug)]
pub(crate) struct ServiceKeeper(pub Arc<HeapKeeperClient>);

impl HeapKeeper for ServiceKeeper {
    fn hold(&self, record: &HeapRecord, fds: [BorrowedFd<'_>; 3]) -> Result<(), String> {
        let item = HeldItem {
            kind: HeldKind::Heap,
            id: self.0.item_number(record.heap),
            pid: 0,
            uid: record.tenant,
            record: serde_json::to_string(record).map_err(|error| error.to_string())?,
        };
        self.0.client.hold(&item, &fds).map_err(|error| error.to_string())
    }

    fn release(&self, heap: u16) {
        self.0.release(heap);
    }
}
