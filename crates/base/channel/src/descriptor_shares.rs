//! Descriptors and threads of a process, shared out to the users that it serves.
//!
//! A user may have at most as many descriptors as it leaves free, so that no user can take all
//! descriptors from the next user. The user that runs the process may have all.
//!
//! Each descriptor of a user is charged to the [owner](crate::owners) of its id as long as the
//! descriptor is open. A thread counts as [`THREAD_DESCRIPTORS`] together with the descriptors that
//! it serves.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::process::{Resource, geteuid, getrlimit};

use crate::owners;

/// Least number of descriptors to charge for an item that has a thread.
pub const THREAD_DESCRIPTORS: usize = 4;
/// Number of descriptors that the process keeps for itself.
const OWN_DESCRIPTORS: usize = 256;
/// Divisor of the total that gives the reserve of a user beyond its share.
const RESERVED_DIVISOR: usize = 8;
/// Most descriptors of all users, so that one user fills at most half of the keeper: a charge of
/// [`THREAD_DESCRIPTORS`] has at most one item there, and the keeper holds 65,536.
const DESCRIPTORS_MAX: usize = 262_144;

/// The refusal of a charge.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "user {owner} has its share of the descriptors of this service: end some of its runs, sessions, \
     segments or connections first"
)]
pub struct ShareExceeded {
    /// The owner of the user's id.
    pub owner: u32,
}

/// The descriptors of a process that users may have, and those that each user has.
#[derive(Debug)]
pub struct DescriptorShares {
    max: usize,
    /// The user that runs the process, which could end it.
    own: u32,
    state: Mutex<SharesState>,
}

#[derive(Debug, Default)]
struct SharesState {
    /// Descriptors of all users.
    charged: usize,
    /// Descriptors by owner.
    of_owners: BTreeMap<u32, usize>,
    /// The owner of each user that has a charge, and the number of its charges.
    users: BTreeMap<u32, (u32, usize)>,
}

/// Descriptors that are charged to a user until this value is dropped.
#[derive(Debug)]
pub struct DescriptorCharge {
    shares: Arc<DescriptorShares>,
    uid: u32,
    owner: u32,
    count: usize,
}

impl DescriptorShares {
    /// Shares of the descriptors and threads that this process may have now.
    #[must_use]
    pub fn of_process() -> Arc<Self> {
        let limit = getrlimit(Resource::Nofile).current.and_then(|limit| usize::try_from(limit).ok());
        let descriptors = limit.unwrap_or(usize::MAX).saturating_sub(OWN_DESCRIPTORS);
        let threads = threads_max().saturating_sub(OWN_DESCRIPTORS).saturating_mul(THREAD_DESCRIPTORS);
        Self::new(descriptors.min(threads).min(DESCRIPTORS_MAX))
    }

    /// Whether a user can have as many as `count` descriptors.
    #[must_use]
    pub const fn has_share_of(&self, count: usize) -> bool {
        self.max / 2 >= count
    }

    /// Shares of this many descriptors.
    #[must_use]
    pub fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { max, own: geteuid().as_raw(), state: Mutex::default() })
    }

    /// Charges descriptors that a user wants.
    ///
    /// # Errors
    /// If the user has its share.
    pub fn charge(self: &Arc<Self>, uid: u32, count: usize) -> Result<DescriptorCharge, ShareExceeded> {
        self.charge_within(uid, count, 0)
    }

    /// Charges descriptors that a user needs to use or to end its runs, sessions or segments. They
    /// may exceed the user's share by a reserve.
    ///
    /// # Errors
    /// If the user has its share and the reserve.
    pub fn charge_reserved(
        self: &Arc<Self>,
        uid: u32,
        count: usize,
    ) -> Result<DescriptorCharge, ShareExceeded> {
        self.charge_within(uid, count, self.max / RESERVED_DIVISOR)
    }

    fn charge_within(
        self: &Arc<Self>,
        uid: u32,
        count: usize,
        reserved: usize,
    ) -> Result<DescriptorCharge, ShareExceeded> {
        let mut state = self.state.lock();
        let owner = state.owner(uid);
        let of_owner = state.of_owners.get(&owner).copied().unwrap_or_default() + count;
        if owner != self.own && of_owner > self.max.saturating_sub(state.charged + count) + reserved {
            return Err(ShareExceeded { owner });
        }
        state.add(uid, owner, count);
        Ok(DescriptorCharge { shares: Arc::clone(self), uid, owner, count })
    }

    /// Charges descriptors that a user has already, or that an earlier charge depends on. The
    /// caller must bound them.
    #[must_use]
    pub fn charge_always(self: &Arc<Self>, uid: u32, count: usize) -> DescriptorCharge {
        let mut state = self.state.lock();
        let owner = state.owner(uid);
        state.add(uid, owner, count);
        DescriptorCharge { shares: Arc::clone(self), uid, owner, count }
    }
}

