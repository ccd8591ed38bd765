//! Shares of the runs of this host in a pool that is nearly full.
//!
//! A part of the pool is the *reserve*. The largest run must leave all of it free, the next one
//! half of it, and so on; the smallest run may use all. So when the pool is short, the largest run
//! waits first, and freed memory goes to the others. Runs are ordered by the size of their user
//! first.
//!
//! Each user with a run has a *pool share*. Other users must leave its unused part free, and the
//! share of the next user that opens a run. A user below its share need not leave anything free. A
//! user is the owner of user ids here: a user with many subordinate ids has one share.
//!
//! All this holds for the disk nodes by themselves, too: what a run has on a disk counts there, and
//! not as memory. Only a user's quota is for both together.
//!
//! Extents of a user's sessions count like pages of its runs, and sessions allocate by
//! [`PoolShares::spend_room`].

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use aquifer_ipc::size::ByteSize;
use aquifer_pager::{Allowance, LIMIT_BYTES_MIN, Sender};
use aquifer_pool::NodeClass;
use parking_lot::Mutex;

/// Interval at which a sender asks the nodes for their free memory while the pool is short.
const REFRESH_INTERVAL: Duration = Duration::from_millis(500);
/// Time for which the room of a user's sessions is known without another look at the nodes.
const ROOM_TIME: Duration = Duration::from_millis(100);
/// The pool is short for a run if less than `SHORT_FACTOR` times the bytes that it must leave free
/// are free.
const SHORT_FACTOR: u64 = 4;
/// The reserve is 1/`RESERVE_DIVISOR` of the memory that the nodes lend.
const RESERVE_DIVISOR: u64 = 32;
/// The share of a user is 1/`SHARE_DIVISOR` of the memory that the nodes lend, and at least the
/// smallest limit of a run.
const SHARE_DIVISOR: u64 = 64;

/// Limits of the users of this host on pool memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct PoolLimits {
    /// Maximum number of bytes of one user's runs. `None`: all memory that the nodes lend.
    pub bytes_per_user: Option<u64>,
    /// Bytes of the pool share of a user. `None`: a part of the memory that the nodes lend.
    pub share_bytes: Option<u64>,
    /// Whether users without a run may open one, so that a share is kept free for the next.
    pub serves_all_users: bool,
}

/// The classes of nodes.
const CLASSES: [NodeClass; 2] = [NodeClass::Memory, NodeClass::Disk];

/// A value for each class of nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct ByClass<T> {
    /// The value of memory nodes.
    pub memory: T,
    /// The value of disk nodes.
    pub disk: T,
}

impl<T> ByClass<T> {
    fn of(&self, class: NodeClass) -> &T {
        match class {
            NodeClass::Memory => &self.memory,
            NodeClass::Disk => &self.disk,
        }
    }
}

/// The bytes of one user's programs on nodes.
#[derive(Debug)]
struct UserBytes {
    /// The owner of the user ids.
    owner: u32,
    bytes: ByClass<AtomicU64>,
}

/// The bytes of one run on nodes.
#[derive(Debug)]
struct RunBytes {
    run: u64,
    bytes: ByClass<AtomicU64>,
    user: Arc<UserBytes>,
}

impl RunBytes {
    fn bytes(&self, class: NodeClass) -> u64 {
        self.bytes.of(class).load(Relaxed)
    }

    fn user_bytes(&self, class: NodeClass) -> u64 {
        self.user.bytes.of(class).load(Relaxed)
    }

    /// The key by which runs are ordered, with the bytes of their users' extents. Of two runs with
    /// as much, the older one is smaller.
    fn size(&self, class: NodeClass, extent_bytes: u64) -> (u64, u32, u64, u64) {
        (self.user_bytes(class) + extent_bytes, self.user.owner, self.bytes(class), self.run)
    }
}

/// The bytes of extents that a user has.
type ExtentBytes = Box<dyn Fn(u32) -> u64 + Send + Sync>;

