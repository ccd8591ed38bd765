//! The processes of this host, by their names.

use std::time::Duration;

use aquifer_arena::calls::Tenure;

use super::error::PROCESS_NAME_MAX;
use super::programs::ProcessIdentity;
use super::shared::Arrival;
use super::{SegmentError, SegmentHost, SegmentKey};
use aquifer_ownership::Holding;

impl SegmentHost {
    /// Opens a process of a tenant: from now on it accepts segments on this host.
    ///
    /// The name is unique in the tenant. Waits until a process of the name that has just ended is
    /// closed. `identity` is the process, if the agent can see it, and `held` are the segments that
    /// the process received from an earlier process of this agent. Returns the numbers of those
    /// segments that the process still owns, and of those whose hand-over is in progress.
    ///
    /// # Errors
    /// If the name is not valid, or another process has it.
    pub fn open_process(
        &self,
        tenant: u32,
        process: &str,
        identity: Option<ProcessIdentity>,
        held: &[(u64, Tenure)],
    ) -> Result<(Vec<u64>, Vec<u64>), SegmentError> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if process.is_empty() || process.len() > PROCESS_NAME_MAX || !process.bytes().all(is_plain) {
            return Err(SegmentError::Name(process.to_owned()));
        }
        let shared = &self.shared;
        shared.processes.await_close(tenant, process, identity);
        if shared.is_used_by_another(tenant, process, identity)
            || !shared.registry.add_process(tenant, process, shared.own, shared.lease)?
        {
            return Err(SegmentError::NameTaken(process.to_owned()));
        }
        if !shared.processes.add(tenant, process, identity) {
            return Err(SegmentError::NameTaken(process.to_owned()));
        }
        // The process repeats its request for the outcome of each hand-over in progress.
        let mut awaited = Vec::new();
        for (id, tenure) in held {
            let entry = shared.segments.get(SegmentKey { tenant, id: *id });
            if let Some(entry) = entry {
                let mut entry = entry.lock();
                let is_same = entry.identity.is_some() && entry.identity == identity;
                if is_same
                    && entry.tenure() == *tenure
                    && matches!(entry.holder.holding(), Holding::Sent { .. })
                {
                    entry.is_awaited = true;
                    awaited.push(*id);
                }
            }
        }
        let (mut still_held, mut left) = (Vec::new(), Vec::new());
        for status in self.list(tenant).into_iter().filter(|status| status.process == process) {
            let segment = SegmentKey { tenant, id: status.id };
            let Ok(entry) = shared.owned(segment) else { continue };
            let mut entry = entry.lock();
            let is_same = entry.identity.is_some() && entry.identity == identity;
            if is_same && held.contains(&(status.id, entry.tenure())) {
                still_held.push(status.id)
            } else {
                left.push(segment)
            }
            entry.identity = identity;
            entry.save();
        }
        for id in &still_held {
            shared.arrivals.forget(SegmentKey { tenant, id: *id });
        }
        // Segments that an earlier process of this name has left.
        for segment in left {
            shared.arrivals.forget(segment);
            shared.arrive(segment, process);
        }
        still_held.retain(|id| !awaited.contains(id));
        Ok((still_held, awaited))
    }

    /// Closes a process: it accepts no more segments.
    ///
    /// # Errors
    /// If the directory fails.
    pub fn close_process(&self, tenant: u32, process: &str) -> Result<(), SegmentError> {
        if self.has_process(tenant, process) {
            self.shared.arrivals.forget_process(tenant, process);
            let left = self.list(tenant).into_iter().filter(|status| status.process == process);
            left.for_each(|status| self.shared.end_faults(SegmentKey { tenant, id: status.id }));
            let removed = self.shared.registry.remove_process(tenant, process);
            // Last, so that none of the above applies to the next process of the name.
            self.shared.processes.remove(tenant, process);
            removed?;
        }
        Ok(())
    }

    /// Waits for a segment that is handed over to a process of this host, or that an earlier
    /// process of its name has left. If the segment is partial, each page must be pulled before it
    /// is touched.
    #[must_use]
    pub fn receive(&self, tenant: u32, process: &str, timeout: Duration) -> Option<Arrival> {
        let segment = self.shared.arrivals.wait(tenant, process, timeout)?;
        let entry = self.owned(segment).ok()?;
        entry.lock().arrival(segment)
    }

    /// Whether a process is open.
    #[must_use]
    pub fn has_process(&self, tenant: u32, process: &str) -> bool {
        self.shared.processes.contains(tenant, process)
    }
}
