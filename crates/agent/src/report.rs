//! Figures as JSON: for `--stats`, for `aquifer status`.

use std::time::Duration;

use aquifer_faults::serve::{ProgramReport, RunReport, Service};
use serde::{Deserialize, Serialize};

/// Fault latency in microseconds, measured by the agent from hearing of a fault to its page's being there.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct LatencyUs {
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
}

/// A process of a run.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ProgramStatistics {
    /// Its process id; 0 while unknown.
    pub pid: u32,
    /// Pages of it that are resident and counted.
    pub held_bytes: u64,
    /// Faults served.
    pub faults: u64,
    /// Pages read from memory nodes.
    pub remote_reads: u64,
    /// Pages taken out of it.
    pub evictions: u64,
    /// Pages that could not be read back.
    pub lost_pages: u64,
}

impl From<ProgramReport> for ProgramStatistics {
    fn from(report: ProgramReport) -> Self {
        let ProgramReport { pid, held_bytes, faults, remote_reads, evictions, lost_pages } = report;
        Self { pid, held_bytes, faults, remote_reads, evictions, lost_pages }
    }
}

/// What `aquifer run --stats` writes.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RunStatistics {
    /// The program.
    pub name: String,
    /// `--local`.
    pub limit_bytes: u64,
    /// Processes of the run alive now.
    pub processes: usize,
    /// Each of them.
    pub programs: Vec<ProgramStatistics>,
    /// Faults served.
    pub faults: u64,
    /// Pages filled with zeros.
    pub zero_pages: u64,
    /// Pages filled from the reclaimable queue of the mempool.
    pub mempool_hits: u64,
    /// Pages filled from the staging queue of the mempool.
    pub staging_hits: u64,
    /// Pages read from memory nodes.
    pub remote_reads: u64,
    /// READs posted for them.
    pub remote_read_trips: u64,
    /// Of `remote_reads`, those filled before they were asked for.
    pub prefetched: u64,
    /// Pages written to memory nodes.
    pub remote_writes: u64,
    /// WRITEs posted for them.
    pub remote_write_trips: u64,
    /// Pages taken out of the program.
    pub evictions: u64,
    /// Pages that could not be read back.
    pub lost_pages: u64,
    /// Anonymous resident memory now, as sampled.
    pub resident_bytes: u64,
    /// The most that was sampled.
    pub resident_peak_bytes: u64,
    /// The mempool's blocks in use now.
    pub mempool_bytes: u64,
    /// Taken from memory nodes now.
    pub remote_bytes: u64,
    /// The most there ever was.
    pub remote_peak_bytes: u64,
    /// Latency.
    pub fault_latency_us: LatencyUs,
}

impl From<RunReport> for RunStatistics {
    fn from(report: RunReport) -> Self {
        let us = |ns: u64| Duration::from_nanos(ns).as_secs_f64() * 1e6;
        let [p50, p99, p999] = report.latency_ns.map(us);
        Self {
            name: report.name,
            limit_bytes: report.limit_bytes,
            processes: report.programs.len(),
            programs: report.programs.into_iter().map(Into::into).collect(),
            faults: report.faults,
            zero_pages: report.zero_pages,
            mempool_hits: report.mempool_hits,
            staging_hits: report.staging_hits,
            remote_reads: report.remote_reads.0,
            remote_read_trips: report.remote_reads.1,
            prefetched: report.prefetched,
            remote_writes: report.remote_writes.1,
            remote_write_trips: report.remote_writes.0,
            evictions: report.evictions,
            lost_pages: report.lost_pages,
            resident_bytes: report.resident_bytes.0,
            resident_peak_bytes: report.resident_bytes.1,
            mempool_bytes: report.mempool_bytes,
            remote_bytes: report.remote_bytes.0,
            remote_peak_bytes: report.remote_bytes.1,
            fault_latency_us: LatencyUs { p50, p99, p999 },
        }
    }
}

/// What `aquifer status` asks an agent for.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct AgentStatus {
    /// This host's number in the cluster.
    pub host: u16,
    /// Bytes of the mempool, and of them in use.
    pub mempool_bytes: u64,
    /// In use.
    pub mempool_used_bytes: u64,
    /// Memory nodes that it knows.
    pub nodes: Vec<NodeStatus>,
    /// Runs.
    pub runs: Vec<RunStatistics>,
}

/// A memory node as an agent sees it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Its number.
    pub id: u16,
    /// Bytes that it lends.
    pub memory_bytes: u64,
    /// Of them free.
    pub free_bytes: u64,
}

/// The runs and the mempool.
#[must_use]
pub fn status(host: u16, service: &Service, nodes: &crate::nodes::Nodes) -> AgentStatus {
    let block = (aquifer_pager::BLOCK_PAGES * aquifer_pager::PAGE_BYTES) as u64;
    let mempool = service.mempool();
    let mut pool = nodes.pool();
    let numbers: Vec<_> = pool.nodes().collect();
    AgentStatus {
        host,
        mempool_bytes: mempool.blocks() as u64 * block,
        mempool_used_bytes: (mempool.blocks() - mempool.free_blocks()) as u64 * block,
        nodes: numbers
            .into_iter()
            .map(|node| {
                if let Err(error) = pool.refresh(node) {
                    tracing::debug!(node = node.0, %error, "a node does not tell what it has free");
                }
                NodeStatus {
                    id: node.0,
                    memory_bytes: pool.total_bytes(node),
                    free_bytes: pool.free_bytes(node),
                }
            })
            .collect(),
        runs: service.runs().iter().map(|run| run.report().into()).collect(),
    }
}
