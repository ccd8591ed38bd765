//! The memory of a starting node: new, or left by an earlier process.

use std::cell::OnceCell;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use aquifer_fabric::{PageStore, Target};
use aquifer_pool::size::SECTION_BYTES;
use aquifer_pool::{Layout, NodeId, NodeMemory, NodeMemoryError};

use crate::disk_store::DiskStore;
use crate::error::NodeError;
use crate::host_epochs::HostEpochs;
use crate::kept_memory::{KeptMemory, MemoryKeeper, RestoredMemory};
use crate::memory::affordable_bytes;
use crate::serve::NodeOptions;

/// The memory of a starting node.
pub(crate) struct OpenedMemory {
    pub node_memory: NodeMemory,
    /// The data of a disk node.
    pub disk: Option<Arc<DiskStore>>,
    /// The epoch of the memory's life.
    pub epoch: u64,
    /// True if an earlier process has left the memory.
    pub is_restored: bool,
}

impl OpenedMemory {
    /// The sections in which an earlier process may have left changes incomplete.
    pub const fn uncertain(&self) -> Range<u32> {
        if self.is_restored { 0..self.node_memory.layout.sections() } else { 0..0 }
    }
}

/// Opens the memory of an earlier process again; `None` if it is damaged.
pub(crate) fn reopen(
    options: &NodeOptions,
    restored: RestoredMemory,
    keeper: Option<&MemoryKeeper>,
    epochs: &HostEpochs,
    target: &dyn Target,
) -> Option<OpenedMemory> {
    let RestoredMemory { memory, key, epoch, disk } = restored;
    if let Some(keeper) = keeper {
        // Held before the memory is opened: the next process must know this process's peers, too.
        let kept = KeptMemory { memory: &memory, key, epoch, disk: disk.as_deref(), epochs };
        keeper.hold(&kept, target);
    }
    let store = disk.clone().map(|disk| disk as Arc<dyn PageStore>);
    NodeMemory::reopen(target, NodeId(options.id), memory, key, store)
        .inspect_err(|error| {
            tracing::error!(node = options.id, %error, "kept memory is damaged; what was on it is lost");
        })
        .map(|node_memory| OpenedMemory { node_memory, disk, epoch, is_restored: true })
        .ok()
}

/// Creates the memory of a new life with this epoch.
pub(crate) fn create(
    options: &NodeOptions,
    lent_bytes: Option<u64>,
    epoch: u64,
    keeper: Option<&MemoryKeeper>,
    epochs: &HostEpochs,
    target: &dyn Target,
) -> Result<OpenedMemory, NodeError> {
    let lent_bytes = lent_bytes.map_or_else(|| initial_lent_bytes(options), Ok)?;
    let lent_bytes = lent_bytes / SECTION_BYTES * SECTION_BYTES;
    let bytes_max = options.memory_bytes_max;
    let (node_memory, disk) = match &options.disk {
        Some(directory) => create_on_disk(options, directory, lent_bytes, target)?,
        None => {
            (NodeMemory::create_resizable(target, NodeId(options.id), lent_bytes, bytes_max, None)?, None)
        }
    };
    if let Some(keeper) = keeper {
        let (memory, key) = (&*node_memory.memory, node_memory.region.key);
        keeper.hold(&KeptMemory { memory, key, epoch, disk: disk.as_deref(), epochs }, target);
    }
    Ok(OpenedMemory { node_memory, disk, epoch, is_restored: false })
}

/// Creates the memory of a disk node, and the file with its data.
fn create_on_disk(
    options: &NodeOptions,
    directory: &Path,
    lent_bytes: u64,
    target: &dyn Target,
) -> Result<(NodeMemory, Option<Arc<DiskStore>>), NodeError> {
    let created = OnceCell::new();
    let create = |layout: &Layout| {
        let disk = Arc::new(DiskStore::create(directory, layout.data_at(), layout.data_bytes())?);
        let _first = created.set(Arc::clone(&disk));
        Ok(disk as Arc<dyn PageStore>)
    };
    let (id, bytes_max) = (NodeId(options.id), options.memory_bytes_max);
    let node_memory = NodeMemory::create_resizable(target, id, lent_bytes, bytes_max, Some(&create));
    let node_memory = node_memory.map_err(|error| match error {
        NodeMemoryError::Store(source) => {
            NodeError::Disk { path: directory.to_owned(), bytes: bytes_max, source }
        }
        error => error.into(),
    })?;
    Ok((node_memory, created.into_inner()))
}

/// The memory that a node lends at first: the configured amount. With `keep_free_bytes`, at most
/// the memory that the machine has available beyond that.
pub(crate) fn initial_lent_bytes(options: &NodeOptions) -> Result<u64, NodeError> {
    if options.disk.is_some() {
        return Ok(options.memory_bytes);
    }
    let available = (options.available_bytes)().map_err(NodeError::AvailableMemory)?;
    match options.keep_free_bytes {
        Some(keep_free) => Ok(options.memory_bytes.min(affordable_bytes(0, available, keep_free))),
        None if options.memory_bytes > available => {
            Err(NodeError::NoMemory { asked: options.memory_bytes, available })
        }
        None => Ok(options.memory_bytes),
    }
}
