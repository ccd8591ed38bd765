//! Block volumes: a linear space of bytes whose pages are in the host's mempool or on memory nodes,
//! and front ends to it.
//!
//! - `volume`: reads, writes and discards by any number of threads, for any front end.
//! - `pump`: the only thread that writes to the memory nodes.
//! - `mover`: moves pages out of slabs that are being vacated.
//! - `stats`: statistics of a volume.
//! - [`fuse`]: a front end, which serves a file for a loop device.
//!
//! A volume is scratch: it ends with the process that serves it.

#![forbid(unsafe_code)]

mod error;
pub mod fuse;
mod mover;
mod page_parts;
mod pump;
mod stats;
mod volume;

pub use error::BlockError;
pub use mover::Mover;
pub use pump::{Pump, PumpThread};
pub use stats::VolumeStats;
pub use volume::{BlockVolume, VOLUME_BYTES_MAX, VolumeReader};
