//! The status of the agent: the statistics of its services.

use aquifer_extents::SessionService;
use aquifer_fabric::Host;
use aquifer_faults::serve::PagingService;
use aquifer_host::cluster_access::SwapReport;
use aquifer_report::{AgentStatus, SessionStatistics, TenantStatistics, UserStatistics};

use crate::memory_governor::MemoryGovernor;
use crate::node_watch::NodeWatch;

/// Maximum length of a status in bytes: it must fit into one frame.
const STATUS_BYTES_MAX: usize = aquifer_ipc::FRAME_BYTES_MAX - 1024;
/// Lower bound of the length of a program's JSON, in bytes.
const PROGRAM_BYTES_MIN: usize = 64;

/// Maximum number of tenants, of users and of sessions in a status.
const STATUS_ENTRIES_MAX: usize = 64;

/// The bytes of the mempool.
pub(crate) struct MempoolBytes {
    /// The largest size.
    pub max: u64,
    /// Blocks that volumes own.
    pub used: u64,
    /// Blocks in the page cache.
    pub cached: u64,
}

/// The bytes of the mempool now.
pub(crate) fn mempool_bytes(service: &PagingService) -> MempoolBytes {
    let mempool = service.mempool();
    let bytes = |blocks: usize| (blocks * aquifer_pager::BLOCK_PAGES * aquifer_pager::PAGE_BYTES) as u64;
    MempoolBytes {
        max: bytes(mempool.blocks()),
        used: bytes(mempool.blocks() - mempool.free_block_count()),
        cached: bytes(mempool.cached_block_count()),
    }
}

/// The idle memory that elastic runs have, in bytes.
pub(crate) fn borrowed_bytes(service: &PagingService) -> u64 {
    let runs = service.runs();
    let elastic = runs.iter().filter(|run| run.limit_max_bytes().is_some());
    elastic.map(|run| run.budget().borrowed() * aquifer_pager::PAGE_BYTES as u64).sum()
}

/// The statistics of tenants, sorted by runs and faults in descending order.
fn all_tenant_statistics(service: &PagingService, is_visible: impl Fn(u32) -> bool) -> Vec<TenantStatistics> {
    let mut tenants = service.tenants();
    tenants.retain(|tenant| is_visible(tenant.tenant));
    tenants.sort_by_key(|tenant| std::cmp::Reverse((tenant.runs, tenant.faults)));
    tenants.truncate(STATUS_ENTRIES_MAX);
    tenants
}

/// The statistics of sessions, sorted by bytes in descending order.
fn session_statistics(sessions: &SessionService, is_visible: impl Fn(u32) -> bool) -> Vec<SessionStatistics> {
    let mut reports = sessions.sessions();
    reports.retain(|session| is_visible(session.tenant));
    reports.sort_by_key(|session| std::cmp::Reverse(session.bytes));
    reports.truncate(STATUS_ENTRIES_MAX);
    reports
}

/// The statistics of users of extents, sorted by bytes in descending order.
fn user_statistics(sessions: &SessionService, is_visible: impl Fn(u32) -> bool) -> Vec<UserStatistics> {
    let mut users = sessions.users();
    users.retain(|user| is_visible(user.tenant));
    users.sort_by_key(|user| std::cmp::Reverse(user.allocated_bytes));
    users.truncate(STATUS_ENTRIES_MAX);
    users
}

/// The status of the agent and of runs with `swap` devices, for tenants for which `is_visible` is
/// true.
pub(crate) fn status(
    service: &PagingService,
    sessions: &SessionService,
    swap: Vec<SwapReport>,
    host: Host,
    (nodes, memory): (&NodeWatch, &MemoryGovernor),
    is_visible: impl Fn(u32) -> bool,
) -> AgentStatus {
    let MempoolBytes { max, used, cached } = mempool_bytes(service);
    let paged = service.runs();
    let paged = paged.iter().filter(|run| is_visible(run.tenant())).map(|run| run.report());
    let swapped = swap.into_iter().map(|report| report.statistics).filter(|run| is_visible(run.tenant));
    AgentStatus {
        host: host.0,
        mempool_bytes: max,
        mempool_used_bytes: used,
        cached_bytes: cached,
        borrowed_bytes: borrowed_bytes(service),
        available_bytes: memory.available_bytes(),
        keep_free_bytes: memory.keep_free_bytes(),
        nodes: nodes.nodes(),
        missing_nodes: nodes.missing_nodes(),
        tenants: all_tenant_statistics(service, &is_visible),
        sessions: session_statistics(sessions, &is_visible),
        users: user_statistics(sessions, &is_visible),
        runs: paged.chain(swapped).collect(),
    }
}

/// A status as JSON that fits into a frame: the smallest programs and runs are left out if there
/// are too many.
pub(crate) fn fitting_json(mut status: AgentStatus) -> String {
    status.runs.sort_by_key(|run| std::cmp::Reverse(run.resident_bytes));
    for run in &mut status.runs {
        run.programs.sort_by_key(|program| std::cmp::Reverse(program.held_bytes));
    }
    loop {
        let counts = || status.runs.iter().map(|run| run.programs.len());
        let most = counts().max().unwrap_or(0);
        if most > 1 && counts().sum::<usize>() > STATUS_BYTES_MAX / PROGRAM_BYTES_MIN {
            status.runs.iter_mut().for_each(|run| run.programs.truncate(most / 2));
            continue;
        }
        let json = serde_json::to_string(&status).expect("numbers can be written");
        if json.len() <= STATUS_BYTES_MAX || status.runs.is_empty() {
            return json;
        }
        if most > 1 {
            status.runs.iter_mut().for_each(|run| run.programs.truncate(most / 2));
        } else {
            status.runs.truncate(status.runs.len() / 2);
        }
    }
}

#[cfg(test)]
mod tests {
    use aquifer_report::{ProgramStatistics, RunStatistics};

    use super::*;

    #[test]
    fn a_status_fits_into_a_frame_whatever_there_is() {
        let program = |held_bytes| ProgramStatistics { held_bytes, ..Default::default() };
        let least = serde_json::to_string(&program(0)).expect("numbers can be written");
        assert!(least.len() >= PROGRAM_BYTES_MIN);
        let run = |number: u64| RunStatistics {
            name: "\u{1}\\\"".repeat(80),
            programs: (0..number % 300).map(program).collect(),
            resident_bytes: number,
            ..Default::default()
        };
        for count in [1, 299, 5000] {
            let json =
                fitting_json(AgentStatus { runs: (1..=count).map(run).collect(), ..Default::default() });
            assert!(json.len() <= STATUS_BYTES_MAX, "{count} runs: {} bytes", json.len());
            let status: AgentStatus = serde_json::from_str(&json).expect("it is whole");
            assert_eq!(status.runs[0].resident_bytes, count, "the largest is kept");
            assert!(status.runs[0].programs.first().is_none_or(|first| first.held_bytes + 1 == count % 300));
        }
    }
}
