//! Statistics of each tenant over all its runs, ended runs included.
//!
//! A run that loses pages usually ends before its statistics are read.

use std::collections::BTreeMap;
use std::sync::Arc;

use aquifer_report::{RunStatistics, TenantStatistics};
use parking_lot::Mutex;

use super::run::Run;

/// Maximum number of tenants with ended runs. A further one replaces the lowest, whose counters
/// begin at 0 again.
const TENANTS_MAX: usize = 1024;

/// Adds the counters of a run to its tenant.
fn count(tenant: &mut TenantStatistics, run: &RunStatistics) {
    tenant.faults += run.faults;
    tenant.cache_hits += run.cache_hits;
    tenant.remote_reads += run.remote_reads;
    tenant.evictions += run.evictions;
    tenant.lost_pages += run.lost_pages;
}

/// Adds the memory and the counters of a run to its tenant.
fn add(tenant: &mut TenantStatistics, run: &RunStatistics) {
    tenant.runs += 1;
    tenant.processes += run.processes;
    tenant.resident_bytes += run.resident_bytes;
    tenant.borrowed_bytes += run.borrowed_bytes;
    tenant.cached_bytes += run.cached_bytes;
    tenant.mempool_bytes += run.mempool_bytes;
    tenant.remote_bytes += run.remote_bytes;
    tenant.disk_bytes += run.disk_bytes;
    count(tenant, run);
}

/// Counters of ended runs, by tenant.
#[derive(Debug, Default)]
pub(super) struct EndedRuns(Mutex<BTreeMap<u32, TenantStatistics>>);

impl EndedRuns {
    /// Adds a run that has ended.
    pub fn add(&self, run: &Run) {
        let mut tenants = self.0.lock();
        count(entry(&mut tenants, run.tenant()), &run.report());
    }

    /// Returns the statistics of ended runs and of the given runs, by tenant.
    pub fn with_runs<'a>(&self, runs: impl Iterator<Item = &'a Arc<Run>>) -> Vec<TenantStatistics> {
        let mut tenants = self.0.lock().clone();
        for run in runs {
            let tenant = run.tenant();
            let statistics =
                tenants.entry(tenant).or_insert(TenantStatistics { tenant, ..TenantStatistics::default() });
            add(statistics, &run.report());
        }
        tenants.into_values().collect()
    }
}

/// Returns the entry of a tenant. If there are too many tenants, replaces the lowest.
fn entry(tenants: &mut BTreeMap<u32, TenantStatistics>, tenant: u32) -> &mut TenantStatistics {
    if tenants.len() >= TENANTS_MAX && !tenants.contains_key(&tenant) {
        tenants.pop_first();
    }
    tenants.entry(tenant).or_insert(TenantStatistics { tenant, ..TenantStatistics::default() })
}

#[cfg(test)]
mod tests {
    use aquifer_report::LatencyUs;

    use super::*;

    fn report() -> RunStatistics {
        RunStatistics {
            name: "x".into(),
            tenant: 7,
            limit_bytes: 1,
            limit_max_bytes: Some(19),
            borrowed_bytes: 20,
            cached_bytes: 21,
            replicas: 1,
            degraded_slabs: 0,
            copied_slabs: 0,
            repaired_pages: 0,
            vacated_slabs: 0,
            repacked_pages: 0,
            moved_bytes: 0,
            backup: String::new(),
            disk_bytes: 5,
            displaced_slabs: 0,
            disk_errors: 0,
            recalled: Vec::new(),
            unchanged_pages: 0,
            processes: 2,
            programs: Vec::new(),
            unpaged: Vec::new(),
            swap_bytes: None,
            short_of_room: None,
            shared_bytes: 0,
            faults: 8,
            zero_pages: 9,
            mempool_hits: 10,
            staging_hits: 11,
            cache_hits: 18,
            remote_reads: 12,
            remote_read_trips: 13,
            prefetched: 14,
            remote_writes: 7,
            remote_write_trips: 6,
            evictions: 15,
            lost_pages: 16,
            resident_bytes: 2,
            resident_peak_bytes: 200,
            mempool_bytes: 3,
            remote_bytes: 4,
            remote_peak_bytes: 400,
            fault_latency_us: LatencyUs { p50: 1.0, p99: 2.0, p999: 3.0 },
            fault_wait_us: aquifer_report::FaultWaitUs::default(),
        }
    }

    #[test]
    fn counters_of_ended_runs_stay_and_their_memory_does_not() {
        let mut tenants = BTreeMap::new();
        count(entry(&mut tenants, 7), &report());
        let mut now = tenants[&7];
        assert_eq!((now.runs, now.resident_bytes, now.faults, now.lost_pages), (0, 0, 8, 16));
        add(&mut now, &report());
        assert_eq!((now.runs, now.resident_bytes, now.mempool_bytes, now.remote_bytes), (1, 2, 3, 4));
        assert_eq!(now.disk_bytes, 5);
        assert_eq!((now.faults, now.remote_reads, now.evictions, now.lost_pages), (16, 24, 30, 32));
        assert_eq!(now.cache_hits, 36);
    }

    #[test]
    fn tenants_are_bounded() {
        let mut tenants = BTreeMap::new();
        for tenant in 0..3000 {
            count(entry(&mut tenants, tenant), &report());
        }
        assert_eq!(tenants.len(), TENANTS_MAX);
        assert_eq!(tenants[&2999].faults, 8);
    }
}
