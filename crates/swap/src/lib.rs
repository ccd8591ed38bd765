//! Kernel swap for the programs of one cgroup.
//!
//! - [`serve`](server::serve): the server of a swap device whose pages are in the pool.
//! - [`setup`]: the changes to the machine that this takes, and their undoing. The benches set up other swap areas with it.
//! - [`ending`]: processes that are about to end.

mod agent;
pub mod ending;
mod protect;
pub mod server;
pub mod setup;

pub use server::{SwapOptions, serve};
