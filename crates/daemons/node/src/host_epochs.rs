//! The last epoch of each host that the node has seen.
//!
//! The keeper holds the table together with the lent memory. So the node's next process fences
//! hosts whose leases have ended while no process was running, and keeps earlier fences.
//!
//! Format: `docs/formats/ipc.md`, item *node*.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;

use aquifer_fabric::{Host, Memory};

/// Number of host numbers, each of which has a word of 8 bytes in the table.
const HOSTS: usize = 4096;

/// A table of the last epoch of each host.
#[derive(Debug)]
pub(crate) struct HostEpochs(Memory);

impl HostEpochs {
    /// Creates an empty table.
    ///
    /// # Errors
    /// If memory cannot be created.
    pub fn new() -> io::Result<Self> {
        Memory::create("aquifer-epochs", HOSTS * 8).map(Self)
    }

    /// Opens the table of an earlier process.
    ///
    /// # Errors
    /// If the memory has another size.
    pub fn open(fd: OwnedFd) -> io::Result<Self> {
        Memory::from_fd(fd, HOSTS * 8).map(Self)
    }

    /// The table's descriptor, for the keeper.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }

    /// Records the epoch of a host, unless a greater one is recorded.
    pub fn record(&self, host: Host, epoch: u64) {
        if usize::from(host.0) < HOSTS {
            self.0.atomic_u64(usize::from(host.0) * 8).fetch_max(epoch, Relaxed);
        }
    }

    /// All hosts that were seen, each with its last epoch.
    pub fn all(&self) -> BTreeMap<Host, u64> {
        let epoch = |number: u16| self.0.atomic_u64(usize::from(number) * 8).load(Relaxed);
        let numbers = 0..u16::try_from(HOSTS).unwrap_or(u16::MAX);
        numbers.map(|number| (Host(number), epoch(number))).filter(|(_, epoch)| *epoch != 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_greatest_epoch_of_each_host_survives() {
        let epochs = HostEpochs::new().unwrap();
        assert!(epochs.all().is_empty());
        for (host, epoch) in [(1, 5), (4095, 7), (1, 9), (1, 8), (u16::MAX, 1)] {
            epochs.record(Host(host), epoch);
        }
        let reopened = HostEpochs::open(epochs.fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(reopened.all(), BTreeMap::from([(Host(1), 9), (Host(4095), 7)]));
        let other = Memory::create("other", 8).unwrap();
        assert!(HostEpochs::open(other.fd().try_clone_to_owned().unwrap()).is_err());
    }
}
