//! How the runs of this host share the pool when it is short.
//!
//! A part of the pool is the *reserve*. The run that has the most leaves all of it free, the next
//! one half of it, and so on; the run that has the least may use all. So when the pool is short the
//! largest waits first, and what is freed goes to the others. A run's user counts before the run.
//!
//! Each user with a run has a *pool share*. Other users leave free what it lacks of it, and the
//! share of the next user that comes. A user that has less need not leave anything. A user is the
//! owner of user ids here: one with many subordinate ids has one share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use aquifer_ipc::size::ByteSize;
use aquifer_pager::{Allowance, LIMIT_BYTES_MIN, Sender};
use parking_lot::Mutex;

/// Interval at which a sender asks the nodes what they have free, while that is short:
const REFRESH_INTERVAL: Duration = Duration::from_millis(500);
/// less than this multiple of what it must leave free.
const SHORT_FACTOR: u64 = 4;
/// The reserve is this part of what the nodes lend.
const RESERVE_DIVISOR: u64 = 32;
/// The share of a user is this part of what the nodes lend, and at least the smallest limit of a
/// run.
const SHARE_DIVISOR: u64 = 64;

/// Limits of the users of this host on pool memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct PoolLimits {
    /// Most bytes of one user's runs. `None`: all that the nodes lend.
    pub bytes_per_user: Option<u64>,
    /// Bytes that other users cannot take. `None`: a part of what the nodes lend.
    pub share_bytes: Option<u64>,
    /// Whether users without a run may open one, so that a share is kept free for the next.
    pub serves_all_users: bool,
}

/// What the programs of one user have on memory nodes.
#[derive(Debug)]
struct UserBytes {
    /// The owner of the user ids.
    owner: u32,
    bytes: AtomicU64,
}

/// What a run has on memory nodes.
#[derive(Debug)]
struct Holding {
    run: u64,
    bytes: AtomicU64,
    user: Arc<UserBytes>,
}

impl Holding {
    fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    fn user_bytes(&self) -> u64 {
        self.user.bytes.load(Relaxed)
    }

    /// By this the holdings are ordered. Of two that have the same, the older one has less.
    fn size(&self) -> (u64, u32, u64, u64) {
        (self.user_bytes(), self.user.owner, self.bytes(), self.run)
    }
}

/// The holdings of all runs of this host.
#[derive(Debug)]
pub(crate) struct PoolShares {
    holdings: Mutex<Vec<Arc<Holding>>>,
    /// Of all holdings together.
    total: AtomicU64,
    /// Changes when a run comes or goes.
    generation: AtomicU64,
    limits: PoolLimits,
}

impl PoolShares {
    /// No holdings.
    pub fn new(limits: PoolLimits) -> Self {
        Self { holdings: Mutex::default(), total: AtomicU64::new(0), generation: AtomicU64::new(0), limits }
    }

    /// Adds a run.
    fn join(&self, run: u64, owner: u32) -> Arc<Holding> {
        let mut holdings = self.holdings.lock();
        let user = holdings.iter().find(|other| other.user.owner == owner);
        let user = user.map_or_else(
            || Arc::new(UserBytes { owner, bytes: AtomicU64::new(0) }),
            |other| Arc::clone(&other.user),
        );
        let holding = Arc::new(Holding { run, bytes: AtomicU64::new(0), user });
        holdings.push(Arc::clone(&holding));
        self.generation.fetch_add(1, Relaxed);
        holding
    }

    /// Removes a run that has ended.
    fn leave(&self, holding: &Arc<Holding>) {
        self.set_bytes(holding, 0);
        self.holdings.lock().retain(|other| !Arc::ptr_eq(other, holding));
        self.generation.fetch_add(1, Relaxed);
    }

    /// Sets what a run has. Only its sender may call this.
    fn set_bytes(&self, holding: &Holding, bytes: u64) {
        let before = holding.bytes.swap(bytes, Relaxed);
        if before != bytes {
            // Wrapping, as atomics add.
            holding.user.bytes.fetch_add(bytes.wrapping_sub(before), Relaxed);
            self.total.fetch_add(bytes.wrapping_sub(before), Relaxed);
        }
    }

    /// What all other runs have.
    fn others(&self, holding: &Holding) -> u64 {
        self.total.load(Relaxed).saturating_sub(holding.bytes())
    }

    /// A number that changes when a run comes or goes.
    fn generation(&self) -> u64 {
        self.generation.load(Relaxed)
    }

