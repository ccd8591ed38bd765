//! Connections with other servers of the cluster.
//!
//! - [`frame`]: the bytes. [`links`]: frames that a worker sends, and their answers.
//! - [`serving`]: frames of others that a worker serves.
//! - [`waiting`]: the state of a client's connection whose request is elsewhere. [`parts`]: a
//!   request that was divided. [`wait_policy`]: when a request ends that waits.
//! - [`peer_clock`]: until when another server may serve a frame.

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

/// A connection with another server that has proven itself.
#[derive(Debug)]
pub struct PeerSocket {
    /// The socket, non-blocking.
    pub socket: OwnedFd,
    /// How what follows is encrypted, if it is.
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
    /// Begins to connect with a server. The outcome is given to the worker by
    /// [`WorkerHandle::deal_link`].
    fn connect(&self, server: u16, worker: Arc<WorkerHandle>);

    /// Whether this server may serve its partitions: its lease lasts.
    fn may_serve(&self) -> bool {
        true
    }
}

/// A server on its own connects with no other.
#[derive(Debug)]
pub struct NoConnector;

impl Connector for NoConnector {
    fn connect(&self, server: u16, worker: Arc<WorkerHandle>) {
        worker.deal_link(server, None);
    }
}
