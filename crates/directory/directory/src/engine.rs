//! The engine: a core behind a lock, with its clock, store and waiting watches. `embedded` and
//! `sim` use it.
//!
//! The engine has no thread. Every call first ends the leases whose time is up, and a waiting
//! watch wakes at the next deadline of a lease.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::clock::{Clock, saturating_ms};
use crate::core::{Core, Cursor, Delta};
use crate::model::{DirectoryEntry, Lease, LeaseId, Listing, Transaction, TransactionOutcome, WatchEvent};
use crate::{DirectoryError, Watch};

/// Interval, in milliseconds, between attempts to store the end of a lease.
const EXPIRY_RETRY_MS: u64 = 1000;

/// Longest time, in milliseconds, by which leases get older while a change is stored. No keep-alive
/// is handled meanwhile.
const COMMIT_MS_MAX: u64 = 100;

/// A store that makes deltas durable.
pub(crate) trait DeltaStore: Send + Debug {
    /// Makes the delta durable. After an error, the store may or may not have it.
    fn commit(&mut self, delta: &Delta) -> Result<(), DirectoryError>;

    /// Makes the store hold exactly this state, after a commit has failed.
    fn reset(&mut self, core: &Core) -> Result<(), DirectoryError>;
}

/// A store that keeps nothing.
#[derive(Debug)]
pub(crate) struct VolatileStore;

impl DeltaStore for VolatileStore {
    fn commit(&mut self, _delta: &Delta) -> Result<(), DirectoryError> {
        Ok(())
    }

    fn reset(&mut self, _core: &Core) -> Result<(), DirectoryError> {
        Ok(())
    }
}

#[derive(Debug)]
struct EngineState {
    core: Core,
    store: Box<dyn DeltaStore>,
    /// Whether the last commit has failed: the disk is full, for example.
    has_failed: bool,
    /// Time before which the ends of leases are not retried, after one could not be stored.
    expires_again_ms: u64,
    /// Time of slow commits, which the leases do not count.
    stalled_ms: u64,
}

impl EngineState {
    fn commit(&mut self, delta: &Delta, now_ms: u64) -> Result<(), DirectoryError> {
        if self.has_failed {
            self.store.reset(&self.core)?;
        }
        let result = self.store.commit(delta);
        self.has_failed = result.is_err();
        result?;
        self.core.apply(delta, now_ms);
        Ok(())
    }
}

/// The core with its clock, its store and the condition on which watches wait.
#[derive(Debug)]
pub(crate) struct Engine {
    state: Mutex<EngineState>,
    changed: Condvar,
    clock: Arc<dyn Clock>,
}

impl Engine {
    pub(crate) fn new(core: Core, store: Box<dyn DeltaStore>, clock: Arc<dyn Clock>) -> Self {
        Self {
            state: Mutex::new(EngineState {
                core,
                store,
                has_failed: false,
                expires_again_ms: 0,
                stalled_ms: 0,
            }),
            changed: Condvar::new(),
            clock,
        }
    }

    pub(crate) fn get(&self, key: &str) -> Result<Option<DirectoryEntry>, DirectoryError> {
        self.lock_current().0.core.get(key)
    }

    pub(crate) fn list(&self, prefix: &str) -> Result<Listing, DirectoryError> {
        self.lock_current().0.core.list(prefix)
    }

    pub(crate) fn transaction(
        &self,
        transaction: &Transaction,
    ) -> Result<TransactionOutcome, DirectoryError> {
        let (mut state, now_ms) = self.lock_current();
        let (outcome, delta) = state.core.plan_transaction(transaction)?;
        if let Some(delta) = delta {
            self.commit(&mut state, &delta, now_ms)?;
            self.changed.notify_all();
        }
        Ok(outcome)
    }

    pub(crate) fn lease_grant(&self, ttl: Duration) -> Result<Lease, DirectoryError> {
        let (mut state, now_ms) = self.lock_current();
        let (lease, delta) = state.core.plan_grant(saturating_ms(ttl))?;
        self.commit(&mut state, &delta, now_ms)?;
        // Waiting watches must take the new deadline into account.
        self.changed.notify_all();
        Ok(lease)
    }

    pub(crate) fn lease_keep_alive(&self, id: LeaseId) -> Result<(), DirectoryError> {
        let (mut state, now_ms) = self.lock_current();
        state.core.keep_alive(id, now_ms)
    }