    /// Bytes that a run must leave free of a pool of `lent_bytes`.
    fn leave_free(&self, holding: &Holding, lent_bytes: u64) -> u64 {
        let (mut larger, mut smaller, size) = (0, 0, holding.size());
        for other in self.holdings.lock().iter() {
            match other.size().cmp(&size) {
                std::cmp::Ordering::Greater => larger += 1,
                std::cmp::Ordering::Less => smaller += 1,
                std::cmp::Ordering::Equal => {}
            }
        }
        let share = self.share_bytes(lent_bytes);
        if holding.user_bytes() < share {
            return 0;
        }
        let reserve = if smaller == 0 { 0 } else { lent_bytes / RESERVE_DIVISOR };
        reserve.checked_shr(larger).unwrap_or(0) + self.others_shares(&holding.user, share)
    }

    /// Bytes that other users cannot take from a user.
    fn share_bytes(&self, lent_bytes: u64) -> u64 {
        let default = (lent_bytes / SHARE_DIVISOR).max(LIMIT_BYTES_MIN);
        self.limits.share_bytes.unwrap_or(default).min(lent_bytes / 2)
    }

    /// Bytes that other users lack of their shares, with the share of the next user.
    fn others_shares(&self, user: &Arc<UserBytes>, share: u64) -> u64 {
        let mut seen = vec![user.owner];
        let mut lacking = if self.limits.serves_all_users { share } else { 0 };
        for Holding { user: other, .. } in self.holdings.lock().iter().map(|holding| &**holding) {
            if !seen.contains(&other.owner) {
                seen.push(other.owner);
                lacking += share.saturating_sub(other.bytes.load(Relaxed));
            }
        }
        lacking
    }

    /// What a run may allocate, if it must leave this many bytes free.
    fn allowance(&self, holding: &Holding, leave_free: u64) -> Allowance {
        let left = |quota: u64| quota.saturating_sub(holding.user_bytes());
        Allowance { bytes_max: self.limits.bytes_per_user.map_or(u64::MAX, left), leave_free }
    }
}

/// The run's share of the pool.
#[derive(Debug)]
pub(crate) struct PoolShare {
    shares: Arc<PoolShares>,
    holding: Arc<Holding>,
    /// Bytes that must be left free, and the number of [`PoolShares::generation`] for which they
    /// are right.
    leave_free: u64,
    generation: u64,
    /// What other runs had when this sender asked the nodes last what they have free.
    others_at_refresh: u64,
    refreshed: Instant,
}

impl PoolShare {
    /// Why the run gets no more, if its user has its quota.
    pub fn over_quota(&self) -> String {
        format!(
            "the programs of user {} have their quota on memory nodes ({})",
            self.holding.user.owner,
            ByteSize(self.shares.limits.bytes_per_user.unwrap_or(0))
        )
    }

    pub fn join(shares: &Arc<PoolShares>, run: u64, owner: u32) -> Self {
        let holding = shares.join(run, owner);
        let (shares, refreshed) = (Arc::clone(shares), Instant::now());
        // Found out in the first turn.
        let generation = shares.generation().wrapping_sub(1);
        Self {
            others_at_refresh: shares.others(&holding),
            shares,
            holding,
            leave_free: 0,
            generation,
            refreshed,
        }
    }

    /// What other runs of this host have allocated since this sender has asked the nodes.
    fn others_growth(&self) -> u64 {
        self.shares.others(&self.holding).saturating_sub(self.others_at_refresh)
    }

    /// Tells others what the run has, and the sender what it may allocate.
    pub fn update(&mut self, sender: &mut Sender, bytes: u64) {
        self.shares.set_bytes(&self.holding, bytes);
        if self.shares.generation() != self.generation {
            self.update_rank(sender);
        }
        // The sender does not know what others have allocated.
        let leave_free = if self.leave_free == 0 { 0 } else { self.leave_free + self.others_growth() };
        sender.set_allowance(self.shares.allowance(&self.holding, leave_free));
    }

    /// Finds out how much must be left free, and asks the nodes what they have if that is short.
    pub fn update_rank(&mut self, sender: &mut Sender) {
        self.generation = self.shares.generation();
        let (free_bytes, lent_bytes) = sender.pool_bytes();
        self.leave_free = self.shares.leave_free(&self.holding, lent_bytes);
        let is_short = free_bytes < SHORT_FACTOR * self.leave_free + self.others_growth();
        if is_short && self.refreshed.elapsed() >= REFRESH_INTERVAL {
            sender.refresh_pool_bytes();
            self.others_at_refresh = self.shares.others(&self.holding);
            self.refreshed = Instant::now();
        }
    }

