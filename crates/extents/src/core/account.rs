//! A user's quota over all its sessions, and the limit on tries of unknown keys.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aquifer_fabric::Tenant;
use aquifer_report::UserStatistics;

/// Tries of unknown keys that a user has at first and at most.
///
/// A program tries an unknown key when it reads an extent that another program of its user has
/// allocated. Such a key is wrong if the extent was just freed.
const KEY_TRIES_MAX: u32 = 32;
/// Interval at which a user gets another try.
const KEY_TRY_INTERVAL: Duration = Duration::from_secs(1);
/// Minimum interval between two log lines about wrong keys of a user.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The account of a user.
#[derive(Debug)]
pub(crate) struct UserAccount {
    tenant: Tenant,
    allocated_bytes: AtomicU64,
    tries: Mutex<KeyTries>,
    /// Requests that were refused because their key was wrong, or could not be tried.
    refused: AtomicU64,
}

/// A token bucket of tries of unknown keys. All times count from the start of the agent.
#[derive(Debug)]
struct KeyTries {
    left: u32,
    refilled_at: Duration,
    last_try_at: Duration,
    last_log_at: Option<Duration>,
}

impl UserAccount {
    fn new(tenant: Tenant) -> Self {
        let tries = Mutex::new(KeyTries {
            left: KEY_TRIES_MAX,
            refilled_at: Duration::ZERO,
            last_try_at: Duration::ZERO,
            last_log_at: None,
        });
        Self { tenant, allocated_bytes: AtomicU64::new(0), tries, refused: AtomicU64::new(0) }
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

    /// Uses up a try of an unknown key; false if no try is left.
    ///
    /// A refusal for that reason does not reveal whether the key is right.
    pub fn use_key_try(&self, now: Duration) -> bool {
        let mut tries = self.tries();
        let gained = now.saturating_sub(tries.refilled_at).as_secs() / KEY_TRY_INTERVAL.as_secs();
        if gained > 0 {
            tries.refilled_at = now;
            tries.left =
                KEY_TRIES_MAX.min(tries.left.saturating_add(u32::try_from(gained).unwrap_or(u32::MAX)));
        }
        tries.last_try_at = now;
        let may_try = tries.left > 0;
        tries.left = tries.left.saturating_sub(1);
        may_try
    }

    /// Counts a request that was refused because no try was left.
    pub fn count_untried_key(&self) {
        self.refused.fetch_add(1, Relaxed);
    }

    /// Returns a try whose key was right.
    pub fn return_key_try(&self) {
        let mut tries = self.tries();
        tries.left = KEY_TRIES_MAX.min(tries.left + 1);
    }

    /// Counts a try whose key opened nothing.
    pub fn count_wrong_key(&self) {
        let refused = self.refused.fetch_add(1, Relaxed) + 1;
        let mut tries = self.tries();
        let now = tries.last_try_at;
        if tries.last_log_at.is_none_or(|logged| now.saturating_sub(logged) >= LOG_INTERVAL) {
            tries.last_log_at = Some(now);
            tracing::warn!(user = self.tenant.0, refused, "programs of this user use keys that open nothing");
        }
    }

    /// Statistics of the user.
    pub fn report(&self) -> UserStatistics {
        let allocated_bytes = self.allocated_bytes.load(Relaxed);
        UserStatistics { tenant: self.tenant.0, allocated_bytes, refused: self.refused.load(Relaxed) }
    }

    fn tries(&self) -> MutexGuard<'_, KeyTries> {
        self.tries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The accounts of all users that have or had a session.
///
/// They are never removed; their number is bounded by the users of the host.
#[derive(Debug, Default)]
pub(crate) struct UserAccounts(Mutex<BTreeMap<u32, Arc<UserAccount>>>);

impl UserAccounts {
    /// The account of a user, which is created if it does not exist.
    pub fn of(&self, tenant: Tenant) -> Arc<UserAccount> {
        let mut accounts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(accounts.entry(tenant.0).or_insert_with(|| Arc::new(UserAccount::new(tenant))))
    }

    /// All accounts, by user.
    pub fn all(&self) -> Vec<Arc<UserAccount>> {
        let accounts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
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

    #[test]
    fn tries_of_unknown_keys_are_limited_and_refilled() {
        let account = UserAccount::new(Tenant(1));
        let start = Duration::from_millis(1500);
        for _ in 0..KEY_TRIES_MAX {
            assert!(account.use_key_try(start));
            account.count_wrong_key();
        }
        assert!(!account.use_key_try(start));
        let later = start + KEY_TRY_INTERVAL;
        assert!(account.use_key_try(later));
        account.count_wrong_key();
        assert!(!account.use_key_try(later), "one try in a second");
        let much_later = later + 1000 * KEY_TRY_INTERVAL;
        for _ in 0..KEY_TRIES_MAX {
            assert!(account.use_key_try(much_later));
            account.count_wrong_key();
        }
        assert!(!account.use_key_try(much_later), "tries do not exceed the maximum");
    }
}
