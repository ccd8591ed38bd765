//! Shared parts of the tests of several crates.
//!
//! - [`etcd`]: a real etcd of one or more members, which can be killed and restarted.
//! - [`eventually`]: waits for a condition.
//! - [`mod@golden`]: golden files, which fix the bytes of a format.
//! - [`openmetrics`]: fetches the metrics of a daemon, and reads them strictly.
//! - [`relay`]: a TCP relay that delays, stops and cuts connections.
//! - [`socket_owner`]: the process that has a connection.

#![forbid(unsafe_code)]

pub mod etcd;
pub mod eventually;
pub mod golden;
pub mod openmetrics;
pub mod relay;
pub mod socket_owner;

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

use tempfile::TempDir;

pub use etcd::{EtcdCluster, EtcdOptions, EtcdServer};
pub use golden::Golden;
pub use relay::TcpRelay;

/// A new state folder of a cluster, which other users can enter and not list.
///
/// `aquifer` creates root's folder so, because programs that change their user must still reach
/// their agent.
///
/// # Panics
/// If it cannot be created.
#[must_use]
pub fn state_folder() -> TempDir {
    let mut builder = tempfile::Builder::new();
    let folder = builder.prefix("aquifer-e2e-").permissions(Permissions::from_mode(0o711)).tempdir();
    folder.expect("a temporary folder can be made")
}

/// Reports to `scripts/test.sh` why this test cannot run on this machine.
///
/// The test must return afterwards.
///
/// The summary of a test run names such tests, and CI fails.
pub fn skip(reason: &str) {
    println!("\nskipped: {reason}");
}
