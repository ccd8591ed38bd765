//! The memory governor of this host: lends idle memory to the page cache and to elastic runs, and
//! takes it back when other programs need it.
//!
//! A thread looks at the available memory of the machine, and of the agent's memory cgroup, ten
//! times a second, and at once when the kernel reports pressure ([`PressureWatch`]). Part of the
//! memory always stays available (`--keep-free`): it is what programs can use until the governor
//! has noticed and the kernel has the memory back.
//!
//! The page cache goes first: a gibibyte of it is returned in a tenth of a second. Pages of elastic
//! runs must be evicted, which takes seconds, so these runs have at most a quarter of what is idle
//! (`borrowing`).

mod borrowing;
mod elastic_runs;
mod mutation;
#[cfg(test)]
mod simulator_tests;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;

use aquifer_faults::serve::PagingService;
use aquifer_host_memory::PressureWatch;
use aquifer_pager::Mempool;
use rustix::event::{EventfdFlags, eventfd};

use elastic_runs::ElasticRuns;
use mutation::Mutation;

/// Interval at which the governor looks at the available memory.
const INTERVAL: Duration = Duration::from_millis(100);
/// Part of the memory that stays available by default: 1/`KEPT_FREE_DIVISOR`.
const KEPT_FREE_DIVISOR: u64 = 16;
/// Least bytes that stay available by default, if that is not more than half of the memory.
const KEPT_FREE_MIN: u64 = 256 << 20;
/// Most bytes that stay available by default.
const KEPT_FREE_MAX: u64 = 4 << 30;
/// Pressure counts only while less than this multiple of what stays available is available: a group
/// of processes at a limit of its own has pressure on a machine with much free memory, too.
const PRESSURE_FACTOR: u64 = 4;
/// Part of the mempool that is returned at each report of pressure: 1/`PRESSURE_DIVISOR`.
const PRESSURE_DIVISOR: u64 = 8;
/// Number of intervals after a report of pressure in which the mempool gets no more memory.
const PRESSURE_INTERVALS: u32 = 10;
/// Most memory of a mempool that RDMA devices use. They pin it, so that none can be returned.
const PINNED_BYTES_MAX: u64 = 4 << 30;

/// The memory that stays available by default on a machine, or in a memory cgroup, with `total`
/// bytes.
#[must_use]
pub fn default_keep_free(total: u64) -> u64 {
    (total / KEPT_FREE_DIVISOR).clamp(KEPT_FREE_MIN, KEPT_FREE_MAX).min(total / 2)
}

/// The size of the mempool by the available memory.
#[derive(Debug)]
struct CacheGovernor {
    keep_free: u64,
    /// Most bytes of the mempool for some intervals after a report of pressure.
    under_pressure: Option<(u64, u32)>,
}

impl CacheGovernor {
    fn new(keep_free: u64) -> Self {
        Self { keep_free, under_pressure: None }
    }

    /// The number of bytes that the mempool may have, which has `backed` now, while `available` are
    /// available.
    fn mempool_max(&mut self, backed: u64, available: u64, has_pressure: bool) -> u64 {
        if has_pressure
            && !Mutation::IgnorePressure.is_active()
            && available < self.keep_free.saturating_mul(PRESSURE_FACTOR)
        {
            self.under_pressure = Some((backed - backed / PRESSURE_DIVISOR, PRESSURE_INTERVALS));
        }
        let kept_free = if Mutation::FillAll.is_active() { 0 } else { self.keep_free };
        let affordable = backed.saturating_add(available).saturating_sub(kept_free);
        let Some((max, intervals)) = self.under_pressure else { return affordable };
        self.under_pressure = intervals.checked_sub(1).map(|left| (max, left));
        affordable.min(max)
    }

    /// Sets the size of the mempool by the available memory. Memory above it returns to the system
    /// before this call does.
    fn adjust(&mut self, mempool: &Mempool, available: u64, has_pressure: bool) -> io::Result<()> {
        let max = self.mempool_max(mempool.backed_bytes(), available, has_pressure);
        if mempool.memory().is_pinned() {
            mempool.set_backed_max(max.min(PINNED_BYTES_MAX));
            return Ok(());
        }
        mempool.set_backed_max(max);
        while mempool.backed_bytes() > max && mempool.release_block_memory()? {}
        Ok(())
    }
}

/// The running governor.
#[derive(Debug)]
pub(crate) struct MemoryGovernor {
    keep_free: u64,
    /// The memory of the machine that was available at the last look, in bytes.
    available: AtomicU64,
    /// Written to have the thread look at once.
    wake: OwnedFd,
}

impl MemoryGovernor {
    /// Starts the governor, whose thread ends with the service.
    ///
    /// # Errors
    /// If no thread or descriptor can be created.
    pub fn start(service: &Arc<PagingService>, keep_free: u64) -> io::Result<Arc<Self>> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let governor = Arc::new(Self { keep_free, available: AtomicU64::new(0), wake });
        let for_thread = GovernorThread {
            governor: Arc::clone(&governor),
            cache: CacheGovernor::new(keep_free),
            runs: ElasticRuns::new(keep_free),
            errors: Errors::default(),
        };
        let service = Arc::downgrade(service);
        std::thread::Builder::new().name("memory-governor".into()).spawn(move || for_thread.run(&service))?;
        Ok(governor)
    }

    /// Has the governor look at once, because a run has become elastic.
    pub fn look_now(&self) {
        // A write to an eventfd fails only when its count is full, and then it is readable.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// The memory of the machine that was available at the last look, in bytes.
    pub fn available_bytes(&self) -> u64 {
        self.available.load(Relaxed)
    }

    /// The memory of the machine that stays available, in bytes.
    pub fn keep_free_bytes(&self) -> u64 {
        self.keep_free
    }
}

