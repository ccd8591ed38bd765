//! Differential tests: the same protocol streams are sent to Debian's memcached and to
//! `aquifer cache`, and the replies are compared.
//!
//! - [`server`]: starts and stops both programs.
//! - [`cluster`]: starts a cluster of servers.
//! - [`connection`]: a connection that sends a batch and reads until the end of its replies.
//! - [`script`]: batches of requests on one or more connections.
//! - [`stream`]: generates scripts from a seed.
//! - [`reply`]: splits a server's bytes into replies.
//! - [`normalise`]: replaces the parts of replies that may differ: cas values, times, the version.
//! - [`compare`](mod@compare): runs a script on two servers, and shrinks it to a difference.
//! - [`stats`]: the names and types of statistics.
//! - [`random`], [`escape`]: random numbers, and conversion of bytes to text.
//!
//! `AQUIFER_CACHE_SEEDS=17` or `AQUIFER_CACHE_SEEDS=0..5000` replaces the seeds of each stream.
//! A seed always generates the same script.

#![forbid(unsafe_code)]

pub mod cluster;
pub mod compare;
pub mod connection;
pub mod escape;
pub mod normalise;
pub mod random;
pub mod reply;
pub mod script;
pub mod server;
pub mod stats;
pub mod stream;

pub use compare::{Pair, assert_equal};
pub use connection::{Answer, Connection, End};
pub use random::Random;
pub use script::{Batch, Cuts, Piece, Request, Script};
pub use server::{Options, Program, Server};
pub use stream::Stream;
