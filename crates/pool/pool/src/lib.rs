//! The pool: hosts allocate and free the memory of nodes by one-sided operations.
//!
//! `docs/formats/pool.md` describes the format and the protocol, step by step.
//!
//! - [`word`]: pure functions on the two kinds of control words, each with its inline log.
//! - [`layout`]: the offsets of all parts of a node's region, and its header.
//! - [`op`]: the state machines that allocate and free extents. They do no I/O; the simulator and
//!   [`PoolClient`] drive the same ones.
//! - [`cache`]: the control words of a node as a client last found them.
//! - [`client`]: the edge, which runs the state machines over fabric endpoints.
//! - [`figures`]: what a node lends and recalls, as hosts read it.
//! - `leaks`: leak detection over all clients of a host.
//! - `node_memory`: the node's side, which creates the region and opens it to hosts.
//!
//! The use of extents, and the process that serves the node's memory, are unknown to this crate.

#![forbid(unsafe_code)]

pub mod cache;
pub mod client;
mod error;
pub mod figures;
#[cfg(test)]
mod golden_tests;
pub mod layout;
mod leaks;
pub mod mutation;
mod node_memory;
pub mod op;
mod shared_endpoint;
pub mod size;
pub mod word;

pub use client::{AnswerTimeout, Clock, Extent, NodeId, POOL_WORK_ID, PoolClient, Stretch, recover_node};
pub use error::{FormatError, PoolError};
pub use figures::{FigureTable, NodeFigures, RecalledMemory};
pub use layout::{Layout, NodeClass};
pub use leaks::{LeakDetector, Ledger, OperationGuard, ScanProgress};
pub use node_memory::{CreateStore, NodeMemory, NodeMemoryError};
pub use size::SizeClass;
