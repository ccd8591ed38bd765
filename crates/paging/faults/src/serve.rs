//! The paging service for real programs.
//!
//! One thread per program runs its monitor, one thread per run is its sender, and one thread per
//! tenant samples its programs.
//!
//! - `attach`: the hello of a program or of a forked child.
//! - `program`: one program. `monitor_thread` is its thread, and `edge` its monitor's interface to
//!   the kernel and the pool.
//! - `run`: the shared state of the programs of one `aquifer run`. `sender` is its thread.
//! - `restore`: resumption of runs from the items of the keeper; `records` are their records.
//! - `tenants`: statistics of each tenant over all its runs.
//! - `backoff`: waiting for a program's thread that is in the kernel.
//! - `unserved`: memory that has no monitor. `tenant_threads`: one thread per tenant.
//! - `sampler`: measures resident sizes and finds areas to register.

mod attach;
mod attachment;
mod backoff;
mod canary;
mod core_follower;
mod count;
mod edge;
mod elastic;
mod excess;
mod exit_watcher;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod fuzz_target;
#[cfg(test)]
mod golden_tests;
mod interrupt;
mod monitor_thread;
mod observed;
mod pool_shares;
pub mod priority;
mod process;
mod program;
mod records;
mod resident_estimator;
mod restore;
mod run;
mod sampler;
mod sender;
mod stat;
mod tenant_threads;
mod tenants;
mod thread_search;
mod unpaged;
mod unserved;

use std::collections::HashMap;
use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use aquifer_channel::HoldRefused;
use aquifer_channel::descriptor_shares::{DescriptorShares, ShareExceeded};
use aquifer_ipc::{OpenRun, RunToken, SOCKET_NAME_BYTES, SOCKET_SECRET_BYTES};
use aquifer_keeper::KeeperStore;
use aquifer_pager::{Connector, LIMIT_BYTES_MIN, Mempool, MoveRate, REPLICAS_MAX, SlabSet};
use aquifer_pool::{LeakDetector, NodeId, PoolClient};
use aquifer_report::TenantStatistics;
use parking_lot::Mutex;

pub use attach::AttachError;
pub use pool_shares::{PoolLimits, PoolShares};
pub use program::Program;
pub use restore::RestoredRun;
pub use run::{Run, RunOwner};

/// A number that no program has.
const NO_PROGRAM: u64 = 0;
/// Maximum number of runs that one agent serves at once.
pub const RUNS_MAX: usize = 4096;
/// Maximum number of runs of one user at once, including its subordinate ids.
pub const RUNS_PER_TENANT_MAX: usize = 1024;
/// Number of descriptors of a run without programs: for its slabs, wake-ups, owner and threads.
const RUN_DESCRIPTORS: usize = 12;

/// Advice for a full pool of a running cluster, as the end of an error message.
pub const MORE_MEMORY_ADVICE: &str = "start another memory node (aquifer node --id NUMBER --memory SIZE), \
    or restart the cluster with more memory (aquifer down, then aquifer up --memory SIZE)";

