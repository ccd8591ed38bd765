//! Kernel swap for the programs of one cgroup.
//!
//! - [`serve`]: the server of a swap device whose pages are in the pool.
//! - [`setup`]: makes and undoes the changes to the machine that swap devices need. The benches use
//!   it for other swap areas.

mod agent_watch;
mod protect;
mod server;
pub mod setup;

pub use server::{DirectoryConnectError, SwapDeviceOptions, serve};
