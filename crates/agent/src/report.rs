//! Statistics of the agent's services, as [`aquifer_host::report`] defines them.

use std::time::Duration;

use aquifer_extents::{SessionReport, SessionService, UserReport};
use aquifer_faults::serve::{PagingService, ProgramReport, RunReport, TenantReport};
use aquifer_host::nodes::NodeRegistry;
use aquifer_host::report::{
    AgentStatus, LatencyUs, NodeStatus, ProgramStatistics, RunStatistics, SessionStatistics,
    TenantStatistics, UserStatistics,
};

/// Most tenants, users and sessions in an answer, which is one frame.
const STATUS_ENTRIES_MAX: usize = 64;

/// The statistics of one process of a run.
fn program_statistics(report: ProgramReport) -> ProgramStatistics {
    let ProgramReport { pid, held_bytes, faults, remote_reads, evictions, lost_pages } = report;
    ProgramStatistics { pid, held_bytes, faults, remote_reads, evictions, lost_pages }
}

/// The statistics of a run.
pub(crate) fn run_statistics(report: RunReport) -> RunStatistics {
    let us = |ns: u64| Duration::from_nanos(ns).as_secs_f64() * 1e6;
    let [p50, p99, p999] = report.latency_ns.map(us);
    RunStatistics {
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
        programs: report.programs.into_iter().map(program_statistics).collect(),
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

/// The statistics of a tenant.
fn tenant_statistics(report: TenantReport) -> TenantStatistics {
    TenantStatistics {
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

/// The largest size of the mempool and its blocks in use, in bytes.
pub(crate) fn mempool_bytes(service: &PagingService) -> (u64, u64) {
    let block_bytes = (aquifer_pager::BLOCK_PAGES * aquifer_pager::PAGE_BYTES) as u64;
    let mempool = service.mempool();
    let used_blocks = mempool.blocks() - mempool.free_block_count();
    (mempool.blocks() as u64 * block_bytes, used_blocks as u64 * block_bytes)
}

/// The statistics of tenants, those with the most runs and faults first.
fn all_tenant_statistics(service: &PagingService, may_see: impl Fn(u32) -> bool) -> Vec<TenantStatistics> {
    let mut tenants = service.tenants();
    tenants.retain(|tenant| may_see(tenant.tenant));
    tenants.sort_by_key(|tenant| std::cmp::Reverse((tenant.runs, tenant.faults)));
    tenants.truncate(STATUS_ENTRIES_MAX);
    tenants.into_iter().map(tenant_statistics).collect()
}

/// The statistics of sessions, those with the most bytes first.
fn session_statistics(sessions: &SessionService, may_see: impl Fn(u32) -> bool) -> Vec<SessionStatistics> {
    let mut reports = sessions.sessions();
    reports.retain(|session| may_see(session.tenant));
    reports.sort_by_key(|session| std::cmp::Reverse(session.bytes));
    reports.truncate(STATUS_ENTRIES_MAX);
    let statistics = |SessionReport { tenant, pid, extents, bytes, stocked_bytes, requests }| {
        SessionStatistics { tenant, pid, extents, bytes, stocked_bytes, requests }
    };
    reports.into_iter().map(statistics).collect()
}

/// The statistics of users of extents, those with the most bytes first.
fn user_statistics(sessions: &SessionService, may_see: impl Fn(u32) -> bool) -> Vec<UserStatistics> {
    let mut users = sessions.users();
    users.retain(|user| may_see(user.tenant));
    users.sort_by_key(|user| std::cmp::Reverse(user.allocated_bytes));
    users.truncate(STATUS_ENTRIES_MAX);
    let statistics = |UserReport { tenant, allocated_bytes, refused }| UserStatistics {
        tenant,
        taken_bytes: allocated_bytes,
        refused,
    };
    users.into_iter().map(statistics).collect()
}

/// The status of the agent, with those tenants for which `may_see` is true.
pub(crate) fn status(
    service: &PagingService,
    sessions: &SessionService,
    nodes: &NodeRegistry,
    may_see: impl Fn(u32) -> bool,
) -> AgentStatus {
    let (mempool_bytes, mempool_used_bytes) = mempool_bytes(service);
    let mut pool = nodes.pool_client(rustix::process::geteuid().as_raw());
    let numbers: Vec<_> = pool.nodes().collect();
    AgentStatus {
        host: nodes.host().0,
        mempool_bytes,
        mempool_used_bytes,
        nodes: numbers
            .into_iter()
            .map(|node| {
                if let Err(error) = pool.refresh(node) {
                    tracing::debug!(node = node.0, %error, "reading the free memory of a memory node failed");
                }
                NodeStatus {
                    id: node.0,
                    memory_bytes: pool.total_bytes(node),
                    free_bytes: pool.free_bytes(node),
                }
            })
            .collect(),
        tenants: all_tenant_statistics(service, &may_see),
        sessions: session_statistics(sessions, &may_see),
        users: user_statistics(sessions, &may_see),
        runs: service
            .runs()
            .iter()
            .filter(|run| may_see(run.tenant()))
            .map(|run| run_statistics(run.report()))
            .collect(),
    }
}
