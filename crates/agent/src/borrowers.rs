//! Servers of blocks on this host, as the agent attends to them. What they are lent is [`aquifer_host::lent`].

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use aquifer_channel::send_frame;
use aquifer_channel::socket::wait_readable;
use aquifer_host::lent::Lent;
use aquifer_ipc::Frame;

/// Borrowers at once.
const BORROWERS_MAX: usize = 1024;
/// When the agent stops, borrowers have so long to end and give everything back.
const END_PATIENCE: Duration = Duration::from_secs(10);

/// The connections of those who have borrowed.
#[derive(Debug, Default)]
pub(crate) struct Borrowers {
    sockets: Mutex<Vec<Arc<OwnedFd>>>,
}

impl Borrowers {
    /// Lend to who asks at `socket`, and stay until it has gone.
    pub(crate) fn attend(&self, socket: OwnedFd, lent: &Lent) {
        let socket = Arc::new(socket);
        let answer = self.take_in(&socket, lent);
        if let Err(error) = send_frame(&*socket, &answer, &[]) {
            tracing::debug!(%error, "a borrower did not wait for its answer");
        }
        // It has nothing more to say: whatever comes is its end.
        while matches!(answer, Frame::ClusterAccess(_))
            && !wait_readable(&[&*socket], END_PATIENCE).unwrap_or(true)
        {}
        self.lock().retain(|other| !Arc::ptr_eq(other, &socket));
    }

    fn take_in(&self, socket: &Arc<OwnedFd>, lent: &Lent) -> Frame {
        let mut sockets = self.lock();
        if sockets.len() >= BORROWERS_MAX {
            return Frame::Refused(format!("this agent already lends to {BORROWERS_MAX}: end some first"));
        }
        sockets.push(Arc::clone(socket));
        Frame::ClusterAccess(serde_json::to_string(lent).expect("numbers and texts can be written"))
    }

    /// Tell all that the agent stops, and wait until they have given everything back.
    pub(crate) fn end(&self, reason: &str) {
        let sockets = self.lock().clone();
        for socket in &sockets {
            // Who has gone already needs no telling.
            let _ = send_frame(&**socket, &Frame::Ended(reason.to_owned()), &[]);
        }
        let deadline = Instant::now() + END_PATIENCE;
        for socket in sockets {
            let left = deadline.saturating_duration_since(Instant::now());
            if !wait_readable(&[&*socket], left).unwrap_or(true) {
                tracing::error!("a server of blocks does not end");
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Arc<OwnedFd>>> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
