//! Partitions that no server has, and when this server claims them. Pure: the caller reads the
//! clock and the directory.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use aquifer_ownership::{Life, SegmentRecord};

use crate::placement;
use crate::records::{Claim, ServerRecord};

/// Time for which a partition is left to the server that is to claim it. Later, any server claims
/// it.
const CLAIM_TIME: Duration = Duration::from_secs(1);

/// The servers of a cache, as this one has read them.
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

    /// Whether a server has a lease.
    #[must_use]
    pub fn lives(&self, life: Life) -> bool {
        self.servers.get(&life.host).is_some_and(|server| server.epoch == life.epoch)
    }
}

/// The partitions that no server has, with the times since when this server has seen them so.
#[derive(Debug)]
pub struct LostPartitions {
    since: BTreeMap<usize, Instant>,
    return_time: Duration,
}

impl LostPartitions {
    /// Starts without any. `return_time` is how long the partitions of a server whose lease has
    /// ended are left to it: it joins again with their items if it still runs.
    #[must_use]
    pub fn new(return_time: Duration) -> Self {
        Self { since: BTreeMap::new(), return_time }
    }

    /// Removes a partition that this server has or receives.
    pub fn remove(&mut self, partition: usize) {
        self.since.remove(&partition);
    }

    /// Removes all: this server has a new lease.
    pub fn clear(&mut self) {
        self.since.clear();
    }

    /// Takes the record of a partition that this server has not. Returns the claim if this server
    /// is to claim the partition now.
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
        let is_late = lost_for > return_time + CLAIM_TIME;
        placement::is_to_claim((partition, record), view.own, is_late, &view.claimants)
            .then(|| Claim { partition, record: record.cloned() })
    }
}
