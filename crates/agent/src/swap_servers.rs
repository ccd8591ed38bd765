//! Connections of the servers of swap devices on this host.
//!
//! [`aquifer_host::cluster_access`] says what they get from the agent.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aquifer_channel::send_frame;
use aquifer_channel::socket::wait_readable;
use aquifer_host::cluster_access::ClusterAccess;
use aquifer_ipc::Frame;

/// Most servers at once.
const SWAP_SERVERS_MAX: usize = 1024;
/// When the agent stops, it waits this long for the servers to free their memory and end.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// The connections of the servers of swap devices.
#[derive(Debug, Default)]
pub(crate) struct SwapServers {
    sockets: Mutex<Vec<Arc<OwnedFd>>>,
}

impl SwapServers {
    /// Answers a server's request, and returns when the server has closed the connection.
    pub(crate) fn serve(&self, socket: OwnedFd, access: &ClusterAccess) {
        let socket = Arc::new(socket);
        let answer = self.admit(&socket, access);
        if let Err(error) = send_frame(&*socket, &answer, &[]) {
            tracing::debug!(%error, "a swap server closed its connection before the answer");
        }
        // The server sends nothing else, so the socket is readable only when it is closed.
        while matches!(answer, Frame::ClusterAccess(_))
            && !wait_readable(&[&*socket], END_TIMEOUT).unwrap_or(true)
        {}
        self.lock().retain(|other| !Arc::ptr_eq(other, &socket));
    }

    fn admit(&self, socket: &Arc<OwnedFd>, access: &ClusterAccess) -> Frame {
        let mut sockets = self.lock();
        if sockets.len() >= SWAP_SERVERS_MAX {
            return Frame::Refused(format!(
                "this agent already serves {SWAP_SERVERS_MAX} swap devices: end some runs first"
            ));
        }
        sockets.push(Arc::clone(socket));
        Frame::ClusterAccess(serde_json::to_string(access).expect("numbers and texts can be written"))
    }

    /// Notifies all servers that the agent stops, and waits until they have ended.
    pub(crate) fn end(&self, reason: &str) {
        let sockets = self.lock().clone();
        for socket in &sockets {
            // Fails if the server has ended, which is what is wanted.
            let _ = send_frame(&**socket, &Frame::Ended(reason.to_owned()), &[]);
        }
        let deadline = Instant::now() + END_TIMEOUT;
        for socket in sockets {
            let remaining = deadline.saturating_duration_since(Instant::now());
            if !wait_readable(&[&*socket], remaining).unwrap_or(true) {
                tracing::error!(timeout = ?END_TIMEOUT, "a swap server has not ended in time");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<OwnedFd>>> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