/// The bytes of all runs of this host on nodes.
pub struct PoolShares {
    runs: Mutex<Vec<Arc<RunBytes>>>,
    /// Bytes of all runs together.
    total: ByClass<AtomicU64>,
    /// A number that changes when a run is added or removed.
    generation: AtomicU64,
    limits: PoolLimits,
    /// Counts the extents of a user; not set if there are no sessions.
    extent_bytes: OnceLock<ExtentBytes>,
    /// The rooms of users, by the owner of the user ids.
    rooms: Mutex<BTreeMap<u32, UserRoom>>,
}

/// The memory that the sessions of a user may allocate.
#[derive(Clone, Copy, Debug)]
struct UserRoom {
    /// Bytes, 2^64 − 1 for no limit.
    left: u64,
    found_at: Instant,
    /// The time at which a session has last read the free memory of the nodes for this.
    read_at: Option<Instant>,
}

impl fmt::Debug for PoolShares {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolShares")
            .field("runs", &self.runs)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

impl PoolShares {
    /// Begins without a run.
    #[must_use]
    pub fn new(limits: PoolLimits) -> Self {
        Self {
            runs: Mutex::default(),
            total: ByClass::default(),
            generation: AtomicU64::new(0),
            limits,
            extent_bytes: OnceLock::new(),
            rooms: Mutex::default(),
        }
    }

    /// Counts extents, too: `bytes_of` returns those of an owner of user ids. Only the first call
    /// has an effect.
    pub fn count_extents(&self, bytes_of: impl Fn(u32) -> u64 + Send + Sync + 'static) {
        let _set_before = self.extent_bytes.set(Box::new(bytes_of));
    }

    /// The bytes of a user's extents on the nodes of a class: on a disk there are none.
    fn extent_bytes(&self, class: NodeClass, owner: u32) -> u64 {
        let bytes_of = self.extent_bytes.get().filter(|_| class == NodeClass::Memory);
        bytes_of.map_or(0, |bytes_of| bytes_of(owner))
    }

    /// Whether the sessions of a user may allocate `bytes`, which then count as allocated. `None`
    /// if what the user may have is not known, or was found too long ago.
    #[must_use]
    pub fn spend_room(&self, owner: u32, bytes: u64) -> Option<bool> {
        let mut rooms = self.rooms.lock();
        let room = rooms.get_mut(&owner).filter(|room| room.found_at.elapsed() < ROOM_TIME)?;
        let has_room = room.left >= bytes;
        if has_room && room.left != u64::MAX {
            room.left -= bytes;
        }
        Some(has_room)
    }

    /// Sets what the sessions of a user may allocate, of a pool with these free and lent bytes.
    pub fn set_room(&self, owner: u32, free_bytes: u64, lent_bytes: u64) {
        let left = self.room_of(owner, free_bytes, lent_bytes);
        let mut rooms = self.rooms.lock();
        let read_at = rooms.get(&owner).and_then(|room| room.read_at);
        rooms.insert(owner, UserRoom { left, found_at: Instant::now(), read_at });
    }

    /// Whether the sessions of a user may read the free memory of the nodes now, because what they
    /// know of it is not enough. Then the next ones may after some time.
    #[must_use]
    pub fn may_read_nodes(&self, owner: u32) -> bool {
        let mut rooms = self.rooms.lock();
        let Some(room) = rooms.get_mut(&owner) else { return true };
        let is_due = room.read_at.is_none_or(|at| at.elapsed() >= REFRESH_INTERVAL);
        if is_due {
            room.read_at = Some(Instant::now());
        }
        is_due
    }

    /// The bytes that the sessions of a user may allocate.
    fn room_of(&self, owner: u32, free_bytes: u64, lent_bytes: u64) -> u64 {
        let class = NodeClass::Memory;
        let share = self.share_bytes(class, lent_bytes);
        let others = self.others_shares(class, owner, share);
        if others == 0 {
            return u64::MAX;
        }
        let of_owner = |run: &&Arc<RunBytes>| run.user.owner == owner;
        let run_bytes = self.runs.lock().iter().find(of_owner).map_or(0, |run| run.user_bytes(class));
        let below_share = share.saturating_sub(run_bytes + self.extent_bytes(class, owner));
        below_share.max(free_bytes.saturating_sub(others))
    }

