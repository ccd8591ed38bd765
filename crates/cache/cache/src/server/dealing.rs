//! The handle of a worker, through which other threads hand it connections.

use std::collections::BTreeMap;
use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use rustix::event::EventfdFlags;

use super::acceptor::Accepted;
use super::connection::ConnectionReport;
use super::peers::PeerSocket;

/// Connections that other threads hand to a worker.
#[derive(Debug, Default)]
pub struct NewConnections {
    /// Connections of clients.
    pub clients: Vec<Accepted>,
    /// Connections of other servers.
    pub peers: Vec<PeerSocket>,
    /// Links to other servers, by number; `None` for a server that cannot be reached.
    pub links: Vec<(u16, Option<PeerSocket>)>,
}

/// The part of a worker that other threads use.
#[derive(Debug)]
pub struct WorkerHandle {
    waker: OwnedFd,
    new_connections: Mutex<NewConnections>,
    reports: Mutex<BTreeMap<RawFd, Arc<ConnectionReport>>>,
}

impl WorkerHandle {
    /// A handle for a worker that has not started.
    ///
    /// # Errors
    /// If the system has no descriptor for it.
    pub fn new() -> io::Result<Self> {
        let waker = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { waker, new_connections: Mutex::default(), reports: Mutex::default() })
    }

    /// Wakes the worker, which retries requests that wait for partitions.
    pub fn wake(&self) {
        // The counter can only overflow if the worker has ended.
        let _ = rustix::io::write(&self.waker, &1u64.to_ne_bytes());
    }

    /// Hands a connection of a client to the worker.
    pub fn deal(&self, accepted: Accepted) {
        self.new_connections.lock().clients.push(accepted);
        self.wake();
    }

    /// Hands a connection of another server to the worker.
    pub fn deal_peer(&self, socket: PeerSocket) {
        self.new_connections.lock().peers.push(socket);
        self.wake();
    }

    /// Hands a connection to a server to the worker, or reports that it cannot be reached.
    pub fn deal_link(&self, server: u16, socket: Option<PeerSocket>) {
        self.new_connections.lock().links.push((server, socket));
        self.wake();
    }

    /// The descriptor that becomes readable to wake the worker.
    pub fn waker(&self) -> BorrowedFd<'_> {
        self.waker.as_fd()
    }

    /// Takes the connections that were handed to the worker since the previous call.
    pub fn drain_connections(&self) -> NewConnections {
        let mut count = [0; 8];
        // Only the worker reads the counter. A failure means that the count is 0.
        let _ = rustix::io::read(&self.waker, &mut count);
        mem::take(&mut *self.new_connections.lock())
    }

    /// The reports of the worker's connections, by descriptor.
    pub fn reports(&self) -> MutexGuard<'_, BTreeMap<RawFd, Arc<ConnectionReport>>> {
        self.reports.lock()
    }
}
