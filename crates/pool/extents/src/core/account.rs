//! A user's quota over all its sessions, and the limits on tries of unknown keys.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use aquifer_channel::owners::owner;
use aquifer_fabric::Tenant;
use aquifer_report::UserStatistics;
use parking_lot::{Mutex, MutexGuard};

/// Maximum number of sessions of one user.
pub(crate) const SESSIONS_PER_USER_MAX: u32 = 64;
/// Initial and maximum number of a session's tries of unknown keys.
///
/// A program tries an unknown key when it reads an extent that another program of its user has
/// allocated. Such a key is wrong if the extent was just freed.
pub(super) const SESSION_TRIES_MAX: u32 = 32;
/// Initial and maximum number of a user's tries of unknown keys, in all sessions.
///
/// The sum of the tries of all sessions that a user can have at a time. So one session cannot use
/// up the tries of the others, and a user gains no tries by opening one session after another.
const USER_TRIES_MAX: u32 = SESSIONS_PER_USER_MAX * SESSION_TRIES_MAX;
/// Interval at which a session gains one try, and a user one for each session that it can have.
pub(super) const KEY_TRY_INTERVAL: Duration = Duration::from_secs(1);
/// Minimum interval between two log lines about wrong keys of a user.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The account of a user.
#[derive(Debug)]
pub(crate) struct UserAccount {
    tenant: Tenant,
    /// The owner of the user's id.
    owner: u32,
    allocated_bytes: AtomicU64,
    tries: Mutex<UserTries>,
    /// Requests that were refused because their key was wrong, or could not be tried.
    refused: AtomicU64,
}

/// A user's tries of unknown keys, and the times of the last try and the last log line.
#[derive(Debug)]
struct UserTries {
    tries: KeyTries,
    last_try_at: Duration,
    last_log_at: Option<Duration>,
}

/// A token bucket of tries of unknown keys. All times count from the start of the agent.
#[derive(Debug)]
pub(super) struct KeyTries {
    left: u32,
    max: u32,
    /// Tries that are added in each [`KEY_TRY_INTERVAL`].
    refill: u32,
    refilled_at: Duration,
}

impl KeyTries {
    /// Creates the tries of a session.
    pub const fn of_session() -> Self {
        Self::full(SESSION_TRIES_MAX, 1)
    }

    const fn full(max: u32, refill: u32) -> Self {
        Self { left: max, max, refill, refilled_at: Duration::ZERO }
    }

    /// Whether a try is left at this time.
    pub fn has_try(&mut self, now: Duration) -> bool {
        let intervals = now.saturating_sub(self.refilled_at).as_secs() / KEY_TRY_INTERVAL.as_secs();
        if intervals > 0 {
            self.refilled_at = now;
            let gained = u32::try_from(intervals).unwrap_or(u32::MAX).saturating_mul(self.refill);
            self.left = self.max.min(self.left.saturating_add(gained));
        }
        self.left > 0
    }

    /// Uses up a try. Must be called after [`Self::has_try`] has returned true.
    pub fn use_try(&mut self) {
        self.left -= 1;
    }

    /// Returns a try whose key was right.
    pub fn return_try(&mut self) {
        self.left = self.max.min(self.left + 1);
    }
}

impl UserAccount {
    fn new(tenant: Tenant) -> Self {
        let tries = Mutex::new(UserTries {
            tries: KeyTries::full(USER_TRIES_MAX, SESSIONS_PER_USER_MAX),
            last_try_at: Duration::ZERO,
            last_log_at: None,
        });
        Self {
            tenant,
            owner: owner(tenant.0),
            allocated_bytes: AtomicU64::new(0),
            tries,
            refused: AtomicU64::new(0),
        }
    }

    /// Reserves bytes; false if that would exceed the quota.
    pub fn reserve(&self, bytes: u64, quota_bytes: u64) -> bool {
        let add = |allocated: u64| allocated.checked_add(bytes).filter(|sum| *sum <= quota_bytes);
        self.allocated_bytes.fetch_update(Relaxed, Relaxed, add).is_ok()
    }

    /// Adds bytes that a session had allocated before this agent started, quota or not.
    pub fn add_inherited(&self, bytes: u64) {
        self.allocated_bytes.fetch_add(bytes, Relaxed);
    }

    /// Subtracts bytes that were freed.
    pub fn release(&self, bytes: u64) {
        self.allocated_bytes.fetch_sub(bytes, Relaxed);
    }

