//! Block volumes: a linear space of bytes whose pages lie in the host's mempool or on memory nodes, and front ends to it.
//!
//! - [`volume`]: reads, writes, discards; any number of threads at once. It knows no front end.
//! - [`pump`]: the one thread that writes to the memory nodes.
//! - [`mover`]: empties sparse slabs into others.
//! - [`figures`]: what happened.
//! - [`fuse`]: the first front end, a file for a loop device.
//!
//! A volume is scratch: it ends with the process that serves it.

mod error;
pub mod fuse;
pub mod mover;
mod page_parts;
pub mod pump;
pub mod stats;
pub mod volume;

pub use error::BlockError;
pub use mover::Mover;
pub use pump::{Pump, PumpThread};
pub use stats::VolumeStats;
pub use volume::{BlockVolume, VolumeReader};
