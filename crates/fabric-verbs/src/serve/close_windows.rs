//! Windows are closed that others have open: because pages are put under other addresses and the device does not notice by
//! itself, or because the key was struck out. Nobody may look before the device has ended the binds that were under way.

use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::VerbsServer;
use crate::remap::{LentRegion, RemapRequest};
use crate::session::VerbsSession;
use crate::target::VerbsShared;

/// A device tells the end of a bind within this time.
const BINDS_TIME: Duration = Duration::from_secs(5);

impl VerbsServer {
    /// Close all windows of a region, move its pages, and let windows be bound again. Who reads or writes meanwhile is refused by the device, request for
    /// the key once more, and repeats what was refused.
    pub(super) fn remap(&mut self, shared: &VerbsShared, order: &RemapRequest) -> io::Result<()> {
        self.is_paused = true;
        self.close_windows(shared, order.region);
        let outcome = match shared.lock().regions.get_mut(order.region) {
            Some(LentRegion::Remappable(remappable)) => remappable.remap_closed(order),
            _ => Err(io::ErrorKind::NotFound.into()),
        };
        self.is_paused = false;
        let names: Vec<usize> = self.sessions.keys().copied().collect();
        names.into_iter().for_each(|name| self.post_queued(shared, name));
        outcome
    }

    fn close_windows(&mut self, shared: &VerbsShared, region: usize) {
        self.sessions.values_mut().for_each(|session| session.close_windows(region));
        self.await_binds(shared, |session| session.is_binding(region));
    }

    /// Close what was opened in that range by keys of a table, and wait for what the device is still to open.
    pub(super) fn expel(&mut self, shared: &VerbsShared, range: &Range<u64>) {
        self.sessions.values_mut().for_each(|session| session.expel(range));
        self.await_binds(shared, |session| session.is_binding_in(range));
    }

    fn await_binds(&mut self, shared: &VerbsShared, is_binding: impl Fn(&VerbsSession) -> bool) {
        let deadline = Instant::now() + BINDS_TIME;
        loop {
            let binding = self.sessions.iter().filter(|(_, session)| is_binding(session));
            let names: Vec<usize> = binding.map(|(name, _)| *name).collect();
            if names.is_empty() {
                return;
            }
            if Instant::now() >= deadline {
                tracing::warn!("a device does not end its binds; their endpoints are closed");
                names.into_iter().for_each(|name| self.close(name));
                return;
            }
            self.handle_completions(shared);
            std::thread::yield_now();
        }
    }
}
