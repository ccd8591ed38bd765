//! What a user has of the pool through all its sessions, what it may have, and how often it may guess.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aquifer_fabric::Tenant;

/// Keys that open nothing, at once. A program that reads what another of its user's has just given back does so now and then.
const GUESSES_MAX: u32 = 32;
/// After that one more in so long.
const GUESS_EVERY: Duration = Duration::from_secs(1);
/// How often wrong keys are told of in the log.
const TELL_EVERY: Duration = Duration::from_secs(60);

/// A user's figures.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UserReport {
    /// The user.
    pub tenant: u32,
    /// What its sessions have, what is kept ready included.
    pub taken_bytes: u64,
    /// Requests that were refused because a key opens nothing.
    pub refused: u64,
}

/// A user's account.
#[derive(Debug)]
pub(crate) struct Account {
    tenant: Tenant,
    taken_bytes: AtomicU64,
    guesses: Mutex<Guesses>,
    /// Keys that opened nothing, and requests that were not tried for that.
    refused: AtomicU64,
}

#[derive(Debug)]
struct Guesses {
    left: u32,
    /// When the last was given back, since the agent began.
    refilled: Duration,
    /// When it was last asked, and when something was last told.
    asked: Duration,
    told: Option<Duration>,
}

impl Account {
    fn new(tenant: Tenant) -> Self {
        let guesses = Mutex::new(Guesses {
            left: GUESSES_MAX,
            refilled: Duration::ZERO,
            asked: Duration::ZERO,
            told: None,
        });
        Self { tenant, taken_bytes: AtomicU64::new(0), guesses, refused: AtomicU64::new(0) }
    }

    /// Take so much, if that leaves it within its quota.
    pub fn take(&self, bytes: u64, quota: u64) -> bool {
        let more = |taken: u64| taken.checked_add(bytes).filter(|taken| *taken <= quota);
        self.taken_bytes.fetch_update(Relaxed, Relaxed, more).is_ok()
    }

    /// It has so much already, from before this agent.
    pub fn charge(&self, bytes: u64) {
        self.taken_bytes.fetch_add(bytes, Relaxed);
    }

    /// So much was given back.
    pub fn give(&self, bytes: u64) {
        self.taken_bytes.fetch_sub(bytes, Relaxed);
    }

    /// Whether a key that the session was not given may be tried, which takes one of the guesses. What is refused here is no answer to whether it is right.
    pub fn may_guess(&self, now: Duration) -> bool {
        let mut guesses = self.guesses();
        let passed = now.saturating_sub(guesses.refilled).as_secs() / GUESS_EVERY.as_secs();
        if passed > 0 {
            guesses.refilled = now;
            guesses.left =
                GUESSES_MAX.min(guesses.left.saturating_add(u32::try_from(passed).unwrap_or(u32::MAX)));
        }
        guesses.asked = now;
        let may = guesses.left > 0;
        guesses.left = guesses.left.saturating_sub(1);
        may
    }

    /// A key was not tried, for too many were wrong.
    pub fn count_untried(&self) {
        self.refused.fetch_add(1, Relaxed);
    }

    /// The key was right.
    pub fn return_guess(&self) {
        let mut guesses = self.guesses();
        guesses.left = GUESSES_MAX.min(guesses.left + 1);
    }

    /// A key opened nothing.
    pub fn count_wrong_guess(&self) {
        let refused = self.refused.fetch_add(1, Relaxed) + 1;
        let mut guesses = self.guesses();
        let now = guesses.asked;
        if guesses.told.is_none_or(|told| now.saturating_sub(told) >= TELL_EVERY) {
            guesses.told = Some(now);
            tracing::warn!(user = self.tenant.0, refused, "programs of this user try keys that open nothing");
        }
    }

    pub fn report(&self) -> UserReport {
        let taken_bytes = self.taken_bytes.load(Relaxed);
        UserReport { tenant: self.tenant.0, taken_bytes, refused: self.refused.load(Relaxed) }
    }

    fn guesses(&self) -> std::sync::MutexGuard<'_, Guesses> {
        self.guesses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All users' accounts. They are few: each was a user of this host.
#[derive(Debug, Default)]
pub(crate) struct Accounts(Mutex<BTreeMap<u32, Arc<Account>>>);

impl Accounts {
    /// A user's account.
    pub fn of(&self, tenant: Tenant) -> Arc<Account> {
        let mut accounts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(accounts.entry(tenant.0).or_insert_with(|| Arc::new(Account::new(tenant))))
    }

    pub fn all(&self) -> Vec<Arc<Account>> {
        let accounts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        accounts.values().map(Arc::clone).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_is_never_exceeded() {
        let account = Account::new(Tenant(1));
        assert!(account.take(60, 100) && account.take(40, 100));
        assert!(!account.take(1, 100));
        account.give(40);
        assert!(!account.take(41, 100) && account.take(40, 100));
        account.charge(50);
        assert!(!account.take(0, 100), "what was there before counts");
        assert!(!account.take(u64::MAX, u64::MAX));
    }

    #[test]
    fn guesses_are_few_and_come_back_slowly() {
        let account = Account::new(Tenant(1));
        let start = Duration::from_millis(1500);
        for _ in 0..GUESSES_MAX {
            assert!(account.may_guess(start));
            account.count_wrong_guess();
        }
        assert!(!account.may_guess(start));
        let later = start + GUESS_EVERY;
        assert!(account.may_guess(later));
        account.count_wrong_guess();
        assert!(!account.may_guess(later), "one in a second");
        let much_later = later + 1000 * GUESS_EVERY;
        for _ in 0..GUESSES_MAX {
            assert!(account.may_guess(much_later));
            account.count_wrong_guess();
        }
        assert!(!account.may_guess(much_later), "they do not add up without bound");
    }
}
