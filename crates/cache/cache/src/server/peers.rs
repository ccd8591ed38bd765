//! Connections with other servers of the cluster.
//!
//! - [`frame`]: the encoding. [`links`]: frames that a worker sends, and their answers.
//! - [`serving`]: frames of other servers that a worker serves.
//! - [`waiting`]: the state of a client's connection whose request is forwarded or parked.
//!   [`parts`]: a request that was divided. [`wait_policy`]: the end of a request that waits.
//! - [`peer_clock`]: the time until which another server may serve a frame.

pub mod frame;
pub mod links;
pub mod parts;
pub mod peer_clock;
pub mod serving;
pub mod wait_policy;
pub mod waiting;

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use aquifer_secure_channel::RecordCipher;

use super::dealing::WorkerHandle;
use super::stream::{PeerCipher, Security, Stream};

/// A connection with another server that has authenticated itself.
#[derive(Debug)]
pub struct PeerSocket {
    /// The socket, non-blocking.
    pub socket: OwnedFd,
    /// The cipher of all further bytes, if they are encrypted.
    pub cipher: Option<RecordCipher>,
}

impl PeerSocket {
    fn into_stream(self) -> Stream {
        let security = match self.cipher {
            Some(cipher) => Security::Peer(Box::new(PeerCipher::new(cipher))),
            None => Security::Plain,
        };
        Stream::new(self.socket, security)
    }
}

/// Connects workers with other servers.
pub trait Connector: fmt::Debug + Send + Sync {
    /// Begins to connect with a server. The worker receives the result by
    /// [`WorkerHandle::deal_link`].
    fn connect(&self, server: u16, worker: Arc<WorkerHandle>);

    /// Whether this server may serve its partitions, because its lease is valid.
    fn may_serve(&self) -> bool {
        true
    }
}

/// The connector of a stand-alone server, which has no others.
#[derive(Debug)]
pub struct NoConnector;

impl Connector for NoConnector {
    fn connect(&self, server: u16, worker: Arc<WorkerHandle>) {
        worker.deal_link(server, None);
    }
}
