//! Real programs: a thread per program turns its monitor, a thread per run writes back, one thread samples them all.
//!
//! - [`attach`]: a program's first words, and its child's.
//! - [`program`]: one program's thread. `edge` is what its monitor acts through.
//! - [`run`]: what the programs of one `aquifer run` share. `sender` is its thread.
//! - [`restore`]: another agent goes on with what the keeper holds, whose `records` say what it is.
//! - `tenants`: what each of them has, all runs together.
//! - [`sampler`]: looks from outside at how much is resident, and finds new areas.

pub mod attach;
mod core_follower;
mod count;
mod edge;
mod exit_watcher;
#[cfg(test)]
mod golden_tests;
mod observed;
pub mod priority;
pub mod program;
mod records;
mod restore;
pub mod run;
pub mod sampler;
mod sender;
mod stat;
mod tenants;

use std::collections::HashMap;
use std::fmt::Debug;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::Thread;

use aquifer_ipc::{HeldItem, HeldKind, RunToken};
use aquifer_pager::{Connector, Mempool, REPLICAS_MAX, SlabSet};
use aquifer_pool::{LeakDetector, NodeId, PoolClient};

pub use attach::AttachError;
pub use program::Program;
pub use restore::RestoredRun;
pub use run::{ProgramReport, Run, RunReport};
pub use tenants::TenantReport;

/// Runs that one agent serves at once.
pub const RUNS_MAX: usize = 1024;
/// Runs that one user has at once.
pub const RUNS_PER_TENANT_MAX: usize = 256;

/// What the agent provides.
pub trait AgentServices: Send + Sync + Debug {
    /// How to reach memory nodes on behalf of a tenant.
    fn connector(&self, tenant: u32) -> Arc<dyn Connector>;

    /// A pool client of that tenant with all nodes that can be reached now.
    fn pool(&self, tenant: u32) -> PoolClient;

    /// What this host has of the pool, and who knows of it.
    fn leak_detector(&self) -> &LeakDetector;

    /// The nodes that there are now.
    fn nodes(&self) -> Vec<NodeId>;

    /// Hold this in a process that outlives this one, so that programs never read zeros and another agent can go on with them; in
    /// place of what was held under the same name.
    fn put_in_keeper(&self, put: &HeldItem, fds: &[BorrowedFd<'_>]);

    /// It is over.
    fn remove_from_keeper(&self, kind: HeldKind, id: u64);
}

/// All programs that one agent pages.
#[derive(Debug)]
pub struct PagingService {
    pub(crate) agent: Arc<dyn AgentServices>,
    pub(crate) mempool: Arc<Mempool>,
    pub(crate) exit_watcher: Arc<exit_watcher::ProgramExitWatcher>,
    runs: Mutex<HashMap<RunToken, Arc<Run>>>,
    ended: tenants::EndedRuns,
    next_program: AtomicU64,
    /// Of runs that an agent before this one left, and that cannot be gone on with: what they have stays known of.
    unserved_slabs: Mutex<Vec<Arc<SlabSet>>>,
    sampler: OnceLock<Thread>,
    /// Whether programs have come of which the sampler does not know.
    has_new_programs: AtomicBool,
}

impl PagingService {
    /// A service without programs, and its threads.
    ///
    /// # Errors
    /// If there are no threads or descriptors for it.
    pub fn new(agent: Arc<dyn AgentServices>, mempool: Arc<Mempool>) -> std::io::Result<Arc<Self>> {
        let service = Arc::new(Self {
            agent,
            mempool,
            exit_watcher: exit_watcher::ProgramExitWatcher::start()?,
            runs: Mutex::new(HashMap::new()),
            ended: tenants::EndedRuns::default(),
            // Numbers stay unique over restarts, as the keeper still knows those of before.
            next_program: AtomicU64::new(u64::from(std::process::id()) << 32),
            unserved_slabs: Mutex::default(),
            sampler: OnceLock::new(),
            has_new_programs: AtomicBool::new(false),
        });
        let sampler = sampler::start(&service)?;
        let _ = service.sampler.set(sampler);
        Ok(service)
    }

    /// Open a run.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn open_run(
        self: &Arc<Self>,
        name: &str,
        limit_bytes: u64,
        replicas: usize,
        owner: BorrowedFd<'_>,
        tenant: u32,
    ) -> Result<Arc<Run>, String> {
        if limit_bytes < aquifer_pager::LIMIT_BYTES_MIN {
            return Err(format!(
                "a limit of {limit_bytes} bytes is too small for any program: give at least {} (--local 8M)",
                aquifer_pager::LIMIT_BYTES_MIN
            ));
        }
        if !(1..=REPLICAS_MAX).contains(&replicas) {
            return Err(format!("--replicas {replicas} is not possible: give 1 to {REPLICAS_MAX}"));
        }
        let mut runs = self.lock();
        if runs.len() >= RUNS_MAX {
            return Err(format!("this agent already serves {RUNS_MAX} runs: end some first"));
        }
        if runs.values().filter(|run| run.tenant() == tenant).count() >= RUNS_PER_TENANT_MAX {
            return Err(format!("user {tenant} has {RUNS_PER_TENANT_MAX} runs already: end some first"));
        }
        let run = Run::open(self, name, limit_bytes, replicas, owner, tenant)
            .map_err(|error| format!("no memory for another run: {error}"))?;
        runs.insert(run.token(), Arc::clone(&run));
        Ok(run)
    }

    /// The run with this token.
    #[must_use]
    pub fn run(&self, token: RunToken) -> Option<Arc<Run>> {
        self.lock().get(&token).cloned()
    }

    /// All runs.
    #[must_use]
    pub fn runs(&self) -> Vec<Arc<Run>> {
        self.lock().values().cloned().collect()
    }

    /// Forget a run that has ended.
    pub fn close_run(&self, run: &Run) {
        let mut runs = self.lock();
        if runs.remove(&run.token()).is_some() {
            // Under the lock, so that nobody counts it twice or not at all.
            self.ended.add(run);
        }
        drop(runs);
        run.close();
    }

    /// What each tenant has and had.
    #[must_use]
    pub fn tenants(&self) -> Vec<TenantReport> {
        let runs = self.lock();
        self.ended.with(runs.values())
    }

    /// The host's mempool.
    #[must_use]
    pub fn mempool(&self) -> &Arc<Mempool> {
        &self.mempool
    }

    /// A program has come: a fresh one can fill its limit before the sampler would look by itself.
    pub(crate) fn announce_program(&self) {
        self.has_new_programs.store(true, Relaxed);
        if let Some(sampler) = self.sampler.get() {
            sampler.unpark();
        }
    }

    pub(crate) fn next_program(&self) -> u64 {
        self.next_program.fetch_add(1, Relaxed)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<RunToken, Arc<Run>>> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
