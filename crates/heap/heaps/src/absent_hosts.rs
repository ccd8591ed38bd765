//! Hosts that are absent from the directory, and when their tickets end.
//!
//! A program may hold its ticket for a day, and its connection for longer. Both end when the
//! program's host has had no lease for [`ABSENCE_TIMEOUT`]. They survive a restart of the host's
//! agent within this time: objects belong to a user and not to a host, so they need no earlier
//! fence.
//!
//! Pure: the caller reads the clock, lists the hosts and sets the fences.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use aquifer_fabric::Host;

/// Time without a lease after which a host's tickets end.
pub(crate) const ABSENCE_TIMEOUT: Duration = Duration::from_secs(60);

/// A fence of a host up to an epoch.
pub(crate) type AbsentHostFence = (Host, u64);

/// All hosts that may hold tickets, with the greatest epochs of the tickets.
#[derive(Debug)]
pub(crate) struct AbsentHosts {
    hosts: BTreeMap<Host, KnownHost>,
}

/// State of a host that is not fenced.
#[derive(Clone, Copy, Debug)]
struct KnownHost {
    /// The greatest epoch that a ticket of the host can have.
    epoch: u64,
    /// Time of the first listing without the host; `None` if the last listing had it.
    absent_since: Option<Instant>,
}

impl AbsentHosts {
    /// A set of all host numbers: an earlier process may have admitted any of them. `epoch` must be
    /// greater than the epochs of all leases granted before.
    pub fn new(epoch: u64) -> Self {
        let known = KnownHost { epoch, absent_since: None };
        Self { hosts: (1..Host::NODE.0).map(|number| (Host(number), known)).collect() }
    }

    /// Applies a listing of all hosts with their epochs. Returns the fences of hosts that have been
    /// absent for [`ABSENCE_TIMEOUT`]. A host that joins again has a greater epoch.
    pub fn list(&mut self, present: &BTreeMap<Host, u64>, now: Instant) -> Vec<AbsentHostFence> {
        for (&host, &epoch) in present {
            let known = self.hosts.entry(host).or_insert(KnownHost { epoch, absent_since: None });
            *known = KnownHost { epoch: epoch.max(known.epoch), absent_since: None };
        }
        let mut fences = Vec::new();
        self.hosts.retain(|host, known| {
            if present.contains_key(host) {
                return true;
            }
            let since = *known.absent_since.get_or_insert(now);
            let is_over = now.saturating_duration_since(since) >= ABSENCE_TIMEOUT;
            fences.extend(is_over.then_some((*host, known.epoch)));
            !is_over
        });
        fences
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN_EPOCH: u64 = 20;

    fn listing(hosts: &[(u16, u64)]) -> BTreeMap<Host, u64> {
        hosts.iter().map(|(host, epoch)| (Host(*host), *epoch)).collect()
    }

    #[test]
    fn a_host_without_a_lease_is_fenced_once_after_the_timeout() {
        let start = Instant::now();
        let mut hosts = AbsentHosts::new(OWN_EPOCH);
        assert_eq!(hosts.list(&listing(&[(1, 30)]), start), []);
        let others = hosts.list(&listing(&[(1, 30)]), start + ABSENCE_TIMEOUT);
        // Numbers of hosts that may have joined before this process.
        assert_eq!(others.len(), usize::from(Host::NODE.0) - 2);
        assert!(others.iter().all(|(host, epoch)| *host != Host(1) && *epoch == OWN_EPOCH));
        let away = start + 2 * ABSENCE_TIMEOUT;
        assert_eq!(hosts.list(&listing(&[]), away), []);
        assert_eq!(hosts.list(&listing(&[]), away + ABSENCE_TIMEOUT / 2), []);
        assert_eq!(hosts.list(&listing(&[]), away + ABSENCE_TIMEOUT), [(Host(1), 30)]);
        assert_eq!(hosts.list(&listing(&[]), away + 3 * ABSENCE_TIMEOUT), []);
        // Host 1 joins again, and leaves again.
        let back = away + 4 * ABSENCE_TIMEOUT;
        assert_eq!(hosts.list(&listing(&[(1, 40)]), back), []);
        assert_eq!(hosts.list(&listing(&[]), back), []);
        assert_eq!(hosts.list(&listing(&[]), back + ABSENCE_TIMEOUT), [(Host(1), 40)]);
    }

    #[test]
    fn a_host_that_resumes_in_time_keeps_the_tickets_of_all_its_epochs() {
        let start = Instant::now();
        let mut hosts = AbsentHosts::new(OWN_EPOCH);
        hosts.list(&listing(&[]), start);
        assert_eq!(hosts.list(&listing(&[(7, 31)]), start + ABSENCE_TIMEOUT / 2), []);
        let others = hosts.list(&listing(&[(7, 31)]), start + 2 * ABSENCE_TIMEOUT);
        assert!(others.iter().all(|(host, _)| *host != Host(7)));
    }

    #[test]
    fn time_before_the_first_listing_without_a_host_does_not_count() {
        let start = Instant::now();
        let mut hosts = AbsentHosts::new(OWN_EPOCH);
        assert_eq!(hosts.list(&listing(&[(7, 31)]), start), []);
        assert_eq!(
            hosts.list(&listing(&[]), start + 10 * ABSENCE_TIMEOUT).len(),
            usize::from(Host::NODE.0) - 2
        );
        assert_eq!(hosts.list(&listing(&[(7, 32)]), start + 11 * ABSENCE_TIMEOUT), []);
    }
}
