//! Partitions that no server owns, and when this server claims them. Pure: the caller reads the
//! clock and the directory.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use aquifer_ownership::{Life, SegmentRecord};

use crate::placement;
use crate::records::{Claim, ServerRecord};

/// Time after which any server claims a partition that its claimant has not claimed.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(1);

/// The servers of a cache, as server `own` has read them from the directory.
#[derive(Debug)]
pub struct ServerView<'a> {
    own: Life,
    servers: &'a BTreeMap<u16, ServerRecord>,
    claimants: Vec<u16>,
}

impl<'a> ServerView<'a> {
    /// The view of the server `own`.
    #[must_use]
    pub fn new(own: Life, servers: &'a BTreeMap<u16, ServerRecord>) -> Self {
        let claimants = placement::claimants(servers.values().map(|server| (server.server, server.drains)));
        Self { own, servers, claimants }
    }

    /// Whether the lease of a server lasts, by these records.
    #[must_use]
    pub fn lives(&self, life: Life) -> bool {
        self.servers.get(&life.host).is_some_and(|server| server.epoch == life.epoch)
    }
}

/// Partitions that no server owns, with the times at which this server has noticed that.
#[derive(Debug)]
pub struct LostPartitions {
    since: BTreeMap<usize, Instant>,
    return_time: Duration,
}

impl LostPartitions {
    /// An empty set. Partitions of a server whose lease has ended are not claimed for
    /// `return_time`: the server may still run, and join again with their items.
    #[must_use]
    pub fn new(return_time: Duration) -> Self {
        Self { since: BTreeMap::new(), return_time }
    }

    /// Removes a partition that this server owns or receives.
    pub fn remove(&mut self, partition: usize) {
        self.since.remove(&partition);
    }

    /// Removes all partitions. Must be called when this server has a new lease.
    pub fn clear(&mut self) {
        self.since.clear();
    }

    /// Applies the record of a partition that this server does not own. Returns a claim if this
    /// server claims the partition now.
    pub fn next_claim(
        &mut self,
        partition: usize,
        record: Option<&SegmentRecord>,
        view: &ServerView<'_>,
        now: Instant,
    ) -> Option<Claim> {
        if !placement::may_claim(record, view.own, |life| view.lives(life)) {
            self.remove(partition);
            return None;
        }
        let since = *self.since.entry(partition).or_insert(now);
        let lost_for = now.saturating_duration_since(since);
        let return_time = if record.is_some() { self.return_time } else { Duration::ZERO };
        if lost_for < return_time {
            return None;
        }
        let is_late = lost_for > return_time + CLAIM_TIMEOUT;
        placement::should_claim((partition, record), view.own, is_late, &view.claimants)
            .then(|| Claim { partition, record: record.cloned() })
    }
}
