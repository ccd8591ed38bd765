//! The shared part of the seeded simulators: playing schedules, reporting a failing seed, and the
//! recorded seeds that notice each mutation.
//!
//! Each protocol's simulator is a module of this crate's test program. A *schedule* is one
//! simulated history, which its seed determines. `AQUIFER_SEED=n` plays schedule `n` only.

#![forbid(unsafe_code)]

mod corpus;
mod play;
mod simulator;

pub use play::{SEED_VARIABLE, asked_seed};
pub use simulator::{SCHEDULES_VARIABLE, Simulator};