    pub(crate) fn lease_revoke(&self, id: LeaseId) -> Result<(), DirectoryError> {
        let (mut state, now_ms) = self.lock_current();
        let delta = state.core.plan_end(id)?;
        self.commit(&mut state, &delta, now_ms)?;
        self.changed.notify_all();
        Ok(())
    }

    pub(crate) fn expire_now(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.lock_current().0.core.expire_now(id)?;
        self.tick()
    }

    /// Ends the leases whose time is up.
    pub(crate) fn tick(&self) -> Result<(), DirectoryError> {
        drop(self.lock_current());
        Ok(())
    }

    /// True if a lease has not ended.
    pub(crate) fn has_leases(&self) -> Result<bool, DirectoryError> {
        Ok(self.lock_current().0.core.has_leases())
    }

    pub(crate) fn watch(self: &Arc<Self>, prefix: &str, from: u64) -> Result<EngineWatch, DirectoryError> {
        let cursor = self.lock_current().0.core.watch(prefix, from)?;
        Ok(EngineWatch { engine: Arc::clone(self), cursor, is_cancelled: Arc::default() })
    }

    /// Stores and applies a change. Leases get older by at most [`COMMIT_MS_MAX`] meanwhile,
    /// because their keep-alives wait.
    fn commit(&self, state: &mut EngineState, delta: &Delta, now_ms: u64) -> Result<(), DirectoryError> {
        let began_ms = self.clock.now_ms();
        let result = state.commit(delta, now_ms);
        let took_ms = self.clock.now_ms().saturating_sub(began_ms);
        state.stalled_ms += took_ms.saturating_sub(COMMIT_MS_MAX);
        result
    }

    /// Locks the state, after ending the leases whose time is up. Also returns the time.
    fn lock_current(&self) -> (MutexGuard<'_, EngineState>, u64) {
        let state = self.state.lock();
        self.end_expired_leases(state)
    }

    /// Ends the leases whose time is up. Also returns the time.
    ///
    /// If that cannot be stored, they last longer: their owners do not rely on them any more, and
    /// other clients still can read, and keep their own leases.
    fn end_expired_leases<'a>(
        &self,
        mut state: MutexGuard<'a, EngineState>,
    ) -> (MutexGuard<'a, EngineState>, u64) {
        let now_ms = self.clock.now_ms().saturating_sub(state.stalled_ms);
        let mut has_ended = false;
        while now_ms >= state.expires_again_ms
            && let Some(delta) = state.core.plan_expiry(now_ms)
        {
            if let Err(error) = self.commit(&mut state, &delta, now_ms) {
                tracing::error!(%error, "the end of a lease cannot be stored");
                state.expires_again_ms = now_ms + EXPIRY_RETRY_MS;
                break;
            }
            has_ended = true;
        }
        if has_ended {
            self.changed.notify_all();
        }
        (state, now_ms)
    }
}

/// A watch in the same process.
#[derive(Debug)]
pub(crate) struct EngineWatch {
    engine: Arc<Engine>,
    cursor: Cursor,
    is_cancelled: Arc<AtomicBool>,
}

impl EngineWatch {
    /// A handle with which another thread ends the watch.
    pub(crate) fn canceller(&self) -> Canceller {
        Canceller { engine: Arc::clone(&self.engine), is_cancelled: Arc::clone(&self.is_cancelled) }
    }
}

/// Ends a watch: its present wait and all later ones.
#[derive(Clone, Debug)]
pub(crate) struct Canceller {
    engine: Arc<Engine>,
    is_cancelled: Arc<AtomicBool>,
}

impl Canceller {
    pub(crate) fn cancel(&self) {
        // Must be done with the lock held: a watch that is about to wait would miss the wake-up.
        let _state = self.engine.state.lock();
        self.is_cancelled.store(true, Ordering::SeqCst);
        self.engine.changed.notify_all();
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::SeqCst)
    }
}

impl Watch for EngineWatch {
    fn next(&mut self, timeout: Duration) -> Result<Option<WatchEvent>, DirectoryError> {
        let end = Instant::now().checked_add(timeout);
        let (mut state, mut now_ms) = self.engine.lock_current();
        loop {
            if self.is_cancelled.load(Ordering::SeqCst) {
                return Ok(None);
            }
            if let Some(event) = state.core.next_event(&mut self.cursor)? {
                return Ok(Some(event));
            }
            let remaining = end.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()));
            if remaining.is_zero() {
                return Ok(None);
            }
            let deadline_ms = state.core.next_deadline_ms().unwrap_or(u64::MAX).max(state.expires_again_ms);
            let until_deadline = Duration::from_millis(deadline_ms.saturating_sub(now_ms).max(1));
            let wait = remaining.min(until_deadline).min(Duration::from_secs(3600));
            self.engine.changed.wait_for(&mut state, wait);
            (state, now_ms) = self.engine.end_expired_leases(state);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;
    use crate::clock::ManualClock;
    use crate::model::KeyOperation;

