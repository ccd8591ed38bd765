//! Support for the end-to-end tests: clusters, programs that run plainly and on the pool, and a
//! sampler of their memory.
//!
//! - [`build`]: builds of Aquifer and of the C programs.
//! - [`cluster`]: clusters from `aquifer up` to `aquifer down`.
//! - [`run`]: programs, plainly and by `aquifer run`.
//! - [`compare()`]: comparison of both outputs.
//! - [`steps`]: tests that a program stays within its limit.
//! - [`sampler`], [`processes`]: `/proc`.
//! - [`agent`]: direct connections to the agent's socket.
//! - [`shared_cluster`]: a cluster that serves all users.
//! - [`checked`]: a session that checks its extents.
//! - [`postgres`]: a PostgreSQL on the pool.
//! - [`redis`]: a redis-server, plainly and on the pool.
//! - [`network`]: hosts in network namespaces.
//! - [`restart`]: restarts of agents and nodes under programs.
//! - [`swap`]: swap devices of `aquifer run --swap` on this machine.
//! - [`eventually()`]: waits for a condition.
//!
//! Two tests run side by side, each with a cluster of its own (`.config/nextest.toml`).

#![forbid(unsafe_code)]

pub mod agent;
pub mod build;
pub mod checked;
pub mod cluster;
pub mod compare;
pub mod network;
pub mod only_run;
pub mod postgres;
pub mod processes;
pub mod redis;
pub mod restart;
pub mod run;
pub mod sampler;
pub mod shared_cluster;
pub mod steps;
pub mod swap;

pub use aquifer_tests_support::eventually::{self, eventually};
pub use cluster::Cluster;
pub use compare::{Case, compare};
pub use shared_cluster::SharedCluster;
