//! The governor of this host's memory: the page cache uses memory that nobody needs, and gives it
//! back when others want it.
//!
//! A thread looks at the available memory of the machine, and of the agent's memory cgroup, ten
//! times a second, and at once when the kernel reports pressure (`pressure`). Part of the memory
//! always stays available (`--keep-free`): it is what programs can use until the governor has
//! noticed and the kernel has the memory back.

mod pressure;

use std::io;
use std::sync::Weak;
use std::time::Duration;

use aquifer_pager::Mempool;

use pressure::PressureWatch;

/// Interval at which the governor looks at the available memory.
const INTERVAL: Duration = Duration::from_millis(100);
/// Part of the memory that stays available by default: 1/`KEPT_FREE_DIVISOR`.
const KEPT_FREE_DIVISOR: u64 = 16;
/// Least bytes that stay available by default.
const KEPT_FREE_MIN: u64 = 64 << 20;
/// Most bytes that stay available by default.
const KEPT_FREE_MAX: u64 = 4 << 30;
/// Pressure counts only while less than this multiple of what stays available is available: a group
/// of processes at a limit of its own has pressure on a machine with much free memory, too.
const PRESSURE_FACTOR: u64 = 4;
/// Part of the mempool that is given back at each report of pressure: 1/`PRESSURE_DIVISOR`.
const PRESSURE_DIVISOR: u64 = 8;
/// Number of intervals after a report of pressure in which the mempool gets no more memory.
const PRESSURE_INTERVALS: u32 = 10;
/// Most memory of a mempool that RDMA devices use. They pin it, so that none can be given back.
const PINNED_BYTES_MAX: u64 = 4 << 30;

/// The memory that stays available by default on a machine, or in a memory cgroup, with `total`
/// bytes.
#[must_use]
pub fn default_keep_free(total: u64) -> u64 {
    (total / KEPT_FREE_DIVISOR).clamp(KEPT_FREE_MIN, KEPT_FREE_MAX)
}

/// The state between two looks at the available memory.
#[derive(Debug)]
struct Governor {
    keep_free: u64,
    /// Most bytes of the mempool for some intervals after a report of pressure.
    under_pressure: Option<(u64, u32)>,
}

impl Governor {
    fn new(keep_free: u64) -> Self {
        Self { keep_free, under_pressure: None }
    }

    /// The number of bytes that the mempool may have, which has `backed` now, while `available` are
    /// available.
    fn mempool_max(&mut self, backed: u64, available: u64, has_pressure: bool) -> u64 {
        if has_pressure && available < self.keep_free.saturating_mul(PRESSURE_FACTOR) {
            self.under_pressure = Some((backed - backed / PRESSURE_DIVISOR, PRESSURE_INTERVALS));
        }
        let affordable = backed.saturating_add(available).saturating_sub(self.keep_free);
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

/// Starts the governor of a mempool. Its thread ends with the mempool.
///
/// # Errors
/// If no thread can be started.
pub(crate) fn start(mempool: Weak<Mempool>, keep_free: u64) -> io::Result<()> {
    let mut pressure = PressureWatch::new(&aquifer_host_memory::pressure_files());
    let mut governor = Governor::new(keep_free);
    let mut errors = Errors::default();
    let run = move || {
        while let Some(mempool) = mempool.upgrade() {
            let has_pressure = pressure.take();
            let adjusted = aquifer_host_memory::available_bytes()
                .and_then(|available| governor.adjust(&mempool, available, has_pressure));
            errors.record(adjusted);
            drop(mempool);
            pressure.wait(INTERVAL);
        }
    };
    std::thread::Builder::new().name("memory-governor".into()).spawn(run)?;
    Ok(())
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
        let mut governor = Governor::new(100);
        assert_eq!(governor.mempool_max(50, 300, false), 250);
        assert_eq!(governor.mempool_max(250, 100, false), 250, "it stays as it is");
        assert_eq!(governor.mempool_max(250, 40, false), 190);
        assert_eq!(governor.mempool_max(250, 0, false), 150);
        assert_eq!(governor.mempool_max(50, 0, false), 0);
    }

    #[test]
    fn pressure_counts_while_little_is_available() {
        let mut governor = Governor::new(100);
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
        let mut governor = Governor::new(100 * MIB);
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
        assert_eq!(default_keep_free(0), KEPT_FREE_MIN);
        assert_eq!(default_keep_free(u64::MAX), KEPT_FREE_MAX);
    }
}
