//! Connections whose ends are authenticated. Both ends prove by a Noise handshake that they hold
//! the same secret, and get fresh keys for the connection. With encryption, all later bytes are
//! encrypted by these keys.
//!
//! The secret is the [`ClusterKey`], or is derived from it.
//! `docs/formats/fabric-tcp.md` has the bytes.

#![forbid(unsafe_code)]

mod channel;
mod cipher;
mod cluster_key;
mod mutation;

pub use channel::{MAGIC, Presented, SecureChannel, SecureError, VERSION, initiate, respond};
pub use cipher::RecordCipher;
pub use cluster_key::ClusterKey;
pub use mutation::Mutation;
