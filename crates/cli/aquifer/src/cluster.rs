//! Cluster on one machine: each daemon is a process of this binary that holds a lock while it runs.
//!
//! `aquifer up` finds the daemons that do not run, and starts them. The last one is a supervisor,
//! which restarts daemons that die.

mod config;
pub(crate) mod daemon;
mod down;
mod drain;
#[cfg(test)]
mod golden_tests;
mod heap;
pub mod key;
mod launch;
mod lend;
mod limit;
pub mod location;
mod lock;
mod running;
mod segment;
mod serve;
pub mod signals;
mod status;
mod stop;
mod successor;
mod supervisor;
pub mod systemd;
mod up;

pub use down::down;
pub use drain::drain;
pub use heap::heap;
pub use lend::lend;
pub use limit::limit;
pub use location::DirectoryLocation;
pub use segment::segment;
pub use serve::{gateway, serve};
pub use status::status;
pub use up::up;
