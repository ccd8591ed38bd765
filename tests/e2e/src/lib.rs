//! What the end-to-end tests share: clusters of the built program in folders of their own,
//! unmodified programs run plainly and on the pool, and a sampler that looks at their memory from
//! outside.
//!
//! - [`build`]: the program under test and the C programs.
//! - [`cluster`]: `aquifer up` … `down`.
//! - [`run`]: a program plainly, and by `aquifer run`.
//! - [`compare`]: both, with equal output.
//! - [`steps`]: whether a program stays within its limit.
//! - [`sampler`], [`processes`]: `/proc`.
//! - [`agent`]: the agent's socket, for what only a hostile program would send.
//! - [`house`]: a cluster for all users.
//! - [`checked`]: a session that knows what its extents hold.
//! - [`postgres`]: a PostgreSQL on the pool.
//! - [`redis`]: a redis-server, plainly and on the pool.
//! - [`network`]: machines in network namespaces.
//! - [`restart`]: agents that die under programs.
//! - [`swap`]: what `aquifer run --swap` has made on this machine.
//! - [`eventually`]: waiting for a condition.
//!
//! Two tests run side by side, each with a cluster of its own (`.config/nextest.toml`).

#![forbid(unsafe_code)]

pub mod agent;
pub mod build;
pub mod checked;
pub mod cluster;
pub mod compare;
pub mod eventually;
pub mod house;
pub mod network;
pub mod postgres;
pub mod processes;
pub mod redis;
pub mod restart;
pub mod run;
pub mod sampler;
pub mod steps;
pub mod swap;

pub use cluster::Cluster;
pub use compare::{Case, compare};
pub use eventually::eventually;
pub use house::House;
