//! Statistics of each tenant over all its runs, ended runs included.
//!
//! A run that loses pages usually ends before its statistics are read.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::run::{Run, RunReport};

/// Most tenants without a run; of further ones, the lowest is forgotten and counts from 0 again.
const TENANTS_MAX: usize = 1024;

/// Statistics of a tenant.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TenantReport {
    /// User id of the tenant.
    pub tenant: u32,
    /// Runs now.
    pub runs: usize,
    /// Processes in these runs.
    pub processes: usize,
    /// Resident memory of these processes, as sampled.
    pub resident_bytes: u64,
    /// Blocks of the mempool that these runs use.
    pub mempool_bytes: u64,
    /// Memory that these runs have allocated on nodes.
    pub remote_bytes: u64,
    /// Faults resolved, in all runs so far.
    pub faults: u64,
    /// Pages read from memory nodes, in all runs so far.
    pub remote_reads: u64,
    /// Pages evicted, in all runs so far.
    pub evictions: u64,
    /// Pages that no replica could provide, in all runs so far.
    pub lost_pages: u64,
}

impl TenantReport {
    /// Adds the counters of a run.
    fn count(&mut self, report: &RunReport) {
        self.faults += report.faults;
        self.remote_reads += report.remote_reads.0;
        self.evictions += report.evictions;
        self.lost_pages += report.lost_pages;
    }

    /// Adds the memory and the counters of a run.
    fn add(&mut self, report: &RunReport) {
        self.runs += 1;
        self.processes += report.programs.len();
        self.resident_bytes += report.resident_bytes.0;
        self.mempool_bytes += report.mempool_bytes;
        self.remote_bytes += report.remote_bytes.0;
        self.count(report);
    }
}

/// Counters of ended runs, by tenant.
#[derive(Debug, Default)]
pub(super) struct EndedRuns(Mutex<BTreeMap<u32, TenantReport>>);

impl EndedRuns {
    /// Adds a run that has ended.
    pub fn add(&self, run: &Run) {
        let mut tenants = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entry(&mut tenants, run.tenant()).count(&run.report());
    }

    /// Statistics of ended runs and of the given runs, by tenant.
    pub fn with_runs<'a>(&self, runs: impl Iterator<Item = &'a Arc<Run>>) -> Vec<TenantReport> {
        let mut tenants = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for run in runs {
            let tenant = run.tenant();
            tenants
                .entry(tenant)
                .or_insert(TenantReport { tenant, ..TenantReport::default() })
                .add(&run.report());
        }
        tenants.into_values().collect()
    }
}

/// The entry of a tenant; makes room for it if there are too many.
fn entry(tenants: &mut BTreeMap<u32, TenantReport>, tenant: u32) -> &mut TenantReport {
    if tenants.len() >= TENANTS_MAX && !tenants.contains_key(&tenant) {
        tenants.pop_first();
    }
    tenants.entry(tenant).or_insert(TenantReport { tenant, ..TenantReport::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> RunReport {
        RunReport {
            name: "x".into(),
            tenant: 7,
            limit_bytes: 1,
            replicas: 1,
            degraded_slabs: 0,
            copied_slabs: 0,
            repaired_pages: 0,
            vacated_slabs: 0,
            repacked_pages: 0,
            unchanged_pages: 0,
            programs: Vec::new(),
            resident_bytes: (2, 200),
            mempool_bytes: 3,
            remote_bytes: (4, 400),
            remote_pages: 5,
            remote_writes: (6, 7),
            faults: 8,
            zero_pages: 9,
            mempool_hits: 10,
            staging_hits: 11,
            remote_reads: (12, 13),
            prefetched: 14,
            evictions: 15,
            lost_pages: 16,
            latency_ns: [17; 3],
        }
    }

    #[test]
    fn counters_of_ended_runs_stay_and_their_memory_does_not() {
        let mut tenants = BTreeMap::new();
        entry(&mut tenants, 7).count(&report());
        let mut now = tenants[&7];
        assert_eq!((now.runs, now.resident_bytes, now.faults, now.lost_pages), (0, 0, 8, 16));
        now.add(&report());
        assert_eq!((now.runs, now.resident_bytes, now.mempool_bytes, now.remote_bytes), (1, 2, 3, 4));
        assert_eq!((now.faults, now.remote_reads, now.evictions, now.lost_pages), (16, 24, 30, 32));
    }

    #[test]
    fn tenants_are_bounded() {
        let mut tenants = BTreeMap::new();
        for tenant in 0..3000 {
            entry(&mut tenants, tenant).count(&report());
        }
        assert_eq!(tenants.len(), TENANTS_MAX);
        assert_eq!(tenants[&2999].faults, 8);
    }
}
