//! What the seeded simulators share: playing schedules, reporting a failing seed, and the recorded seeds at which mutations show.
//!
//! Each protocol's simulator is a module of this crate's test program. A *schedule* is one simulated history; its seed determines it.
//! `AQUIFER_SEED=n` plays schedule `n` alone.

mod corpus;
mod play;
mod simulator;

pub use play::{SEED_VARIABLE, asked_seed};
pub use simulator::{SCHEDULES_VARIABLE, Simulator};