/// The governor's thread.
#[derive(Debug)]
struct GovernorThread {
    governor: Arc<MemoryGovernor>,
    cache: CacheGovernor,
    runs: ElasticRuns,
    errors: Errors,
}

impl GovernorThread {
    fn run(mut self, service: &Weak<PagingService>) {
        let mut pressure = PressureWatch::new(&aquifer_host_memory::pressure_files());
        while let Some(service) = service.upgrade() {
            let looked = self.look(&service, pressure.consume_report());
            self.errors.record(looked);
            drop(service);
            pressure.wait(INTERVAL, Some(self.governor.wake.as_fd()));
            // The read fails if the governor was not woken.
            let _ = rustix::io::read(&self.governor.wake, &mut [0; 8]);
        }
    }

    /// Sets the sizes of the cache and of elastic runs by the memory that is available now.
    fn look(&mut self, service: &PagingService, has_pressure: bool) -> io::Result<()> {
        let of_machine = aquifer_host_memory::available_bytes_of_machine()?;
        self.governor.available.store(of_machine, Relaxed);
        let mempool = service.mempool();
        let returnable = if mempool.memory().is_pinned() { 0 } else { mempool.unowned_backed_bytes() };
        self.runs.adjust(&service.runs(), of_machine.saturating_add(returnable));
        self.cache.adjust(mempool, aquifer_host_memory::available_bytes()?, has_pressure)
    }
}

/// The errors of the governor, of which only the first is logged until it has succeeded again.
#[derive(Debug, Default)]
struct Errors {
    is_failing: bool,
}

impl Errors {
    fn record(&mut self, adjusted: io::Result<()>) {
        if let Err(error) = &adjusted
            && !self.is_failing
        {
            tracing::error!(%error, "cannot adjust the page cache to the memory of this machine");
        }
        self.is_failing = adjusted.is_err();
    }
}

#[cfg(test)]
mod tests {
    use aquifer_pager::{BLOCK_PAGES, MempoolUser, PAGE_BYTES};

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_mempool_may_have_what_is_available_beyond_what_stays_free() {
        let mut governor = CacheGovernor::new(100);
        assert_eq!(governor.mempool_max(50, 300, false), 250);
        assert_eq!(governor.mempool_max(250, 100, false), 250, "it stays as it is");
        assert_eq!(governor.mempool_max(250, 40, false), 190);
        assert_eq!(governor.mempool_max(250, 0, false), 150);
        assert_eq!(governor.mempool_max(50, 0, false), 0);
    }

    #[test]
    fn pressure_counts_while_little_is_available() {
        let mut governor = CacheGovernor::new(100);
        assert_eq!(governor.mempool_max(800, 400, true), 1100, "much is available");
        assert_eq!(governor.mempool_max(800, 399, true), 700);
        for _ in 0..PRESSURE_INTERVALS {
            assert_eq!(governor.mempool_max(700, 500, false), 700, "it does not grow");
        }
        assert_eq!(governor.mempool_max(700, 500, false), 1100);
    }

    #[test]
    fn a_mempool_gives_its_memory_back() {
        let block = (BLOCK_PAGES * PAGE_BYTES) as u64;
        let mempool = Mempool::new(usize::try_from(8 * block).unwrap()).unwrap();
        let user = MempoolUser::default();
        let blocks: Vec<_> = std::iter::from_fn(|| mempool.allocate(&user, 1)).collect();
        blocks.iter().for_each(|block| mempool.memory().write(block.slot(0).offset(), &[1; 64]));
        blocks[2..].iter().for_each(|block| mempool.free(&user, *block));
        let mut governor = CacheGovernor::new(100 * MIB);
        governor.adjust(&mempool, 100 * MIB, false).unwrap();
        assert_eq!(mempool.backed_bytes(), 8 * block, "enough is available");
        governor.adjust(&mempool, 100 * MIB - 3 * block, false).unwrap();
        assert_eq!(mempool.backed_bytes(), 5 * block);
        governor.adjust(&mempool, 0, false).unwrap();
        assert_eq!(mempool.backed_bytes(), 2 * block, "the blocks in use stay");
        assert_eq!(mempool.memory().allocated_bytes().unwrap(), 2 * PAGE_BYTES as u64);
    }

    #[test]
    fn a_sixteenth_of_the_memory_stays_available() {
        assert_eq!(default_keep_free(16 << 30), 1 << 30);
        assert_eq!(default_keep_free(1 << 30), KEPT_FREE_MIN);
        assert_eq!(default_keep_free(256 << 20), 128 << 20, "no more than half");
        assert_eq!(default_keep_free(u64::MAX), KEPT_FREE_MAX);
    }
}
