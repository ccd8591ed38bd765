//! Counters of the operations and bytes that a target has served, for each session and tenant.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::target::{Tenant, TenantCounters};

/// Bound of the tenants whose sessions have ended. Above it one tenant is removed, and counts from
/// 0 if it returns.
const TENANTS_MAX: usize = 1024;

/// The counters of one session. Its serving thread writes them; any thread may read them.
#[derive(Debug, Default)]
pub(super) struct SessionCounters {
    bytes: AtomicU64,
    operations: AtomicU64,
}

impl SessionCounters {
    /// Adds to the counters. Must be called by one thread at a time.
    pub fn add(&self, bytes: u64, operations: u64) {
        self.bytes.store(self.bytes.load(Relaxed) + bytes, Relaxed);
        self.operations.store(self.operations.load(Relaxed) + operations, Relaxed);
    }

    pub fn served(&self) -> TenantCounters {
        TenantCounters { operations: self.operations.load(Relaxed), bytes: self.bytes.load(Relaxed) }
    }
}

/// The sums of each tenant.
#[derive(Clone, Debug, Default)]
pub(super) struct TenantTable(BTreeMap<Tenant, TenantCounters>);

impl TenantTable {
    /// Adds the counters of a session to those of its tenant.
    pub fn add(&mut self, tenant: Tenant, served: TenantCounters) {
        if self.0.len() >= TENANTS_MAX && !self.0.contains_key(&tenant) {
            self.0.pop_first();
        }
        let sum = self.0.entry(tenant).or_default();
        sum.operations += served.operations;
        sum.bytes += served.bytes;
    }

    /// The sums of all tenants.
    pub fn into_vec(self) -> Vec<(Tenant, TenantCounters)> {
        self.0.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_are_added_up_and_bounded() {
        let mut tenants = TenantTable::default();
        for tenant in 0..3000 {
            tenants.add(Tenant(tenant % 1500), TenantCounters { operations: 1, bytes: 10 });
        }
        assert_eq!(tenants.0.len(), TENANTS_MAX);
        tenants.add(Tenant(1499), TenantCounters { operations: 2, bytes: 5 });
        let all = tenants.into_vec();
        let (_, last) = all.last().expect("there are many");
        assert!(last.operations >= 3 && last.bytes >= 15, "{last:?}");
    }
}
