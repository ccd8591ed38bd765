//! An endpoint that counts its operations.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use aquifer_fabric::{Completion, Endpoint, PostError, Verb, Work, forward_endpoint};

/// Counts of operations.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Doorbells.
    pub trips: u64,
    /// Compare-and-swaps.
    pub swaps: u64,
    /// Failed compare-and-swaps.
    pub lost: u64,
}

/// Shared counters of an endpoint.
#[derive(Debug, Default)]
pub struct Tally {
    trips: AtomicU64,
    swaps: AtomicU64,
    lost: AtomicU64,
}

impl Tally {
    /// The present counts.
    pub fn counts(&self) -> Counts {
        Counts {
            trips: self.trips.load(Relaxed),
            swaps: self.swaps.load(Relaxed),
            lost: self.lost.load(Relaxed),
        }
    }
}

impl Counts {
    /// The difference to earlier counts.
    pub fn since(self, before: Self) -> Self {
        Self {
            trips: self.trips - before.trips,
            swaps: self.swaps - before.swaps,
            lost: self.lost - before.lost,
        }
    }

    /// The sum of two counts.
    pub fn and(self, other: Self) -> Self {
        Self {
            trips: self.trips + other.trips,
            swaps: self.swaps + other.swaps,
            lost: self.lost + other.lost,
        }
    }
}

/// An endpoint that counts its operations.
#[derive(Debug)]
pub struct Counted {
    inner: Box<dyn Endpoint>,
    tally: Arc<Tally>,
    /// CASes in flight: ids and expected values.
    expected: Vec<(u64, u64)>,
}

impl Counted {
    /// Wraps an endpoint.
    pub fn new(inner: Box<dyn Endpoint>) -> (Self, Arc<Tally>) {
        let tally = Arc::new(Tally::default());
        (Self { inner, tally: Arc::clone(&tally), expected: Vec::new() }, tally)
    }
}

impl Endpoint for Counted {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        let posted = self.inner.post(batch);
        let accepted = match posted {
            Ok(()) => batch.len(),
            Err(PostError::QueueFull { accepted }) => accepted,
        };
        if accepted > 0 {
            self.tally.trips.fetch_add(1, Relaxed);
        }
        for work in &batch[..accepted] {
            if let Verb::CompareSwap { expected, .. } = work.verb {
                self.expected.push((work.id, expected));
                self.tally.swaps.fetch_add(1, Relaxed);
            }
        }
        posted
    }

    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let before = out.len();
        let count = self.inner.poll(out, max);
        for completion in &out[before..] {
            // CASes complete in the order in which they were posted.
            let Some(at) = self.expected.iter().position(|(id, _)| *id == completion.id) else { continue };
            let (_, expected) = self.expected.remove(at);
            if completion.outcome.is_ok_and(|found| found != expected) {
                self.tally.lost.fetch_add(1, Relaxed);
            }
        }
        count
    }

    forward_endpoint!(
        inner: wait, poll_fd, register_local, receive, regions, limits, is_broken, drain_handle
    );
}

#[cfg(test)]
mod tests {
    use aquifer_fabric::shm::{self, ShmTarget};
    use aquifer_fabric::{Access, Host, Identity, Memory, RemoteAddr, Scope, Target, Tenant};

    use super::*;

    #[test]
    fn a_doorbell_is_one_trip_and_a_second_cas_fails() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("target");
        let target = ShmTarget::listen(&path, shm::ShmOptions::default()).unwrap();
        let memory = Arc::new(Memory::create("aquifer-test", 4096).unwrap());
        let region = target.register(memory, Access::ALL, Scope::Anyone).unwrap();
        let who = Identity { host: Host(1), epoch: 1, tenant: Tenant(0) };
        let (mut counted, tally) = Counted::new(shm::connect(&path, who).unwrap());
        let remote = RemoteAddr { addr: region.base, key: region.key };
        let swap = |id| {
            let verb = Verb::CompareSwap { remote, expected: 0, desired: 1 };
            Work { id, verb, signalled: true }
        };
        counted.post(&[swap(1), swap(2)]).unwrap();
        let mut done = Vec::new();
        while done.len() < 2 {
            counted.poll(&mut done, 8);
        }
        assert_eq!(tally.counts(), Counts { trips: 1, swaps: 2, lost: 1 });
    }
}
