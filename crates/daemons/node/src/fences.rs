//! Determines which hosts must be fenced, from their leases in the directory.
//!
//! Pure: no I/O and no clock.

use std::collections::BTreeMap;

use aquifer_fabric::Host;

/// A fence to set: refuse a host's endpoints of this epoch and of all smaller ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fence {
    /// The host.
    pub host: Host,
    /// The greatest epoch that has ended.
    pub epoch: u64,
}

/// The epochs of the hosts whose leases are known to be valid.
#[derive(Clone, Debug, Default)]
pub struct LiveHosts {
    epochs: BTreeMap<Host, u64>,
}

impl LiveHosts {
    /// Starts with the hosts that an earlier process has seen. The next listing shows which leases
    /// have ended since.
    #[must_use]
    pub const fn new(epochs: BTreeMap<Host, u64>) -> Self {
        Self { epochs }
    }

    /// Adds a host with a valid lease. Returns a fence for its smaller epochs, if the epoch is new.
    pub fn add(&mut self, host: Host, epoch: u64) -> Option<Fence> {
        match self.epochs.get(&host) {
            Some(&known) if known >= epoch => None,
            _ => {
                self.epochs.insert(host, epoch);
                epoch.checked_sub(1).map(|epoch| Fence { host, epoch })
            }
        }
    }

    /// Removes a host whose lease has ended. Returns its fence.
    pub fn remove(&mut self, host: Host) -> Option<Fence> {
        self.epochs.remove(&host).map(|epoch| Fence { host, epoch })
    }

    /// Replaces all hosts by those of a listing. Returns the fences of all changes.
    pub fn replace(&mut self, present: &BTreeMap<Host, u64>) -> Vec<Fence> {
        let missing: Vec<Host> =
            self.epochs.keys().copied().filter(|host| !present.contains_key(host)).collect();
        let removed: Vec<Fence> = missing.into_iter().filter_map(|host| self.remove(host)).collect();
        let renewed = present.iter().filter_map(|(&host, &epoch)| self.add(host, epoch));
        removed.into_iter().chain(renewed).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fence(host: u16, epoch: u64) -> Fence {
        Fence { host: Host(host), epoch }
    }

    #[test]
    fn a_host_is_fenced_when_its_lease_ends() {
        let mut hosts = LiveHosts::default();
        assert_eq!(hosts.add(Host(1), 7), Some(fence(1, 6)));
        assert_eq!(hosts.add(Host(1), 7), None);
        assert_eq!(hosts.remove(Host(1)), Some(fence(1, 7)));
        assert_eq!(hosts.remove(Host(1)), None);
        assert_eq!(hosts.add(Host(1), 9), Some(fence(1, 8)));
    }

    #[test]
    fn a_new_lease_fences_the_old_one_and_a_late_event_of_an_old_lease_changes_nothing() {
        let mut hosts = LiveHosts::default();
        hosts.add(Host(1), 7);
        assert_eq!(hosts.add(Host(1), 9), Some(fence(1, 8)));
        assert_eq!(hosts.add(Host(1), 8), None);
        assert_eq!(hosts.remove(Host(1)), Some(fence(1, 9)));
        assert_eq!(hosts.add(Host(2), 0), None);
    }

    #[test]
    fn a_listing_fences_hosts_whose_changes_were_missed() {
        let mut hosts = LiveHosts::default();
        for (host, epoch) in [(1, 5), (2, 6), (3, 7)] {
            hosts.add(Host(host), epoch);
        }
        let now = BTreeMap::from([(Host(1), 5), (Host(3), 11), (Host(4), 12)]);
        let fenced = hosts.replace(&now);
        assert_eq!(fenced, [fence(2, 6), fence(3, 10), fence(4, 11)]);
        assert_eq!(hosts.replace(&now), []);
    }
}