    /// Adds a run.
    fn join(&self, run: u64, owner: u32) -> Arc<RunBytes> {
        let mut runs = self.runs.lock();
        let user = runs.iter().find(|other| other.user.owner == owner);
        let user = user.map_or_else(
            || Arc::new(UserBytes { owner, bytes: ByClass::default() }),
            |other| Arc::clone(&other.user),
        );
        let added = Arc::new(RunBytes { run, bytes: ByClass::default(), user });
        runs.push(Arc::clone(&added));
        self.generation.fetch_add(1, Relaxed);
        added
    }

    /// Removes a run that has ended.
    fn leave(&self, run: &Arc<RunBytes>) {
        self.set_bytes(run, ByClass::default());
        self.runs.lock().retain(|other| !Arc::ptr_eq(other, run));
        self.generation.fetch_add(1, Relaxed);
    }

    /// Sets the bytes of a run. Only its sender may call this.
    fn set_bytes(&self, run: &RunBytes, bytes: ByClass<u64>) {
        for class in CLASSES {
            let bytes = *bytes.of(class);
            let before = run.bytes.of(class).swap(bytes, Relaxed);
            if before != bytes {
                // The difference wraps, as the addition of an atomic does.
                run.user.bytes.of(class).fetch_add(bytes.wrapping_sub(before), Relaxed);
                self.total.of(class).fetch_add(bytes.wrapping_sub(before), Relaxed);
            }
        }
    }

    /// Returns the bytes of all other runs.
    fn others(&self, class: NodeClass, run: &RunBytes) -> u64 {
        self.total.of(class).load(Relaxed).saturating_sub(run.bytes(class))
    }

    /// Returns a number that changes when a run is added or removed.
    fn generation(&self) -> u64 {
        self.generation.load(Relaxed)
    }

    /// Returns the bytes that a run must leave free on nodes of a class, which lend `lent_bytes`.
    fn leave_free(&self, class: NodeClass, run: &RunBytes, lent_bytes: u64) -> u64 {
        let extent_bytes = |run: &RunBytes| self.extent_bytes(class, run.user.owner);
        let size_of = |run: &RunBytes| run.size(class, extent_bytes(run));
        let (mut larger, mut smaller, size) = (0, 0, size_of(run));
        for other in self.runs.lock().iter() {
            match size_of(other).cmp(&size) {
                std::cmp::Ordering::Greater => larger += 1,
                std::cmp::Ordering::Less => smaller += 1,
                std::cmp::Ordering::Equal => {}
            }
        }
        let share = self.share_bytes(class, lent_bytes);
        if run.user_bytes(class) + extent_bytes(run) < share {
            return 0;
        }
        let reserve = if smaller == 0 { 0 } else { lent_bytes / RESERVE_DIVISOR };
        reserve.checked_shr(larger).unwrap_or(0) + self.others_shares(class, run.user.owner, share)
    }

    /// Returns the bytes of a user's share of nodes that lend `lent_bytes`.
    fn share_bytes(&self, class: NodeClass, lent_bytes: u64) -> u64 {
        let default = (lent_bytes / SHARE_DIVISOR).max(LIMIT_BYTES_MIN);
        let given = self.limits.share_bytes.filter(|_| class == NodeClass::Memory);
        given.unwrap_or(default).min(lent_bytes / 2)
    }

    /// Returns the unused bytes of the shares of other users, including the share of the next user.
    fn others_shares(&self, class: NodeClass, owner: u32, share: u64) -> u64 {
        let mut seen = vec![owner];
        let mut lacking = if self.limits.serves_all_users { share } else { 0 };
        for run in self.runs.lock().iter() {
            if !seen.contains(&run.user.owner) {
                seen.push(run.user.owner);
                let bytes = run.user_bytes(class) + self.extent_bytes(class, run.user.owner);
                lacking += share.saturating_sub(bytes);
            }
        }
        lacking
    }