    /// A store that fails as long as the disk is full, and counts its calls.
    #[derive(Debug, Default)]
    struct Disk {
        is_full: AtomicBool,
        commits: AtomicU32,
        resets: AtomicU32,
    }

    #[derive(Debug)]
    struct StoreOn(Arc<Disk>);

    impl StoreOn {
        fn try_write(&self) -> Result<(), DirectoryError> {
            if self.0.is_full.load(Ordering::SeqCst) {
                return Err(DirectoryError::Storage { path: "x".into(), cause: "no space left".into() });
            }
            Ok(())
        }
    }

    impl DeltaStore for StoreOn {
        fn commit(&mut self, _: &Delta) -> Result<(), DirectoryError> {
            self.0.commits.fetch_add(1, Ordering::SeqCst);
            self.try_write()
        }

        fn reset(&mut self, _: &Core) -> Result<(), DirectoryError> {
            self.0.resets.fetch_add(1, Ordering::SeqCst);
            self.try_write()
        }
    }

    /// A store on a slow disk.
    #[derive(Debug)]
    struct SlowStore {
        clock: Arc<ManualClock>,
        commit_time: Duration,
    }

    impl DeltaStore for SlowStore {
        fn commit(&mut self, _: &Delta) -> Result<(), DirectoryError> {
            self.clock.advance(self.commit_time);
            Ok(())
        }

        fn reset(&mut self, _: &Core) -> Result<(), DirectoryError> {
            Ok(())
        }
    }

    fn put(key: &str) -> Transaction {
        Transaction { compares: Vec::new(), operations: vec![KeyOperation::put(key, b"x", None)] }
    }

    #[test]
    fn a_slow_disk_ends_no_lease() {
        let clock = Arc::new(ManualClock::default());
        let store = SlowStore { clock: Arc::clone(&clock), commit_time: Duration::from_secs(10) };
        let engine = Engine::new(Core::new(), Box::new(store), Arc::clone(&clock) as Arc<dyn Clock>);
        let lease = engine.lease_grant(Duration::from_secs(3)).unwrap();
        for _ in 0..100 {
            engine.transaction(&put("a")).unwrap();
            engine.lease_keep_alive(lease.id).unwrap();
        }
        clock.advance(Duration::from_secs(4));
        assert!(engine.lease_keep_alive(lease.id).is_err(), "time without commits counts");
    }

    #[test]
    fn a_full_disk_stops_only_changes() {
        let (disk, clock) = (Arc::new(Disk::default()), Arc::new(ManualClock::default()));
        let store = Box::new(StoreOn(Arc::clone(&disk)));
        let engine = Engine::new(Core::new(), store, Arc::clone(&clock) as Arc<dyn Clock>);
        let (short, long) = (Duration::from_secs(1), Duration::from_secs(100));
        let (lost, kept) = (engine.lease_grant(short).unwrap(), engine.lease_grant(long).unwrap());
        engine.transaction(&put("a")).unwrap();

        disk.is_full.store(true, Ordering::SeqCst);
        assert!(engine.transaction(&put("b")).is_err());
        clock.advance(Duration::from_secs(2));
        let commits = disk.commits.load(Ordering::SeqCst);
        for _ in 0..100 {
            assert!(engine.get("a").unwrap().is_some());
            assert!(engine.get("b").unwrap().is_none(), "the failed change was not stored");
            engine.lease_keep_alive(kept.id).unwrap();
        }
        let tries = disk.commits.load(Ordering::SeqCst) - commits + disk.resets.load(Ordering::SeqCst);
        assert!(tries <= 2, "the end of a lease is not retried at each call: {tries}");

        disk.is_full.store(false, Ordering::SeqCst);
        engine.transaction(&put("c")).unwrap();
        assert!(disk.resets.load(Ordering::SeqCst) > 0, "the store is made right before it is used again");
        clock.advance(Duration::from_secs(2));
        assert!(engine.lease_keep_alive(lost.id).is_err(), "the end of the lease is stored now");
        engine.lease_keep_alive(kept.id).unwrap();
    }
}
