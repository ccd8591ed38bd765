//! One thread for each tenant, as long as the tenant has something for it to do.
//!
//! What these threads do to hostile programs can take any time: such a program can hold its own
//! locks in the kernel. Then only programs of the same user wait.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;

/// The threads of all tenants for one purpose.
#[derive(Debug)]
pub(super) struct TenantThreads {
    name: &'static str,
    threads: Mutex<HashMap<u32, Thread>>,
}

impl TenantThreads {
    /// No threads, which will have this name.
    pub fn new(name: &'static str) -> Self {
        Self { name, threads: Mutex::default() }
    }

    /// Wakes the thread of a tenant, or starts one. The tenant must have something to do by now.
    ///
    /// # Errors
    /// If there is no thread and none can be started.
    pub fn wake(&self, tenant: u32, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let mut threads = self.lock();
        if let Some(thread) = threads.get(&tenant) {
            thread.unpark();
            return Ok(());
        }
        let started = std::thread::Builder::new().name(self.name.into()).spawn(run)?;
        threads.insert(tenant, started.thread().clone());
        Ok(())
    }

    /// Called by the thread of a tenant: whether it must end, because there is nothing to do.
    ///
    /// `is_idle` is asked while no other thread can wake this one.
    pub fn ends(&self, tenant: u32, is_idle: impl FnOnce() -> bool) -> bool {
        let mut threads = self.lock();
        let ends = is_idle();
        if ends {
            threads.remove(&tenant);
        }
        ends
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u32, Thread>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Work of which each tenant has only one piece done at a time, in a thread of its own.
#[derive(Debug, Default)]
pub(crate) struct TenantTurns(Mutex<HashMap<u32, Arc<Mutex<()>>>>);

impl TenantTurns {
    /// Does a piece of work of a tenant when those before it are done.
    ///
    /// # Errors
    /// If there is no thread for it, or it panics.
    pub fn turn<T: Send + 'static>(
        &self,
        tenant: u32,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let turn = {
            let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            turns.retain(|other, turn| *other == tenant || Arc::strong_count(turn) > 1);
            Arc::clone(turns.entry(tenant).or_default())
        };
        let _mine = turn.lock().unwrap_or_else(PoisonError::into_inner);
        let thread = std::thread::Builder::new().name("knock".into()).spawn(work)?;
        thread.join().map_err(|_| io::Error::other("the thread has panicked"))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

    use super::*;

    #[test]
    fn work_that_comes_while_a_thread_ends_is_done() {
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