/// The reason why a run cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenRunError {
    /// The limit is below [`LIMIT_BYTES_MIN`].
    #[error(
        "a limit of {limit_bytes} bytes is too small for any program: \
         give at least {LIMIT_BYTES_MIN} (--local 8M)"
    )]
    LimitTooSmall {
        /// The requested limit.
        limit_bytes: u64,
    },
    /// The number of replicas is invalid.
    #[error("--replicas {0} is not possible: give 1 to {REPLICAS_MAX}")]
    Replicas(usize),
    /// No policy of backups has this code.
    #[error("{0} is the code of no policy of backups")]
    Backup(u8),
    /// The agent has [`RUNS_MAX`] runs.
    #[error("this agent already serves {RUNS_MAX} runs: end some first")]
    TooManyRuns,
    /// The tenant has [`RUNS_PER_TENANT_MAX`] runs.
    #[error("user {0} has {RUNS_PER_TENANT_MAX} runs already: end some first")]
    TooManyRunsOfTenant(u32),
    /// The tenant has used up its share of the agent's descriptors.
    #[error(transparent)]
    TooManyDescriptors(#[from] ShareExceeded),
    /// The keeper does not hold the run.
    #[error(transparent)]
    NotHeld(#[from] HoldRefused),
    /// Memory, threads or descriptors for the run cannot be created.
    #[error("no memory for another run: {0}")]
    System(#[from] std::io::Error),
}

/// The answer to a connect-back request of a forked child ([`aquifer_ipc::connect_back_page`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnectBackName {
    /// The name of the sockets, in several network namespaces.
    pub name: [u8; SOCKET_NAME_BYTES],
    /// The secret that the agent sends first on each connection there.
    pub secret: [u8; SOCKET_SECRET_BYTES],
}

/// A socket at which a forked child can connect after a connect-back request.
#[derive(Debug)]
pub struct ConnectBackSocket {
    /// The user of the child's run.
    pub tenant: u32,
    /// The user that the child had at its fork; `u32::MAX` if that is not known.
    pub user: u32,
    /// The name and the secret of the socket.
    pub connect_back: ConnectBackName,
    /// The listening socket.
    pub listener: OwnedFd,
}

/// Checks that a process of this user can serve the faults of programs.
///
/// # Errors
/// If the kernel does not permit it, or lacks a feature.
pub fn can_serve_programs() -> std::io::Result<()> {
    crate::uffd::Userfaultfd::create().map(drop)
}

/// The services of the agent that the paging service uses.
pub trait AgentServices: Send + Sync + Debug {
    /// Returns a connector for a tenant's writes of pages with this number of replicas.
    fn connector(&self, tenant: u32, replicas: usize) -> Arc<dyn Connector>;

    /// Returns a connector for a tenant's reads of pages that a program waits for.
    fn fetch_connector(&self, tenant: u32) -> Arc<dyn Connector>;

    /// Returns a pool client of a tenant, with all nodes that are reachable now.
    fn pool(&self, tenant: u32) -> PoolClient;

    /// The leak detection of this host.
    fn leak_detector(&self) -> &LeakDetector;

    /// Returns the nodes that are registered now.
    fn nodes(&self) -> Vec<NodeId>;

    /// Returns the reason why a node cannot be connected to; `None` if no failure is known.
    fn connection_failure(&self) -> Option<String>;

    /// The shares of users in the descriptors of the agent.
    fn descriptors(&self) -> &Arc<DescriptorShares>;

    /// Serves hellos and requests for the device at a socket, for a limited time.
    fn serve_connect_back_socket(&self, socket: ConnectBackSocket);

    /// Closes the sockets of a connect-back request.
    fn end_connect_back(&self, name: &ConnectBackName);

    /// The keeper, which outlives the agent.
    ///
    /// Missing pages never read as zeros as long as the keeper holds the userfaultfd, and another
    /// agent can resume the program.
    fn keeper(&self) -> &dyn KeeperStore;
}

/// The service that pages all programs of one agent.
#[derive(Debug)]
pub struct PagingService {
    pub(crate) agent: Arc<dyn AgentServices>,
    pub(crate) mempool: Arc<Mempool>,
    pub(crate) exit_watcher: Arc<exit_watcher::ProgramExitWatcher>,
    runs: Mutex<HashMap<RunToken, Arc<Run>>>,
    ended: tenants::EndedRuns,
    next_program: AtomicU64,
    /// Slabs of runs that could not be resumed: as ledgers they keep the leak scan from freeing
    /// extents that another agent may resume.
    unserved_slabs: Mutex<Vec<Arc<SlabSet>>>,
    unserved: unserved::UnservedMemories,
    samplers: tenant_threads::TenantThreads,
    unpaged_watches: tenant_threads::TenantThreads,
    pub(crate) connect_back_turns: tenant_threads::TenantTurns,
    pub(crate) pool_shares: Arc<PoolShares>,
    /// The rate at which all runs together move pages off memory that nodes recall.
    pub(crate) move_rate: Arc<MoveRate>,
}

impl PagingService {
    /// Creates a service without programs, and starts its threads.
    ///
    /// # Errors
    /// If threads or descriptors cannot be created.
    pub fn new(
        agent: Arc<dyn AgentServices>,
        mempool: Arc<Mempool>,
        pool_shares: Arc<PoolShares>,
    ) -> std::io::Result<Arc<Self>> {
        let service = Arc::new(Self {
            agent,
            mempool,
            exit_watcher: exit_watcher::ProgramExitWatcher::start()?,
            runs: Mutex::new(HashMap::new()),
            ended: tenants::EndedRuns::default(),
            // The numbers must be unique over restarts, because the keeper still has programs of
            // other agents.
            next_program: AtomicU64::new(u64::from(std::process::id()) << 32),
            unserved_slabs: Mutex::default(),
            unserved: unserved::UnservedMemories::default(),
            samplers: tenant_threads::TenantThreads::new("sampler"),
            unpaged_watches: tenant_threads::TenantThreads::new("unpaged"),
            connect_back_turns: tenant_threads::TenantTurns::default(),
            pool_shares,
            move_rate: Arc::new(MoveRate::of_this_host()),
        });
        Ok(service)
    }

    /// Sets the bytes a second that all runs together move off memory that nodes recall; `None`: no
    /// limit.
    pub fn set_move_rate(&self, bytes_per_second: Option<u64>) {
        self.move_rate.set(bytes_per_second);
    }

    /// Opens a run.
    ///
    /// # Errors
    /// See [`OpenRunError`].
    pub fn open_run(
        self: &Arc<Self>,
        open: &OpenRun,
        owner: RunOwner,
        tenant: u32,
    ) -> Result<Arc<Run>, OpenRunError> {
        let limit_bytes = open.limit_bytes;
        if limit_bytes < LIMIT_BYTES_MIN {
            return Err(OpenRunError::LimitTooSmall { limit_bytes });
        }
        run::policy_of(open)?;
        let descriptors = self.agent.descriptors().charge(tenant, RUN_DESCRIPTORS)?;
        let mut runs = self.runs.lock();
        if runs.len() >= RUNS_MAX {
            return Err(OpenRunError::TooManyRuns);
        }
        if runs.values().filter(|run| run.id_owner() == descriptors.owner()).count() >= RUNS_PER_TENANT_MAX {
            return Err(OpenRunError::TooManyRunsOfTenant(tenant));
        }
        let run = Run::open(self, open, owner, tenant, descriptors)?;
        runs.insert(run.token(), Arc::clone(&run));
        drop(runs);
        // A new user is guaranteed some blocks, so other users may have to free theirs.
        self.wake_block_owners();
        unpaged::announce_run(self, tenant);
        Ok(run)
    }

    /// Returns the run with a token.
    #[must_use]
    pub fn run(&self, token: RunToken) -> Option<Arc<Run>> {
        self.runs.lock().get(&token).cloned()
    }

    /// Wakes the programs whose users must free blocks of the mempool.
    pub(crate) fn wake_block_owners(&self) {
        for run in self.runs() {
            if self.mempool.must_free_block(run.budget.mempool_user()) {
                run.wake_others(NO_PROGRAM, crate::edge::OtherPrograms::AllWithBlocks);
            }
        }
    }

    /// Returns all runs of a tenant.
    pub(crate) fn runs_of(&self, tenant: u32) -> Vec<Arc<Run>> {
        self.runs.lock().values().filter(|run| run.tenant() == tenant).cloned().collect()
    }

    /// Returns all runs.
    #[must_use]
    pub fn runs(&self) -> Vec<Arc<Run>> {
        self.runs.lock().values().cloned().collect()
    }

    /// Removes a run that has ended.
    pub fn close_run(&self, run: &Run) {
        let mut runs = self.runs.lock();
        if runs.remove(&run.token()).is_some() {
            // Must be added with the lock held, so that [`Self::tenants`] counts the run exactly
            // once.
            self.ended.add(run);
        }
        drop(runs);
        run.close();
    }

    /// Returns the statistics of each tenant that has or had a run.
    #[must_use]
    pub fn tenants(&self) -> Vec<TenantStatistics> {
        let runs = self.runs.lock();
        self.ended.with_runs(runs.values())
    }

    /// The host's mempool.
    #[must_use]
    pub fn mempool(&self) -> &Arc<Mempool> {
        &self.mempool
    }

    pub(crate) fn next_program(&self) -> u64 {
        self.next_program.fetch_add(1, Relaxed)
    }
}
