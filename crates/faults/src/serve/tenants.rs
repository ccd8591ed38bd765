//! What each tenant has, and what its runs counted, those that are over included: a run that loses pages seldom lives until somebody looks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::run::{Run, RunReport};

/// Tenants whose runs are over, at most; of more one is forgotten, and counts from 0 if it comes again.
const TENANTS_MAX: usize = 1024;

/// A tenant's figures.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TenantReport {
    /// The tenant.
    pub tenant: u32,
    /// Its runs now.
    pub runs: usize,
    /// The processes in them.
    pub processes: usize,
    /// Resident memory of those, as sampled.
    pub resident_bytes: u64,
    /// The mempool's blocks that they have.
    pub mempool_bytes: u64,
    /// What they have of memory nodes.
    pub remote_bytes: u64,
    /// Faults served, of runs that are over too.
    pub faults: u64,
    /// Pages read from memory nodes, of runs that are over too.
    pub remote_reads: u64,
    /// Pages taken out of programs, of runs that are over too.
    pub evictions: u64,
    /// Pages that could not be read back, of runs that are over too.
    pub lost_pages: u64,
}

impl TenantReport {
    /// Add what a run counted.
    fn count(&mut self, report: &RunReport) {
        self.faults += report.faults;
        self.remote_reads += report.remote_reads.0;
        self.evictions += report.evictions;
        self.lost_pages += report.lost_pages;
    }

    /// Add what a run has, and what it counted.
    fn add(&mut self, report: &RunReport) {
        self.runs += 1;
        self.processes += report.programs.len();
        self.resident_bytes += report.resident_bytes.0;
        self.mempool_bytes += report.mempool_bytes;
        self.remote_bytes += report.remote_bytes.0;
        self.count(report);
    }
}

/// What the runs counted that are over.
#[derive(Debug, Default)]
pub(super) struct EndedRuns(Mutex<BTreeMap<u32, TenantReport>>);

impl EndedRuns {
    /// A run is over.
    pub fn add(&self, run: &Run) {
        let mut tenants = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entry(&mut tenants, run.tenant()).count(&run.report());
    }

    /// The same, with those that are not over.
    pub fn with<'a>(&self, runs: impl Iterator<Item = &'a Arc<Run>>) -> Vec<TenantReport> {
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

/// A tenant's figures, in place of another's if there are too many.
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
    fn what_is_counted_stays_and_what_is_had_goes() {
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
