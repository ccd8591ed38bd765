//! The last epoch that the node has seen of each host, in memory that is kept with what it lends: whose lease ended while no process of the node looked is shut out by the
//! next one, and who was shut out before stays so.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;

use aquifer_fabric::{Host, Memory};

/// A word for each number that a host can have.
const HOSTS: usize = 4096;

/// See above.
#[derive(Debug)]
pub(crate) struct Epochs(Memory);

impl Epochs {
    /// None was seen.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn new() -> io::Result<Self> {
        Memory::create("aquifer-epochs", HOSTS * 8).map(Self)
    }

    /// Those that a process before this one has seen.
    ///
    /// # Errors
    /// If that is no such memory.
    pub fn open(fd: OwnedFd) -> io::Result<Self> {
        Memory::from_fd(fd, HOSTS * 8).map(Self)
    }

    /// To be kept.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }

    /// A host was seen.
    pub fn note(&self, host: Host, epoch: u64) {
        if usize::from(host.0) < HOSTS {
            self.0.atomic_u64(usize::from(host.0) * 8).fetch_max(epoch, Relaxed);
        }
    }

    /// Every host that was ever seen, with its last epoch.
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
    fn the_last_is_remembered() {
        let epochs = Epochs::new().unwrap();
        assert!(epochs.all().is_empty());
        for (host, epoch) in [(1, 5), (4095, 7), (1, 9), (1, 8), (u16::MAX, 1)] {
            epochs.note(Host(host), epoch);
        }
        let again = Epochs::open(epochs.fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(again.all(), BTreeMap::from([(Host(1), 9), (Host(4095), 7)]));
        let other = Memory::create("other", 8).unwrap();
        assert!(Epochs::open(other.fd().try_clone_to_owned().unwrap()).is_err());
    }
}
