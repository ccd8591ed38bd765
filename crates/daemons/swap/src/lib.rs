//! Kernel swap for the programs of one cgroup.
//!
//! - [`serve`]: the server of a swap device whose pages are in the pool.
//! - [`setup`]: changes to the machine that swap devices need, and how they are undone. The benches
//!   set up other swap areas with it.

mod agent_watch;
mod protect;
mod server;
pub mod setup;

pub use server::{DirectoryConnectError, SwapDeviceOptions, serve};
