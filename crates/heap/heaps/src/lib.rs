//! The daemon that serves heaps of objects, beside a memory node.
//!
//! The daemon is a separate process that maps heaps only. So a fault in its parser of programs'
//! messages exposes no other memory of the machine. A keeper holds the heaps when the process ends,
//! and the next process continues with them.

#![forbid(unsafe_code)]

mod absent_hosts;
mod kept;
pub mod membership;
mod metrics;
mod node_spans;
mod serve;
mod shared;

pub use serve::{DeviceOptions, HeapsError, HeapsListen, HeapsOptions, LEASE_TTL, serve};