    /// Uses up a try of an unknown key, which a session has left; false if the user has none left.
    ///
    /// A refusal for that reason does not reveal whether the key is right.
    pub fn use_key_try(&self, now: Duration) -> bool {
        let mut user = self.tries();
        user.last_try_at = now;
        let may_try = user.tries.has_try(now);
        if may_try {
            user.tries.use_try();
        }
        may_try
    }

    /// Counts a request that was refused because no try was left.
    pub fn count_untried_key(&self) {
        self.refused.fetch_add(1, Relaxed);
    }

    /// Returns a try whose key was right.
    pub fn return_key_try(&self) {
        self.tries().tries.return_try();
    }

    /// Counts a try whose key opened nothing.
    pub fn count_wrong_key(&self) {
        let refused = self.refused.fetch_add(1, Relaxed) + 1;
        let mut user = self.tries();
        let now = user.last_try_at;
        if user.last_log_at.is_none_or(|logged| now.saturating_sub(logged) >= LOG_INTERVAL) {
            user.last_log_at = Some(now);
            tracing::warn!(user = self.tenant.0, refused, "refused requests of a user with wrong keys");
        }
    }

    /// Statistics of the user.
    pub fn report(&self) -> UserStatistics {
        let allocated_bytes = self.allocated_bytes.load(Relaxed);
        UserStatistics { tenant: self.tenant.0, allocated_bytes, refused: self.refused.load(Relaxed) }
    }

    fn tries(&self) -> MutexGuard<'_, UserTries> {
        self.tries.lock()
    }
}

/// The accounts of all users that have or had a session.
///
/// An account is never removed. The number of accounts is bounded by the users of the host.
#[derive(Debug, Default)]
pub(crate) struct UserAccounts(Mutex<BTreeMap<u32, Arc<UserAccount>>>);

impl UserAccounts {
    /// The account of a user, which is created if it does not exist.
    pub fn of(&self, tenant: Tenant) -> Arc<UserAccount> {
        let mut accounts = self.0.lock();
        Arc::clone(accounts.entry(tenant.0).or_insert_with(|| Arc::new(UserAccount::new(tenant))))
    }

    /// Bytes of all users whose ids have this owner.
    pub fn allocated_bytes(&self, owner: u32) -> u64 {
        let of_owner = |account: &&Arc<UserAccount>| account.owner == owner;
        self.0.lock().values().filter(of_owner).map(|account| account.allocated_bytes.load(Relaxed)).sum()
    }

    /// All accounts, by user.
    pub fn all(&self) -> Vec<Arc<UserAccount>> {
        let accounts = self.0.lock();
        accounts.values().map(Arc::clone).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_is_never_exceeded() {
        let account = UserAccount::new(Tenant(1));
        assert!(account.reserve(60, 100) && account.reserve(40, 100));
        assert!(!account.reserve(1, 100));
        account.release(40);
        assert!(!account.reserve(41, 100) && account.reserve(40, 100));
        account.add_inherited(50);
        assert!(!account.reserve(0, 100), "inherited bytes count");
        assert!(!account.reserve(u64::MAX, u64::MAX));
    }

    /// Uses up all tries that are left at this time.
    fn use_up(tries: &mut KeyTries, now: Duration) -> u32 {
        let mut used = 0;
        while tries.has_try(now) {
            tries.use_try();
            used += 1;
        }
        used
    }

    #[test]
    fn tries_of_unknown_keys_are_limited_and_refilled() {
        let start = Duration::from_millis(1500);
        for (mut tries, max, refill) in [
            (KeyTries::of_session(), SESSION_TRIES_MAX, 1),
            (KeyTries::full(USER_TRIES_MAX, SESSIONS_PER_USER_MAX), USER_TRIES_MAX, SESSIONS_PER_USER_MAX),
        ] {
            assert_eq!(use_up(&mut tries, start), max);
            let later = start + KEY_TRY_INTERVAL;
            assert_eq!(use_up(&mut tries, later), refill, "tries in a second");
            let much_later = later + 1000 * KEY_TRY_INTERVAL;
            assert_eq!(use_up(&mut tries, much_later), max, "tries do not exceed the maximum");
            tries.return_try();
            assert_eq!(use_up(&mut tries, much_later), 1, "a right key uses up none");
        }
    }

    #[test]
    fn sessions_one_after_another_have_the_tries_of_their_user() {
        let account = UserAccount::new(Tenant(1));
        let used = (0..).take_while(|_| account.use_key_try(Duration::ZERO)).count();
        assert_eq!(used, USER_TRIES_MAX as usize);
        account.return_key_try();
        assert!(account.use_key_try(Duration::ZERO) && !account.use_key_try(Duration::ZERO));
    }
}