impl SharesState {
    /// The owner of a user's id. It does not change while the user has a charge.
    fn owner(&self, uid: u32) -> u32 {
        self.users.get(&uid).map_or_else(|| owners::owner(uid), |(owner, _)| *owner)
    }

    fn add(&mut self, uid: u32, owner: u32, count: usize) {
        self.charged += count;
        *self.of_owners.entry(owner).or_default() += count;
        self.users.entry(uid).or_insert((owner, 0)).1 += 1;
    }

    fn subtract(&mut self, uid: u32, owner: u32, count: usize) {
        self.charged -= count;
        if let Some((_, charges)) = self.users.get_mut(&uid) {
            *charges -= 1;
            if *charges == 0 {
                self.users.remove(&uid);
            }
        }
        if let Some(of_owner) = self.of_owners.get_mut(&owner) {
            *of_owner -= count;
            if *of_owner == 0 {
                self.of_owners.remove(&owner);
            }
        }
    }
}

impl DescriptorCharge {
    /// The owner of the user's id.
    #[must_use]
    pub const fn owner(&self) -> u32 {
        self.owner
    }
}

impl Drop for DescriptorCharge {
    fn drop(&mut self) {
        self.shares.state.lock().subtract(self.uid, self.owner, self.count);
    }
}

/// Threads that this process may have: the least limit of the machine, of its cgroup and, unless it
/// is root's, of its user.
fn threads_max() -> usize {
    let number = |path: &Path| std::fs::read_to_string(path).ok()?.trim().parse::<usize>().ok();
    let of_machine = number(Path::new("/proc/sys/kernel/threads-max"));
    let of_user = getrlimit(Resource::Nproc).current.and_then(|limit| usize::try_from(limit).ok());
    let of_user = of_user.filter(|_| !geteuid().is_root());
    let cgroups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = cgroups.lines().find_map(|line| line.strip_prefix("0::/"));
    let own = own.map(|own| Path::new("/sys/fs/cgroup").join(own));
    let groups = own.iter().flat_map(|own| own.ancestors());
    let of_groups = groups.filter_map(|group| number(&group.join("pids.max")));
    of_groups.chain(of_machine).chain(of_user).min().unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Charges one descriptor after another to a user, until it has its share.
    fn fill(shares: &Arc<DescriptorShares>, uid: u32) -> Vec<DescriptorCharge> {
        std::iter::from_fn(|| shares.charge(uid, 1).ok()).collect()
    }

    #[test]
    fn each_user_leaves_some_for_the_next() {
        let shares = DescriptorShares::new(1000);
        let mut charges: Vec<_> = (1..=4).map(|uid| fill(&shares, uid)).collect();
        assert_eq!(charges.iter().map(Vec::len).collect::<Vec<_>>(), [500, 250, 125, 62]);
        assert_eq!(fill(&shares, 1).len(), 0, "the first has its share");
        assert_eq!(shares.charge(5, 40).err(), Some(ShareExceeded { owner: 5 }));
        assert!(shares.charge(5, 30).is_ok());
        charges[0].clear();
        assert_eq!(fill(&shares, 2).len(), 156, "of what is free, a user leaves as much as it has");
        charges.clear();
        let state = shares.state.lock();
        assert!(state.charged == 0 && state.of_owners.is_empty() && state.users.is_empty());
    }

    #[test]
    fn what_exists_already_is_charged_beyond_a_share() {
        let shares = DescriptorShares::new(100);
        let restored = shares.charge_always(1, 80);
        assert!(shares.charge(1, 1).is_err() && shares.charge(2, 10).is_ok());
        drop(restored);
        let share = shares.charge(1, 50).unwrap();
        let reserved = shares.charge_reserved(1, 6).unwrap();
        assert!(shares.charge_reserved(1, 1).is_err());
        assert!(shares.charge(2, 22).is_ok());
        drop((share, reserved));
    }

    #[test]
    fn the_user_of_the_process_may_have_all_and_leaves_the_others_less() {
        let shares = DescriptorShares::new(100);
        let own = shares.charge(geteuid().as_raw(), 90).unwrap();
        let stranger = geteuid().as_raw() + 1;
        assert!(shares.charge(stranger, 6).is_err() && shares.charge(stranger, 5).is_ok());
        drop(own);
    }

    #[test]
    fn this_process_may_have_threads() {
        assert!(threads_max() > 1);
    }
}
