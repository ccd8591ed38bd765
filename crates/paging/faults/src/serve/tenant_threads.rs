//! Threads for the work of one tenant each, which end when the tenant has no work.
//!
//! An operation on a hostile program can take any time, because such a program can hold its own
//! locks in the kernel. Then only programs of the same user wait.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::thread::Thread;
use std::time::Duration;

use parking_lot::Mutex;

/// The threads of all tenants for one purpose.
#[derive(Debug)]
pub(super) struct TenantThreads {
    name: &'static str,
    threads: Mutex<HashMap<u32, Thread>>,
}

impl TenantThreads {
    /// Creates a set without threads. `name` is the name of future threads.
    pub fn new(name: &'static str) -> Self {
        Self { name, threads: Mutex::default() }
    }

    /// Wakes the thread of a tenant, or starts one that calls `run`. The work must be visible to
    /// the thread before the call.
    ///
    /// # Errors
    /// If the tenant has no thread, and none can be started.
    pub fn wake(&self, tenant: u32, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let mut threads = self.threads.lock();
        if let Some(thread) = threads.get(&tenant) {
            thread.unpark();
            return Ok(());
        }
        let started = std::thread::Builder::new().name(self.name.into()).spawn(run)?;
        threads.insert(tenant, started.thread().clone());
        Ok(())
    }

    /// Returns whether the calling thread of a tenant must end, because the tenant has no work.
    ///
    /// `is_idle` is called while no other thread can wake this one.
    pub fn ends(&self, tenant: u32, is_idle: impl FnOnce() -> bool) -> bool {
        let mut threads = self.threads.lock();
        let ends = is_idle();
        if ends {
            threads.remove(&tenant);
        }
        ends
    }
}

/// Maximum number of threads of a tenant that have exceeded their time.
const LATE_MAX: usize = 4;

/// Runs work of tenants in threads, one piece of each tenant at a time.
#[derive(Debug, Default)]
pub(crate) struct TenantTurns(Mutex<HashMap<u32, Arc<Turn>>>);

#[derive(Debug, Default)]
struct Turn {
    /// Held during a call of [`TenantTurns::turn`].
    taken: Mutex<()>,
    /// Number of threads that work, including those that have exceeded their time.
    working: AtomicUsize,
}

impl TenantTurns {
    /// Runs a piece of work of a tenant in a new thread, after the pieces before it have ended or
    /// exceeded their time. Returns its result.
    ///
    /// # Errors
    /// If there is no thread for it, or it takes longer than `time_max`. In the latter case it
    /// continues in its thread.
    pub fn turn<T: Send + 'static>(
        &self,
        tenant: u32,
        time_max: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let turn = {
            let mut turns = self.0.lock();
            turns.retain(|other, turn| *other == tenant || Arc::strong_count(turn) > 1);
            Arc::clone(turns.entry(tenant).or_default())
        };
        let _mine = turn.taken.lock();
        if turn.working.fetch_add(1, SeqCst) >= LATE_MAX {
            turn.working.fetch_sub(1, SeqCst);
            return Err(io::Error::other("earlier searches wait for processes of this user"));
        }
        let (sender, receiver) = mpsc::channel();
        let of_thread = Arc::clone(&turn);
        let run = move || {
            let result = work();
            of_thread.working.fetch_sub(1, SeqCst);
            // If the work is late, the receiver does not exist any more.
            let _ = sender.send(result);
        };
        std::thread::Builder::new().name("connect-back".into()).spawn(run)?;
        receiver.recv_timeout(time_max).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn work_that_takes_too_long_does_not_delay_others() {
        const LONG: Duration = Duration::from_secs(3600);
        let turns = TenantTurns::default();
        let (release, wait) = mpsc::channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        for _ in 0..LATE_MAX {
            let wait = Arc::clone(&wait);
            let late = turns.turn(7, Duration::ZERO, move || wait.lock().recv().is_ok());
            assert!(late.is_err());
        }
        assert!(turns.turn(7, LONG, || ()).is_err(), "too many are late");
        assert_eq!(turns.turn(8, LONG, || 3).unwrap(), 3, "another tenant");
        (0..LATE_MAX).for_each(|_| release.send(()).unwrap());
        while turns.turn(7, LONG, || ()).is_err() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn work_that_arrives_while_a_thread_ends_is_done() {
        let threads = Arc::new(TenantThreads::new("test"));
        let (work, done) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        for round in 1..=1000 {
            work.fetch_add(1, SeqCst);
            let (own, work, done) = (Arc::clone(&threads), Arc::clone(&work), Arc::clone(&done));
            let run = {
                let done = Arc::clone(&done);
                move || {
                    while !own.ends(7, || work.load(SeqCst) == 0) {
                        done.fetch_add(work.swap(0, SeqCst), SeqCst);
                    }
                }
            };
            threads.wake(7, run).unwrap();
            if round % 10 == 0 {
                while done.load(SeqCst) != round {
                    std::thread::yield_now();
                }
            }
        }
    }
}
