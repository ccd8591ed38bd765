//! What a target has served, by tenant.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::target::{Tenant, TenantCounters};

/// TenantTable of sessions that are over, at most; of more one is forgotten, and counts from 0 if it comes again.
const TENANTS_MAX: usize = 1024;

/// What one session had served. The thread that serves it writes; any may read.
#[derive(Debug, Default)]
pub(super) struct SessionCounters {
    bytes: AtomicU64,
    operations: AtomicU64,
}

impl SessionCounters {
    /// Count; one thread at a time does.
    pub fn add(&self, bytes: u64, operations: u64) {
        self.bytes.store(self.bytes.load(Relaxed) + bytes, Relaxed);
        self.operations.store(self.operations.load(Relaxed) + operations, Relaxed);
    }

    pub fn served(&self) -> TenantCounters {
        TenantCounters { operations: self.operations.load(Relaxed), bytes: self.bytes.load(Relaxed) }
    }
}

/// TenantTable and what they had served.
#[derive(Clone, Debug, Default)]
pub(super) struct TenantTable(BTreeMap<Tenant, TenantCounters>);

impl TenantTable {
    /// Add what a session of a tenant had.
    pub fn add(&mut self, tenant: Tenant, served: TenantCounters) {
        if self.0.len() >= TENANTS_MAX && !self.0.contains_key(&tenant) {
            self.0.pop_first();
        }
        let sum = self.0.entry(tenant).or_default();
        sum.operations += served.operations;
        sum.bytes += served.bytes;
    }

    /// All there are.
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
