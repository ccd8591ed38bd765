//! Figures as JSON: for `--stats`, for `aquifer status`.

use std::time::Duration;

use aquifer_extents::{Reach, SessionReport, Sessions, UserReport};
use aquifer_faults::serve::{PagingService, ProgramReport, RunReport, TenantReport};
use serde::{Deserialize, Serialize};

/// Tenants that are told of at once, at most: an answer is one frame.
const STATUS_TENANTS_MAX: usize = 64;

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
    /// The user that it belongs to.
    pub tenant: u32,
    /// `--local`.
    pub limit_bytes: u64,
    /// `--replicas`.
    pub replicas: usize,
    /// Slabs with fewer copies than that, now: what is in them does not bear the death of as many nodes as it should.
    pub degraded_slabs: u64,
    /// Slabs of which a missing copy was made.
    pub copied_slabs: u64,
    /// Damaged pages that were written anew from a good copy.
    pub repaired_pages: u64,
    /// Sparse slabs that were emptied into others.
    pub vacated_slabs: u64,
    /// Pages that were moved for that.
    pub repacked_pages: u64,
    /// Pages that left as they had come from memory nodes, and were not written again.
    pub unchanged_pages: u64,
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
    /// Pages written to memory nodes, each copy counted.
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
            tenant: report.tenant,
            limit_bytes: report.limit_bytes,
            replicas: report.replicas,
            degraded_slabs: report.degraded_slabs,
            copied_slabs: report.copied_slabs,
            repaired_pages: report.repaired_pages,
            vacated_slabs: report.vacated_slabs,
            repacked_pages: report.repacked_pages,
            unchanged_pages: report.unchanged_pages,
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

/// A tenant: the user that its runs belong to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TenantStatistics {
    /// The user's number.
    pub tenant: u32,
    /// Its runs.
    pub runs: usize,
    /// Processes in them.
    pub processes: usize,
    /// Resident memory of those, as sampled.
    pub resident_bytes: u64,
    /// The mempool's blocks that they have.
    pub mempool_bytes: u64,
    /// What they have of memory nodes.
    pub remote_bytes: u64,
    /// Faults served, of runs that are over too, as all that follows.
    pub faults: u64,
    /// Pages read from memory nodes.
    pub remote_reads: u64,
    /// Pages taken out of programs.
    pub evictions: u64,
    /// Pages that could not be read back.
    pub lost_pages: u64,
}

impl From<TenantReport> for TenantStatistics {
    fn from(report: TenantReport) -> Self {
        Self {
            tenant: report.tenant,
            runs: report.runs,
            processes: report.processes,
            resident_bytes: report.resident_bytes,
            mempool_bytes: report.mempool_bytes,
            remote_bytes: report.remote_bytes,
            faults: report.faults,
            remote_reads: report.remote_reads,
            evictions: report.evictions,
            lost_pages: report.lost_pages,
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
    /// Tenants that have runs or had some, at most 64.
    pub tenants: Vec<TenantStatistics>,
    /// Users of extents, at most 64.
    #[serde(default)]
    pub users: Vec<UserStatistics>,
    /// Sessions, those with most extents first, at most 64.
    #[serde(default)]
    pub sessions: Vec<SessionStatistics>,
    /// Runs.
    pub runs: Vec<RunStatistics>,
}

/// A program that has extents.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SessionStatistics {
    /// The user's number.
    pub tenant: u32,
    /// Its process.
    pub pid: u32,
    /// Extents that it has.
    pub extents: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes that are kept ready for it.
    pub stocked_bytes: u64,
    /// Requests that were answered.
    pub requests: u64,
}

/// What a user's sessions have together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct UserStatistics {
    /// The user's number.
    pub tenant: u32,
    /// Bytes of the pool, what is kept ready included.
    pub taken_bytes: u64,
    /// Requests that were refused because a key opens nothing.
    pub refused: u64,
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

/// Bytes of the mempool, and of them in use.
pub(crate) fn mempool_bytes(service: &PagingService) -> (u64, u64) {
    let block = (aquifer_pager::BLOCK_PAGES * aquifer_pager::PAGE_BYTES) as u64;
    let mempool = service.mempool();
    (mempool.blocks() as u64 * block, (mempool.blocks() - mempool.free_block_count()) as u64 * block)
}

/// Tenants, those with most runs and faults first, as many as an answer holds.
fn tenants(service: &PagingService, may_see: impl Fn(u32) -> bool) -> Vec<TenantStatistics> {
    let mut tenants = service.tenants();
    tenants.retain(|tenant| may_see(tenant.tenant));
    tenants.sort_by_key(|tenant| std::cmp::Reverse((tenant.runs, tenant.faults)));
    tenants.truncate(STATUS_TENANTS_MAX);
    tenants.into_iter().map(Into::into).collect()
}

fn session_statistics(sessions: &Sessions, may_see: impl Fn(u32) -> bool) -> Vec<SessionStatistics> {
    let mut reports = sessions.sessions();
    reports.retain(|session| may_see(session.tenant));
    reports.sort_by_key(|session| std::cmp::Reverse(session.bytes));
    reports.truncate(STATUS_TENANTS_MAX);
    let statistics = |SessionReport { tenant, pid, extents, bytes, stocked_bytes, requests }| {
        SessionStatistics { tenant, pid, extents, bytes, stocked_bytes, requests }
    };
    reports.into_iter().map(statistics).collect()
}

fn users(sessions: &Sessions, may_see: impl Fn(u32) -> bool) -> Vec<UserStatistics> {
    let mut users = sessions.users();
    users.retain(|user| may_see(user.tenant));
    users.sort_by_key(|user| std::cmp::Reverse(user.taken_bytes));
    users.truncate(STATUS_TENANTS_MAX);
    let statistics =
        |UserReport { tenant, taken_bytes, refused }| UserStatistics { tenant, taken_bytes, refused };
    users.into_iter().map(statistics).collect()
}

/// The tenants and their runs, as far as they are for whoever asks, and the mempool.
#[must_use]
pub fn status(
    service: &PagingService,
    sessions: &Sessions,
    nodes: &crate::nodes::Nodes,
    may_see: impl Fn(u32) -> bool,
) -> AgentStatus {
    let (mempool_bytes, mempool_used_bytes) = mempool_bytes(service);
    let mut pool = nodes.pool(rustix::process::geteuid().as_raw());
    let numbers: Vec<_> = pool.nodes().collect();
    AgentStatus {
        host: nodes.host().0,
        mempool_bytes,
        mempool_used_bytes,
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
        tenants: tenants(service, &may_see),
        sessions: session_statistics(sessions, &may_see),
        users: users(sessions, &may_see),
        runs: service
            .runs()
            .iter()
            .filter(|run| may_see(run.tenant()))
            .map(|run| run.report().into())
            .collect(),
    }
}