    /// Returns the allowance of a run that must leave these bytes free.
    fn allowance(&self, run: &RunBytes, leave_free: ByClass<u64>) -> Allowance {
        let user_bytes = || CLASSES.iter().map(|class| run.user_bytes(*class)).sum();
        let left = |quota: u64| quota.saturating_sub(user_bytes());
        Allowance {
            bytes_max: self.limits.bytes_per_user.map_or(u64::MAX, left),
            leave_free: leave_free.memory,
            leave_free_on_disk: leave_free.disk,
        }
    }
}

/// The share of one run in the pool.
#[derive(Debug)]
pub(crate) struct PoolShare {
    shares: Arc<PoolShares>,
    run: Arc<RunBytes>,
    /// Bytes that the run must leave free.
    leave_free: ByClass<u64>,
    /// The value of [`PoolShares::generation`] for which `leave_free` is valid.
    generation: u64,
    /// Bytes of other runs at the last refresh of the nodes' free memory.
    others_at_refresh: ByClass<u64>,
    /// The time of the last refresh of the nodes' free memory.
    refreshed: Instant,
}

impl PoolShare {
    /// Returns the reason why the run gets no more memory if its user has used up its quota.
    pub fn over_quota(&self) -> String {
        format!(
            "the programs of user {} have their quota of the pool ({})",
            self.run.user.owner,
            ByteSize(self.shares.limits.bytes_per_user.unwrap_or(0))
        )
    }

    /// Adds a run of a user.
    pub fn join(shares: &Arc<PoolShares>, run: u64, owner: u32) -> Self {
        let run = shares.join(run, owner);
        let (shares, refreshed) = (Arc::clone(shares), Instant::now());
        // An old generation, so that the first turn computes `leave_free`.
        let generation = shares.generation().wrapping_sub(1);
        let (leave_free, others_at_refresh) = (ByClass::default(), ByClass::default());
        let mut share = Self { shares, run, leave_free, generation, others_at_refresh, refreshed };
        share.others_at_refresh = share.others();
        share
    }

    /// Returns the bytes of other runs of this host.
    fn others(&self) -> ByClass<u64> {
        let of = |class| self.shares.others(class, &self.run);
        ByClass { memory: of(NodeClass::Memory), disk: of(NodeClass::Disk) }
    }

    /// Returns the bytes that other runs of this host have allocated since the last refresh.
    fn others_growth(&self, class: NodeClass) -> u64 {
        self.shares.others(class, &self.run).saturating_sub(*self.others_at_refresh.of(class))
    }

    /// Publishes the bytes of the run, and sets the allowance of its sender.
    pub fn update(&mut self, sender: &mut Sender, bytes: ByClass<u64>) {
        self.shares.set_bytes(&self.run, bytes);
        if self.shares.generation() != self.generation {
            self.update_rank(sender);
        }
        // The sender's view of the free memory does not include the growth of other runs.
        let leave_free = |class| match *self.leave_free.of(class) {
            0 => 0,
            bytes => bytes + self.others_growth(class),
        };
        let leave_free = ByClass { memory: leave_free(NodeClass::Memory), disk: leave_free(NodeClass::Disk) };
        sender.set_allowance(self.shares.allowance(&self.run, leave_free));
    }

    /// Computes the bytes that the run must leave free. If the pool is short, asks the nodes for
    /// their free memory.
    pub fn update_rank(&mut self, sender: &mut Sender) {
        self.generation = self.shares.generation();
        let mut is_short = false;
        let mut leave_free = |class| {
            let (free_bytes, lent_bytes) = sender.pool_bytes(class);
            let leave_free = self.shares.leave_free(class, &self.run, lent_bytes);
            is_short |= free_bytes < SHORT_FACTOR * leave_free + self.others_growth(class);
            leave_free
        };
        self.leave_free =
            ByClass { memory: leave_free(NodeClass::Memory), disk: leave_free(NodeClass::Disk) };
        if is_short && self.refreshed.elapsed() >= REFRESH_INTERVAL {
            sender.refresh_pool_bytes();
            self.others_at_refresh = self.others();
            self.refreshed = Instant::now();
        }
    }