    /// Removes the run, which has ended.
    pub fn leave(&self) {
        self.shares.leave(&self.holding);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENT: u64 = 32 << 30;

    #[test]
    fn the_larger_leaves_more_free() {
        let shares = PoolShares::new(PoolLimits { share_bytes: Some(0), ..PoolLimits::default() });
        let large = shares.join(1, 7);
        assert_eq!(shares.leave_free(&large, LENT), 0, "there is no other run");
        let (small, middle) = (shares.join(2, 8), shares.join(3, 9));
        for (holding, gib) in [(&large, 9), (&small, 1), (&middle, 3)] {
            shares.set_bytes(holding, gib << 30);
        }
        let free = [&large, &middle, &small].map(|holding| shares.leave_free(holding, LENT) >> 20);
        assert_eq!(free, [1024, 512, 0]);
        assert_eq!(shares.others(&large), 4 << 30);
        shares.leave(&large);
        assert_eq!([&middle, &small].map(|holding| shares.leave_free(holding, LENT) >> 20), [1024, 0]);
        assert_eq!(shares.others(&small), 3 << 30);
    }

    #[test]
    fn a_user_is_as_large_as_all_its_runs() {
        let shares = PoolShares::new(PoolLimits::default());
        let (first, second, other) = (shares.join(1, 7), shares.join(2, 7), shares.join(3, 8));
        shares.set_bytes(&first, 3 << 30);
        shares.set_bytes(&second, 2 << 30);
        shares.set_bytes(&other, 4 << 30);
        let free = [&first, &second, &other].map(|holding| shares.leave_free(holding, LENT) >> 20);
        assert_eq!(free, [1024, 512, 0]);
    }

    #[test]
    fn of_equal_runs_one_may_go_on() {
        let shares = PoolShares::new(PoolLimits { share_bytes: Some(0), ..PoolLimits::default() });
        let runs: Vec<_> = (0..70).map(|run| shares.join(run, 7)).collect();
        let free: Vec<u64> = runs.iter().map(|run| shares.leave_free(run, LENT)).collect();
        assert_eq!(free.iter().filter(|free| **free == LENT / 32).count(), 1);
        assert_eq!(free[0], 0, "the oldest");
    }

    #[test]
    fn others_leave_the_share_of_a_user_free() {
        let shares = PoolShares::new(PoolLimits { serves_all_users: true, ..PoolLimits::default() });
        const SHARE: u64 = LENT / 64;
        let large = shares.join(1, 7);
        shares.set_bytes(&large, LENT - SHARE);
        assert_eq!(shares.leave_free(&large, LENT), SHARE, "for the next user");
        let small = shares.join(2, 8);
        shares.set_bytes(&small, SHARE / 4);
        assert_eq!(shares.leave_free(&small, LENT), 0);
        assert_eq!(shares.leave_free(&large, LENT), LENT / 32 + SHARE * 3 / 4 + SHARE);
        let third = shares.join(3, 9);
        assert_eq!(shares.leave_free(&large, LENT), LENT / 32 + SHARE * 3 / 4 + 2 * SHARE);
        shares.set_bytes(&small, SHARE);
        shares.set_bytes(&third, SHARE);
        let left = [&small, &third].map(|holding| shares.leave_free(holding, LENT));
        assert_eq!(left, [SHARE, LENT / 64 + SHARE], "the next user's");
        let least = PoolShares::new(PoolLimits::default()).share_bytes(64 << 20);
        assert_eq!(least, LIMIT_BYTES_MIN, "with less no run would go on");
    }

    #[test]
    fn a_quota_is_that_of_all_runs_of_a_user() {
        let shares = PoolShares::new(PoolLimits { bytes_per_user: Some(100), ..PoolLimits::default() });
        let (first, second, other) = (shares.join(1, 7), shares.join(2, 7), shares.join(3, 8));
        shares.set_bytes(&first, 60);
        shares.set_bytes(&second, 30);
        assert_eq!(shares.allowance(&first, 5), Allowance { bytes_max: 10, leave_free: 5 });
        assert_eq!(shares.allowance(&other, 0).bytes_max, 100);
        shares.set_bytes(&first, 20);
        assert_eq!(shares.allowance(&second, 0).bytes_max, 50);
        shares.set_bytes(&first, 90);
        assert_eq!(shares.allowance(&second, 0).bytes_max, 0);
        shares.leave(&first);
        assert_eq!(shares.allowance(&second, 0).bytes_max, 70);
    }
}
