//! Why a node cannot serve.

use std::path::PathBuf;

use aquifer_directory::DirectoryError;
use aquifer_fabric::TargetError;
use aquifer_metrics::MetricsError;
use aquifer_pool::NodeMemoryError;

/// Why a node cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// This machine has not that much.
    #[error(
        "cannot lend {asked} bytes: only {available} bytes of memory are available; lend less, or stop something else"
    )]
    NoMemory {
        /// What was asked for.
        asked: u64,
        /// What there is.
        available: u64,
    },
    /// It could not be found out how much memory there is.
    #[error("cannot tell how much memory is available: {0}")]
    Unknown(#[source] std::io::Error),
    /// There is no memory for what it knows of hosts.
    #[error("no memory to note the epochs of hosts in: {0}")]
    Epochs(#[source] std::io::Error),
    /// The fabric could not listen.
    #[error("cannot listen: {0}")]
    Listen(#[source] TargetError),
    /// The memory could not be lent.
    #[error(transparent)]
    Donate(#[from] NodeMemoryError),
    /// Its memory cannot be kept.
    #[error("the keeper at {path} does not keep this node's memory: {source}. Start it first (aquifer keeper), or do without --grace", path = path.display())]
    Keeper {
        /// Where it should be.
        path: PathBuf,
        /// What it, or the system, said.
        source: std::io::Error,
    },
    /// There is no thread for it.
    #[error("cannot start a thread that looks after the memory: {0}")]
    Caretaker(#[source] std::io::Error),
    /// It was to lend more or less at run time.
    #[error(
        "over {fabric} memory is pinned for good: a node lends what it lends, and neither more nor less at run time"
    )]
    Pinned {
        /// Over which fabric.
        fabric: &'static str,
    },
    /// Its figures cannot be served.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// The directory failed while the node joined.
    #[error("cannot join the cluster: {0}")]
    Directory(#[from] DirectoryError),
    /// Another node has this number.
    #[error("node {id} exists already, at {address}: give this one another number")]
    IdTaken {
        /// The number.
        id: u16,
        /// Where the other is.
        address: String,
    },
    /// Others changed the node's record all the time.
    #[error(
        "cannot join the cluster as node {id}: its record was changed by others {attempts} times meanwhile"
    )]
    Contended {
        /// The number.
        id: u16,
        /// How often.
        attempts: u32,
    },
}
