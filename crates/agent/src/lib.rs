//! The host agent: the one trusted daemon of a machine that borrows memory. It only puts services together.
//!
//! - [`serve`](agent::serve): listens for programs and `aquifer run`, and keeps the agent's place in the directory.
//! - [`shadow`]: shares the agent's open files, so that none closes before the keeper has it.
//! - `borrowers`: the servers of blocks on this host.
//! - `report`: what people and scripts get to read; `metrics` what Prometheus does.

pub mod agent;
mod borrowers;
mod metrics;
mod place;
mod report;
pub mod shadow;
mod talk;

pub use agent::{AgentError, AgentOptions, serve};
