//! The grace times of dead hosts, after which other hosts recover them.

use std::collections::BTreeMap;
use std::time::Duration;

use aquifer_directory::names::DeadHost;

use crate::mutation::Mutation;

/// Time from a failed recovery to the next attempt. Each attempt grants a lease and writes to the
/// directory.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// The times since when hosts are dead, as observed by one host. Times count from its start.
#[derive(Debug, Default)]
pub struct GraceTimes {
    /// The deaths, by the number of the host.
    deaths: BTreeMap<u16, Death>,
}

/// A death of a host that is not recovered yet.
#[derive(Debug)]
struct Death {
    /// The version of the host's record. A host that resumes writes its record again, so a later
    /// death has another version.
    version: u64,
    seen_at: Duration,
    /// The time of the last failed attempt to recover the host.
    failed_at: Option<Duration>,
}

impl Death {
    fn is_of(&self, dead: &DeadHost) -> bool {
        self.version == dead.version || Mutation::KeepGraceTimes.is_active()
    }
}

impl GraceTimes {
    /// Replaces the list of dead hosts. The grace time of each begins when its death is first seen.
    pub fn list(&mut self, dead: &[DeadHost], now: Duration) {
        self.deaths.retain(|host, _| dead.iter().any(|dead| dead.record.host == *host));
        for dead in dead {
            let new = || Death { version: dead.version, seen_at: now, failed_at: None };
            let death = self.deaths.entry(dead.record.host).or_insert_with(new);
            if !death.is_of(dead) {
                // `failed_at` is kept, because a failed attempt writes the record, too.
                (death.version, death.seen_at) = (dead.version, now);
            }
        }
    }

    /// Whether the grace time of a dead host has passed, and no attempt to recover it has just
    /// failed.
    #[must_use]
    pub fn is_due(&self, dead: &DeadHost, now: Duration) -> bool {
        self.deaths.get(&dead.record.host).is_some_and(|death| {
            let is_over = now.saturating_sub(death.seen_at) >= Duration::from_millis(dead.record.grace_ms);
            let has_just_failed =
                death.failed_at.is_some_and(|failed_at| now.saturating_sub(failed_at) < RETRY_INTERVAL);
            death.is_of(dead) && is_over && !has_just_failed
        })
    }

    /// Records a failed attempt to recover a dead host. Returns whether it is the first one since
    /// the host is listed.
    pub fn fail(&mut self, dead: &DeadHost, now: Duration) -> bool {
        let death = self.deaths.get_mut(&dead.record.host);
        death.is_some_and(|death| death.failed_at.replace(now).is_none())
    }
}

#[cfg(test)]
mod tests {
    use aquifer_directory::names::HolderRecord;

    use super::*;

    fn dead(host: u16, version: u64) -> DeadHost {
        let record = HolderRecord { host, claim_epoch: 5, grace_ms: 20_000, remaining_lives: None };
        DeadHost { record, version }
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_host_is_due_after_its_grace_time() {
        let mut times = GraceTimes::default();
        let host = dead(1, 7);
        times.list(std::slice::from_ref(&host), at(100));
        assert!(!times.is_due(&host, at(119)) && times.is_due(&host, at(120)));
        assert!(!times.is_due(&dead(2, 7), at(1000)), "it is not listed");
    }

    /// The observing host has missed the life in between: it was stopped, or the directory failed.
    #[test]
    fn a_host_that_has_resumed_and_died_again_has_all_of_its_grace_time() {
        let mut times = GraceTimes::default();
        times.list(&[dead(1, 7)], at(100));
        let again = dead(1, 9);
        times.list(std::slice::from_ref(&again), at(130));
        assert!(!times.is_due(&again, at(149)) && times.is_due(&again, at(150)));
        assert!(!times.is_due(&dead(1, 7), at(1000)), "what was listed before");
    }

    #[test]
    fn attempts_that_fail_are_repeated_at_intervals() {
        let mut times = GraceTimes::default();
        let host = dead(1, 7);
        times.list(std::slice::from_ref(&host), at(0));
        assert!(times.is_due(&host, at(20)) && times.fail(&host, at(20)));
        assert!(!times.is_due(&host, at(29)) && times.is_due(&host, at(30)));
        assert!(!times.fail(&host, at(30)), "it has failed before");
        // The attempt has written the record without a grace time.
        let mut again = dead(1, 8);
        again.record.grace_ms = 0;
        times.list(std::slice::from_ref(&again), at(31));
        assert!(!times.is_due(&again, at(39)) && times.is_due(&again, at(40)));
        assert!(!times.fail(&again, at(40)), "it has failed before");
        times.list(&[], at(41));
        times.list(std::slice::from_ref(&again), at(42));
        assert!(times.is_due(&again, at(42)), "it has been alive");
    }
}
