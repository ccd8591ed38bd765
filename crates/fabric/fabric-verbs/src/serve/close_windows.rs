//! Closes windows of initiators when keys are revoked, or when pages change under a device without
//! on-demand paging. The windows are closed only when all binds in flight have ended.

use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::VerbsServer;
use crate::remap::{LentRegion, RemapRequest};
use crate::session::VerbsSession;
use crate::target::VerbsShared;

/// Longest time of a bind at the device.
const BIND_TIMEOUT: Duration = Duration::from_secs(5);

impl VerbsServer {
    /// Closes all windows of a region, changes its pages, and permits binds again. An initiator
    /// whose access is refused meanwhile requests the key again and repeats the access.
    pub(super) fn remap(&mut self, shared: &VerbsShared, order: &RemapRequest) -> io::Result<()> {
        self.is_paused = true;
        self.close_windows(shared, order.region);
        let outcome = match shared.lock().regions.get_mut(&order.region) {
            Some(LentRegion::Remappable(remappable)) => remappable.remap_closed(order),
            _ => Err(io::ErrorKind::NotFound.into()),
        };
        self.is_paused = false;
        let connection_ids: Vec<usize> = self.sessions.keys().copied().collect();
        connection_ids.into_iter().for_each(|connection_id| self.post_queued(shared, connection_id));
        outcome
    }

    fn close_windows(&mut self, shared: &VerbsShared, region: usize) {
        self.sessions.values_mut().for_each(|session| session.close_windows(region));
        self.await_binds(shared, |session| session.is_binding(region));
    }

    /// Closes the windows of key-table keys in a range, and waits for binds in flight.
    pub(super) fn expel(&mut self, shared: &VerbsShared, range: &Range<u64>) {
        self.sessions.values_mut().for_each(|session| session.expel(range));
        self.await_binds(shared, |session| session.is_binding_in(range));
    }

    fn await_binds(&mut self, shared: &VerbsShared, is_binding: impl Fn(&VerbsSession) -> bool) {
        let deadline = Instant::now() + BIND_TIMEOUT;
        loop {
            let binding = self.sessions.iter().filter(|(_, session)| is_binding(session));
            let connection_ids: Vec<usize> = binding.map(|(connection_id, _)| *connection_id).collect();
            if connection_ids.is_empty() {
                return;
            }
            if Instant::now() >= deadline {
                tracing::warn!("the device did not complete binds in time; closing their connections");
                connection_ids.into_iter().for_each(|connection_id| self.close(connection_id));
                return;
            }
            self.handle_completions(shared);
            std::thread::yield_now();
        }
    }
}
