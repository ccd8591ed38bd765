//! Elastic runs: what the agent must know to lend them idle memory of the host.

use std::sync::atomic::Ordering::Relaxed;

use aquifer_pager::Budget;

use super::run::Run;

/// Maximum number of programs of a run whose processor time is read.
const PROGRAMS_MAX: usize = 64;
/// Index of the user time of a process in the fields of `/proc/PID/stat` that follow its name; that
/// in the kernel is the next one.
const USER_TIME_AT: usize = 11;

impl Run {
    /// The limit while the host has idle memory, in bytes; `None` if the run is not elastic.
    #[must_use]
    pub fn limit_max_bytes(&self) -> Option<u64> {
        let max = self.limit_max_bytes.load(Relaxed);
        (max > self.limit_bytes.load(Relaxed)).then_some(max)
    }

    /// The budget of the run.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// The processor time of the run's programs in ticks of the kernel, of at most 64 programs.
    ///
    /// It falls when a program ends.
    #[must_use]
    pub fn processor_ticks(&self) -> u64 {
        let programs = self.programs();
        let stats = programs.iter().take(PROGRAMS_MAX).filter_map(|program| program.process()?.read("stat"));
        stats.filter_map(|stat| processor_ticks(&String::from_utf8_lossy(&stat))).sum()
    }

    /// The number of faults of the run's programs that were served.
    #[must_use]
    pub fn fault_count(&self) -> u64 {
        self.stats().faults.load(Relaxed)
    }

    /// The process id of one of the run's programs.
    #[must_use]
    pub fn some_pid(&self) -> Option<u32> {
        self.programs().first().map(|program| program.pid()).filter(|pid| *pid != 0)
    }

    /// Bytes of the page cache that the run has.
    pub(super) fn cached_bytes(&self) -> u64 {
        self.service.upgrade().map_or(0, |service| service.mempool.cached_bytes_of(&self.slabs))
    }
}

/// The processor time in the text of `/proc/PID/stat`.
fn processor_ticks(stat: &str) -> Option<u64> {
    // The name of the process may contain spaces and parentheses.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace().skip(USER_TIME_AT);
    let (user, system): (u64, u64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    user.checked_add(system)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_time_is_found_behind_any_name() {
        let stat = "7 (a) b) 9 (c) R 1 7 7 0 -1 4194304 100 0 0 0 250 50 0 0 20 0 1 0 99 1000 200";
        assert_eq!(processor_ticks(stat), Some(300));
        for odd in ["", "7 (a) R 1", "7 a R 1 7 7 0 -1 0 100 0 0 0 250 50"] {
            assert_eq!(processor_ticks(odd), None, "{odd}");
        }
        let own = std::fs::read_to_string("/proc/self/stat").expect("this process has one");
        assert!(processor_ticks(&own).is_some());
    }
}