    /// Removes the run, which has ended.
    pub fn leave(&self) {
        self.shares.leave(&self.run);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENT: u64 = 32 << 30;
    const MEMORY: NodeClass = NodeClass::Memory;
    const DISK: NodeClass = NodeClass::Disk;

    fn in_memory(memory: u64) -> ByClass<u64> {
        ByClass { memory, disk: 0 }
    }

    #[test]
    fn a_larger_run_leaves_more_free() {
        let shares = PoolShares::new(PoolLimits { share_bytes: Some(0), ..PoolLimits::default() });
        let large = shares.join(1, 7);
        assert_eq!(shares.leave_free(MEMORY, &large, LENT), 0, "there is no other run");
        let (small, middle) = (shares.join(2, 8), shares.join(3, 9));
        for (run, gib) in [(&large, 9), (&small, 1), (&middle, 3)] {
            shares.set_bytes(run, in_memory(gib << 30));
        }
        let free = [&large, &middle, &small].map(|run| shares.leave_free(MEMORY, run, LENT) >> 20);
        assert_eq!(free, [1024, 512, 0]);
        assert_eq!(shares.others(MEMORY, &large), 4 << 30);
        shares.leave(&large);
        assert_eq!([&middle, &small].map(|run| shares.leave_free(MEMORY, run, LENT) >> 20), [1024, 0]);
        assert_eq!(shares.others(MEMORY, &small), 3 << 30);
    }

    #[test]
    fn a_user_is_as_large_as_all_its_runs() {
        let shares = PoolShares::new(PoolLimits::default());
        let (first, second, other) = (shares.join(1, 7), shares.join(2, 7), shares.join(3, 8));
        shares.set_bytes(&first, in_memory(3 << 30));
        shares.set_bytes(&second, in_memory(2 << 30));
        shares.set_bytes(&other, in_memory(4 << 30));
        let free = [&first, &second, &other].map(|run| shares.leave_free(MEMORY, run, LENT) >> 20);
        assert_eq!(free, [1024, 512, 0]);
    }

    #[test]
    fn the_oldest_of_equal_runs_may_use_all() {
        let shares = PoolShares::new(PoolLimits { share_bytes: Some(0), ..PoolLimits::default() });
        let runs: Vec<_> = (0..70).map(|run| shares.join(run, 7)).collect();
        let free: Vec<u64> = runs.iter().map(|run| shares.leave_free(MEMORY, run, LENT)).collect();
        assert_eq!(free.iter().filter(|free| **free == LENT / 32).count(), 1);
        assert_eq!(free[0], 0, "the oldest");
    }

    #[test]
    fn others_leave_the_share_of_a_user_free() {
        let shares = PoolShares::new(PoolLimits { serves_all_users: true, ..PoolLimits::default() });
        const SHARE: u64 = LENT / 64;
        let large = shares.join(1, 7);
        shares.set_bytes(&large, in_memory(LENT - SHARE));
        assert_eq!(shares.leave_free(MEMORY, &large, LENT), SHARE, "for the next user");
        let small = shares.join(2, 8);
        shares.set_bytes(&small, in_memory(SHARE / 4));
        assert_eq!(shares.leave_free(MEMORY, &small, LENT), 0);
        assert_eq!(shares.leave_free(MEMORY, &large, LENT), LENT / 32 + SHARE * 3 / 4 + SHARE);
        let third = shares.join(3, 9);
        assert_eq!(shares.leave_free(MEMORY, &large, LENT), LENT / 32 + SHARE * 3 / 4 + 2 * SHARE);
        shares.set_bytes(&small, in_memory(SHARE));
        shares.set_bytes(&third, in_memory(SHARE));
        let left = [&small, &third].map(|run| shares.leave_free(MEMORY, run, LENT));
        assert_eq!(left, [SHARE, LENT / 64 + SHARE], "the next user's");
        let least = PoolShares::new(PoolLimits::default()).share_bytes(MEMORY, 64 << 20);
        assert_eq!(least, LIMIT_BYTES_MIN, "the least with which a run can continue");
    }

    #[test]
    fn extents_count_as_memory_of_their_user() {
        const SHARE: u64 = LENT / 64;
        let shares = PoolShares::new(PoolLimits { serves_all_users: true, ..PoolLimits::default() });
        let (greedy, other) = (shares.join(1, 7), shares.join(2, 8));
        shares.count_extents(|owner| if owner == 7 { SHARE } else { 0 });
        let others = 2 * SHARE;
        assert_eq!(
            shares.leave_free(MEMORY, &greedy, LENT),
            LENT / 32 + others,
            "of the other, and of the next user"
        );
        assert_eq!(shares.leave_free(MEMORY, &other, LENT), 0);
        shares.set_bytes(&other, in_memory(SHARE / 2));
        assert_eq!(shares.leave_free(MEMORY, &greedy, LENT), LENT / 32 + SHARE / 2 + SHARE);
    }

    #[test]
    fn sessions_of_a_user_leave_the_shares_of_others_free() {
        const SHARE: u64 = LENT / 64;
        let shares = PoolShares::new(PoolLimits { serves_all_users: true, ..PoolLimits::default() });
        let _other = shares.join(2, 8);
        assert_eq!(shares.spend_room(7, 1), None, "nothing is known yet");
        assert!(shares.may_read_nodes(7));
        shares.set_room(7, 4 * SHARE, LENT);
        assert_eq!(shares.spend_room(7, 2 * SHARE), Some(true), "all but two shares");
        assert_eq!(shares.spend_room(7, 1), Some(false));
        shares.set_room(7, SHARE / 2, LENT);
        assert_eq!(shares.spend_room(7, SHARE), Some(true), "its own share");
        assert_eq!(shares.spend_room(7, 1), Some(false));
        assert!(shares.may_read_nodes(7) && !shares.may_read_nodes(7), "not too often");
        let alone = PoolShares::new(PoolLimits::default());
        alone.set_room(7, 0, LENT);
        assert_eq!(alone.spend_room(7, LENT), Some(true), "there is no other user");
    }

    #[test]
    fn all_runs_of_a_user_share_its_quota() {
        let shares = PoolShares::new(PoolLimits { bytes_per_user: Some(100), ..PoolLimits::default() });
        let (first, second, other) = (shares.join(1, 7), shares.join(2, 7), shares.join(3, 8));
        shares.set_bytes(&first, in_memory(60));
        shares.set_bytes(&second, in_memory(30));
        assert_eq!(
            shares.allowance(&first, ByClass { memory: 5, disk: 6 }),
            Allowance { bytes_max: 10, leave_free: 5, leave_free_on_disk: 6 }
        );
        assert_eq!(shares.allowance(&other, ByClass::default()).bytes_max, 100);
        shares.set_bytes(&first, in_memory(20));
        assert_eq!(shares.allowance(&second, ByClass::default()).bytes_max, 50);
        shares.set_bytes(&first, in_memory(90));
        assert_eq!(shares.allowance(&second, ByClass::default()).bytes_max, 0);
        shares.leave(&first);
        assert_eq!(shares.allowance(&second, ByClass::default()).bytes_max, 70);
    }
    #[test]
    fn what_is_on_a_disk_has_shares_of_its_own() {
        const SHARE: u64 = LENT / 64;
        let shares = PoolShares::new(PoolLimits { serves_all_users: true, ..PoolLimits::default() });
        let (greedy, other) = (shares.join(1, 7), shares.join(2, 8));
        shares.set_bytes(&greedy, ByClass { memory: SHARE / 2, disk: LENT / 2 });
        shares.set_bytes(&other, ByClass { memory: 2 * SHARE, disk: SHARE / 4 });
        assert_eq!(shares.leave_free(DISK, &greedy, LENT), LENT / 32 + SHARE * 3 / 4 + SHARE);
        assert_eq!(shares.leave_free(DISK, &other, LENT), 0);
        assert_eq!(shares.leave_free(MEMORY, &greedy, LENT), 0, "it has little memory");
        assert_eq!(shares.leave_free(MEMORY, &other, LENT), LENT / 32 + SHARE / 2 + SHARE);
        assert_eq!(shares.leave_free(DISK, &greedy, 0), 0, "there is no disk");
        shares.leave(&greedy);
        assert_eq!(shares.others(DISK, &other), 0);
    }

    #[test]
    fn a_quota_is_for_memory_and_disk_together() {
        let shares = PoolShares::new(PoolLimits { bytes_per_user: Some(100), ..PoolLimits::default() });
        let (first, second) = (shares.join(1, 7), shares.join(2, 7));
        shares.set_bytes(&first, ByClass { memory: 30, disk: 20 });
        shares.set_bytes(&second, ByClass { memory: 0, disk: 40 });
        assert_eq!(shares.allowance(&second, ByClass::default()).bytes_max, 10);
    }
}
