//! What tests of several crates share.
//!
//! - [`etcd`]: a real etcd of one or more members, that can be killed and started again.
//! - [`golden`]: golden files, which fix the bytes of a format.
//! - [`openmetrics`]: what a daemon counts, fetched and read as strictly as the format is defined.
//! - [`relay`]: a relay in user space that delays, stops and cuts what goes through it.

#![forbid(unsafe_code)]

pub mod etcd;
pub mod golden;
pub mod openmetrics;
pub mod relay;

pub use etcd::{Etcd, Member};
pub use golden::Golden;
pub use relay::Relay;

/// Tells `scripts/test.sh` that this test cannot run on this machine, and why. Return from the test afterwards.
///
/// Such tests are named in the summary, and fail in CI.
pub fn skip(reason: &str) {
    println!("\nskipped: {reason}");
}
