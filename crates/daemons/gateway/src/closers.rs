//! Closers: processes that only close connections whose queues may have descriptors of users.

use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use aquifer_channel::socket::wait_readable;
use rustix::net::{Shutdown, shutdown};
use rustix::process::{Pid, PidfdFlags, Resource, getrlimit, pidfd_open};

use crate::child;

/// A second closer is started when twice this number of connections wait. Each further running
/// closer doubles the number.
const REFUSED_MIN: usize = 64;
/// Maximum number of waiting connections, whatever the number of closers.
const REFUSED_MAX: usize = 1024;
/// Waiting connections have at most 1/`REFUSED_DIVISOR` of the descriptors of the process.
const REFUSED_DIVISOR: u64 = 4;

/// Connections that a process with one thread has refused. The process never does the last close
/// of a connection: no signal ends the wait of a userfaultfd in the queue whose memory is locked.
#[derive(Debug, Default)]
pub struct RefusedConnections {
    /// Connections that are shut down, for the next closer.
    waiting: Vec<OwnedFd>,
    /// The pidfds of the closers.
    closers: Vec<OwnedFd>,
}

impl RefusedConnections {
    /// Refuses a connection.
    pub fn add(&mut self, socket: OwnedFd) {
        let _was_closed = shutdown(&socket, Shutdown::Both);
        self.waiting.push(socket);
    }

    /// Whether no connection waits, and no closer is running.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.closers.is_empty()
    }

    /// Starts a closer, if none is running or if many connections wait.
    ///
    /// Must be called in a process with one thread.
    ///
    /// # Errors
    /// If the process cannot be started; then the connections stay.
    pub fn close(&mut self) -> io::Result<()> {
        self.closers.retain(|closer| !wait_readable(&[closer], Duration::ZERO).unwrap_or(false));
        let wanted = match self.closers.len() {
            0 => 1,
            running => (REFUSED_MIN << running.min(8)).min(refused_max()),
        };
        if self.waiting.len() < wanted {
            return Ok(());
        }
        let closer = start_closer(&mut self.waiting)?;
        // A closer that has been reaped has ended.
        self.closers.extend(pidfd_open(closer, PidfdFlags::empty()));
        Ok(())
    }
}

/// The maximum number of connections that wait for another closer.
fn refused_max() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit / REFUSED_DIVISOR).unwrap_or(usize::MAX).min(REFUSED_MAX)
}

/// Starts a process that closes connections, where each close may wait as long as the user wants.
/// This process never does the last close of one.
fn start_closer(connections: &mut Vec<OwnedFd>) -> io::Result<Pid> {
    let (closed, open) = io::pipe()?;
    let sockets = connections.iter().map(AsRawFd::as_raw_fd);
    let kept: Vec<_> = sockets.chain([closed.as_raw_fd()]).collect();
    let process = child::start(&kept, || {
        // The end of the process closes the connections. Waits until the parent has closed them.
        let _end_of_file = (&closed).read_exact(&mut [0]);
    })?;
    connections.clear();
    drop(open);
    Ok(process)
}
