//! The statistics of a run with a swap device: the final ones, and reports to the agent.

use std::fs;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use aquifer_channel::peer::peer_credentials;
use aquifer_host::cluster_access::SwapReport;
use aquifer_pager::{PAGE_BYTES, RecalledBytes};
use aquifer_report::{LatencyUs, ProgramStatistics, RecalledRunMemory, RunStatistics};

use super::DeviceServer;

/// Longest time between two reports.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of processes in a report, which is one frame.
const PROGRAMS_MAX: usize = 256;
/// Maximum length of the program's name in a report, in bytes.
const NAME_BYTES_MAX: usize = 1024;

/// The last report to the agent.
#[derive(Debug, Default)]
pub(super) struct Reports {
    /// Process id of `aquifer run`.
    runner: u32,
    /// The time of the report, and the processes of the run at that time.
    last: Option<(Instant, Vec<u32>)>,
}

impl Reports {
    /// Sets the process at the other end of `run`.
    pub(super) fn set_runner(&mut self, run: &OwnedFd) {
        self.runner = peer_credentials(run).map_or(0, |peer| peer.pid);
    }

    /// Requires a report at the next turn.
    pub(super) fn require(&mut self) {
        self.last = None;
    }
}

impl DeviceServer {
    /// Reports to the agent if it has no report, if processes have started or ended, and otherwise
    /// once per [`REPORT_INTERVAL`].
    pub(super) fn report(&mut self) {
        let processes = self.cgroup.processes().unwrap_or_default();
        let is_new =
            |(at, reported): &(Instant, Vec<u32>)| at.elapsed() < REPORT_INTERVAL && *reported == processes;
        if self.reports.last.as_ref().is_some_and(is_new) && !self.agent.needs_first_report() {
            return;
        }
        let mut statistics = self.statistics();
        statistics.name.truncate(statistics.name.floor_char_boundary(NAME_BYTES_MAX));
        statistics.processes = processes.len();
        statistics.programs = processes.iter().take(PROGRAMS_MAX).filter_map(|pid| program(*pid)).collect();
        self.reports.last = Some((Instant::now(), processes));
        let report = SwapReport {
            host: self.membership.host().0,
            runner: self.reports.runner,
            cgroup: self.record.name().to_owned(),
            least_limit_bytes: self.limit.least_bytes(),
            statistics,
        };
        self.agent.report(&report);
    }

    /// The statistics of the run, without its processes.
    pub(super) fn statistics(&self) -> RunStatistics {
        let usage = self.cgroup.usage().unwrap_or_default();
        let stats = self.volume.stats();
        let us = |ns: u64| Duration::from_nanos(ns).as_secs_f64() * 1e6;
        let [p50, p99, p999] = stats.read_latency_ns.map(us);
        RunStatistics {
            name: self.name.clone(),
            tenant: rustix::process::geteuid().as_raw(),
            limit_bytes: self.limit.bytes(),
            replicas: 1,
            vacated_slabs: stats.vacated_slabs,
            repacked_pages: stats.repacked_pages,
            moved_bytes: stats.moved_bytes,
            backup: String::new(),
            disk_bytes: 0,
            displaced_slabs: 0,
            disk_errors: 0,
            recalled: self.volume.recalled().into_iter().map(show_recalled).collect(),
            swap_bytes: Some(self.volume.bytes()),
            faults: usage.major_faults,
            zero_pages: stats.zero_pages,
            mempool_hits: stats.mempool_hits,
            staging_hits: stats.staging_hits,
            cache_hits: stats.cache_hits,
            remote_reads: stats.remote_reads,
            remote_read_trips: stats.remote_read_trips,
            remote_writes: stats.remote_writes,
            remote_write_trips: stats.remote_write_trips,
            evictions: stats.written_pages,
            lost_pages: stats.lost_pages,
            resident_bytes: usage.anonymous_bytes,
            resident_peak_bytes: usage.memory_peak_bytes,
            mempool_bytes: stats.mempool_bytes,
            remote_bytes: stats.remote_bytes,
            remote_peak_bytes: stats.remote_peak_bytes,
            fault_latency_us: LatencyUs { p50, p99, p999 },
            ..RunStatistics::default()
        }
    }
}

fn show_recalled(recalled: RecalledBytes) -> RecalledRunMemory {
    let RecalledBytes { node, bytes, only_copy_bytes } = recalled;
    RecalledRunMemory { node: node.0, bytes, only_copy_bytes }
}

/// The kernel's statistics of a process; `None` if it has ended.
fn program(pid: u32) -> Option<ProgramStatistics> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // "12 (name with ) in it) S …": the name ends at the last parenthesis.
    let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    Some(ProgramStatistics {
        pid,
        faults: number(MAJOR_FAULTS)?,
        held_bytes: number(RESIDENT_PAGES)? * PAGE_BYTES as u64,
        ..ProgramStatistics::default()
    })
}

/// Fields of `/proc/PID/stat` after the name: numbers 12 and 24 in proc(5).
const MAJOR_FAULTS: usize = 9;
const RESIDENT_PAGES: usize = 21;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_kernel_counts() {
        let own = program(std::process::id()).expect("this process is there");
        assert!(own.held_bytes > 1 << 20, "{own:?}");
        assert_eq!(program(u32::MAX), None);
    }
}
