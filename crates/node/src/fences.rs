//! Which hosts must be shut out, from what the directory says of their leases. Pure.

use std::collections::BTreeMap;

use aquifer_fabric::Host;

/// Shut out a host's endpoints of this epoch and of all before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fence {
    /// The host.
    pub host: Host,
    /// The last epoch that is over.
    pub epoch: u64,
}

/// The epochs of the hosts whose leases live, as far as known.
#[derive(Clone, Debug, Default)]
pub struct Fences {
    alive: BTreeMap<Host, u64>,
}

impl Fences {
    /// These were seen by whoever looked before: what became of them since the next list tells.
    pub const fn after(seen: BTreeMap<Host, u64>) -> Self {
        Self { alive: seen }
    }

    /// A host's lease lives, with this epoch: all before it are over.
    pub fn present(&mut self, host: Host, epoch: u64) -> Option<Fence> {
        match self.alive.get(&host) {
            Some(&known) if known >= epoch => None,
            _ => {
                self.alive.insert(host, epoch);
                epoch.checked_sub(1).map(|epoch| Fence { host, epoch })
            }
        }
    }

    /// A host's lease is gone.
    pub fn gone(&mut self, host: Host) -> Option<Fence> {
        self.alive.remove(&host).map(|epoch| Fence { host, epoch })
    }

    /// These leases live, and no others: what was missed while nobody watched.
    pub fn listed(&mut self, present: &BTreeMap<Host, u64>) -> Vec<Fence> {
        let missing: Vec<Host> =
            self.alive.keys().copied().filter(|host| !present.contains_key(host)).collect();
        let gone: Vec<Fence> = missing.into_iter().filter_map(|host| self.gone(host)).collect();
        let renewed = present.iter().filter_map(|(&host, &epoch)| self.present(host, epoch));
        gone.into_iter().chain(renewed).collect()
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
        let mut fences = Fences::default();
        assert_eq!(fences.present(Host(1), 7), Some(fence(1, 6)));
        assert_eq!(fences.present(Host(1), 7), None);
        assert_eq!(fences.gone(Host(1)), Some(fence(1, 7)));
        assert_eq!(fences.gone(Host(1)), None);
        assert_eq!(fences.present(Host(1), 9), Some(fence(1, 8)));
    }

    #[test]
    fn a_new_lease_fences_the_old_one_and_an_old_tale_changes_nothing() {
        let mut fences = Fences::default();
        fences.present(Host(1), 7);
        assert_eq!(fences.present(Host(1), 9), Some(fence(1, 8)));
        assert_eq!(fences.present(Host(1), 8), None);
        assert_eq!(fences.gone(Host(1)), Some(fence(1, 9)));
        assert_eq!(fences.present(Host(2), 0), None);
    }

    #[test]
    fn a_list_makes_up_for_what_was_missed() {
        let mut fences = Fences::default();
        for (host, epoch) in [(1, 5), (2, 6), (3, 7)] {
            fences.present(Host(host), epoch);
        }
        let now = BTreeMap::from([(Host(1), 5), (Host(3), 11), (Host(4), 12)]);
        let fenced = fences.listed(&now);
        assert_eq!(fenced, [fence(2, 6), fence(3, 10), fence(4, 11)]);
        assert_eq!(fences.listed(&now), []);
    }
}
