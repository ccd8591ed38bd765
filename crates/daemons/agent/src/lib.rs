//! The host agent: the trusted daemon of a machine that borrows memory. This crate only connects
//! services with each other.
//!
//! - [`serve`]: the daemon. It joins the cluster and listens for programs and for `aquifer run`.
//! - [`shadow`]: a process that keeps userfaultfds open until the keeper has them.
//! - `host_state`: the state of the host itself, which the keeper holds across restarts of the
//!   agent.
//! - `listeners`: the sockets at which users connect, and the gateway that accepts there.
//! - `memory_governor`: lends idle memory to the page cache and to elastic runs, and takes it back.
//! - `connections`: connections of programs and of the command line.
//! - `swap_servers`: connections of the servers of swap devices.
//! - `report`: statistics as JSON; `metrics`: statistics for Prometheus.

mod connections;
mod daemon;
mod heap_tickets;
mod host_state;
mod listeners;
mod memory_governor;
mod metrics;
mod node_watch;
mod recalled_runs;
mod report;
pub mod shadow;
mod swap_servers;

pub use aquifer_faults::serve::can_serve_programs;
pub use aquifer_pager::{Backup, CacheShares};
pub use daemon::{AgentError, AgentOptions, SegmentSettings, serve};
pub use listeners::GATEWAY_COMMAND;
pub use memory_governor::default_keep_free;
