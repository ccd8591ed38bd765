//! The host agent: the one trusted daemon of a machine that borrows memory. It only puts services together.
//!
//! - [`serve`](agent::serve): listens for programs and `aquifer run`, and keeps the agent's place in the directory.
//! - [`keeper`]: the small process that holds what must outlive the agent.
//! - [`lent`]: what other processes of this host need to reach the nodes as the host does.
//! - [`nodes`]: which memory nodes there are and how to reach them.
//! - [`report`]: what people and scripts get to read.

pub mod agent;
pub mod client;
pub mod keeper;
pub mod lent;
pub mod membership;
pub mod nodes;
pub mod report;
mod socket;

pub use agent::{AgentError, AgentOptions, serve};
pub use membership::MembershipError;
pub use report::{AgentStatus, RunStatistics};
