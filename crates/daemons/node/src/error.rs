//! The errors of a node.

use std::path::PathBuf;

use aquifer_directory::DirectoryError;
use aquifer_fabric::TargetError;
use aquifer_metrics::MetricsError;
use aquifer_pool::NodeMemoryError;

/// Why a node cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The machine has too little memory available.
    #[error(
        "cannot lend {asked} bytes: only {available} bytes of memory are available; lend less, or stop \
        other programs"
    )]
    NoMemory {
        /// Requested memory.
        asked: u64,
        /// Available memory.
        available: u64,
    },
    /// The available memory could not be determined.
    #[error("cannot determine how much memory is available: {0}")]
    AvailableMemory(#[source] std::io::Error),
    /// The table of host epochs could not be created.
    #[error("no memory for the table of host epochs: {0}")]
    HostEpochs(#[source] std::io::Error),
    /// The fabric cannot listen.
    #[error("cannot listen: {0}")]
    Listen(#[source] TargetError),
    /// The memory could not be laid out as a pool.
    #[error(transparent)]
    Memory(#[from] NodeMemoryError),
    /// The keeper cannot hold the memory.
    #[error(
        "the keeper at {path} cannot be used: {source}. Start it first (aquifer keeper), or omit \
         --grace",
        path = path.display()
    )]
    Keeper {
        /// The keeper's socket.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The maintenance thread could not be started.
    #[error("cannot start the maintenance thread: {0}")]
    Maintenance(#[source] std::io::Error),
    /// The socket for the service of heaps cannot be made.
    #[error("cannot listen at {path} for the service of heaps: {source}", path = path.display())]
    Heaps {
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The options request changes of the lent memory at run time, but the fabric pins memory.
    #[error("{fabric} pins memory at registration: --memory-max and --keep-free are not supported")]
    Pinned {
        /// Name of the fabric.
        fabric: &'static str,
    },
    /// The file for the data of a disk node cannot be made.
    #[error(
        "cannot reserve {bytes} bytes in the directory {path}: {source}; give a directory of a file system \
        with that much room (--disk), or lend less (--memory)",
        path = path.display()
    )]
    Disk {
        /// The directory.
        path: PathBuf,
        /// Bytes to reserve.
        bytes: u64,
        /// The system's error.
        source: std::io::Error,
    },
    /// The fabric gives hosts direct access to memory, which a disk node does not have.
    #[error("a node with a disk listens over TCP: give an address (--listen)")]
    DiskFabric,
    /// The options concern memory, which a disk node does not lend.
    #[error("a node with a disk lends no memory: --keep-free and memory for heaps are not supported")]
    DiskOptions,
    /// Metrics cannot be served.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// A request to the directory failed while the node joined the cluster.
    #[error("cannot join the cluster: {0}")]
    Directory(#[from] DirectoryError),
    /// Another node has this number.
    #[error("node {id} exists already at {address}: choose another number (--id)")]
    IdTaken {
        /// The node's number.
        id: u16,
        /// The other node's address.
        address: String,
    },
    /// The node's record was changed during each attempt to write it.
    #[error(
        "cannot join the cluster as node {id}: another process has changed its record during each of \
         {attempts} attempts; check that no other node has this number"
    )]
    Contended {
        /// The node's number.
        id: u16,
        /// Number of attempts.
        attempts: u32,
    },
}
