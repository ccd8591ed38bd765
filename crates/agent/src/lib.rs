//! The host agent: the one trusted daemon of a machine that borrows memory. It only puts services together.
//!
//! - [`serve`](agent::serve): listens for programs and `aquifer run`, and keeps the agent's place in the directory.
//! - [`shadow`]: shares the agent's open files, so that none closes before the keeper has it.
//! - [`lent`]: what servers of blocks on this host have from the agent.
//! - [`nodes`]: which memory nodes there are and how to reach them.
//! - [`recovery`]: gives back what dead hosts held; [`audit`], what this one has without knowing.
//! - [`report`]: what people and scripts get to read; `metrics` what Prometheus does.

pub mod agent;
pub mod audit;
pub mod client;
#[cfg(test)]
mod golden_tests;
pub mod lent;
pub mod membership;
mod metrics;
pub mod nodes;
mod place;
pub mod recovery;
pub mod report;
pub mod shadow;
mod talk;

pub use agent::{AgentError, AgentOptions, serve};
pub use membership::MembershipError;
pub use report::{AgentStatus, RunStatistics};
