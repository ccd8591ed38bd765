//! Shared parts of the tests of several crates.
//!
//! - [`etcd`]: a real etcd of one or more members, which can be killed and restarted.
//! - [`eventually`]: waits for a condition.
//! - [`mod@golden`]: golden files, which fix the bytes of a format.
//! - [`openmetrics`]: fetches the metrics of a daemon, and reads them strictly.
//! - [`relay`]: a TCP relay that delays, stops and cuts connections.

#![forbid(unsafe_code)]

pub mod etcd;
pub mod eventually;
pub mod golden;
pub mod openmetrics;
pub mod relay;

pub use etcd::{EtcdCluster, EtcdOptions, EtcdServer};
pub use golden::Golden;
pub use relay::TcpRelay;

/// Reports to `scripts/test.sh` why this test cannot run on this machine.
///
/// The test must return afterwards.
///
/// The summary of a test run names such tests, and CI fails.
pub fn skip(reason: &str) {
    println!("\nskipped: {reason}");
}
