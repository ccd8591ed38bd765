//! The memory node: the daemon that lends memory of its machine to the cluster.
//!
//! The node creates the memory, lays it out as a pool, opens it through the fabric, and puts its
//! record into the directory under a lease. After that, hosts allocate and free by one-sided
//! operations. The node only fences hosts whose leases have ended, clears memory between tenants,
//! and changes the amount of lent memory on request.
//!
//! Optionally a keeper holds the memory when the node's process ends, and the next process
//! continues with it.
//!
//! The node has no part in allocations of hosts. It allocates memory that it clears or takes
//! offline by the same operations as a host. This crate does not know the contents of extents.

#![forbid(unsafe_code)]

mod clearer;
mod disk_store;
mod error;
pub mod fences;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod fuzz_target;
mod heap_socket;
mod heap_spans;
mod host_epochs;
mod kept_memory;
mod lending;
mod maintenance;
mod membership;
mod memory;
mod metrics;
mod opened_memory;
mod recalled_spans;
pub mod recovered_hosts;
mod resizer;
mod self_client;
mod serve;
mod shutdown;

pub use error::NodeError;
pub use kept_memory::KeepOptions;
pub use serve::{LEASE_TTL, ListenAddress, NodeOptions, serve};
pub use shutdown::Shutdown;
