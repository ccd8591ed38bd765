//! The node's metrics for Prometheus.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use aquifer_fabric::Target;
use aquifer_metrics::write::{Labels, MetricFamily, counters, gauges, info, label};
use aquifer_metrics::{
    Collector, DescriptorEncoder, MetricsError, MetricsListener, MetricsServer, Registry, Unit,
};
use aquifer_pool::NodeMemory;

use crate::disk_store::DiskStore;
use crate::lending::Lending;

/// Counters of the node.
#[derive(Debug, Default)]
pub(crate) struct NodeCounters {
    /// Fences that were set.
    pub fences: AtomicU64,
    /// Lease keep-alives that succeeded.
    pub renewals: AtomicU64,
    /// Lease keep-alives that failed.
    pub renewal_failures: AtomicU64,
    /// Bytes of freed memory that were cleared.
    pub cleared_bytes: Arc<AtomicU64>,
    /// Bytes that are held for heaps.
    pub held_bytes: Arc<AtomicU64>,
}

impl NodeCounters {
    /// Adds one to a counter.
    pub fn increment(counter: &AtomicU64) {
        counter.fetch_add(1, Relaxed);
    }
}

/// Collects the metrics at each request.
#[derive(Debug)]
struct NodeCollector {
    node_memory: NodeMemory,
    disk: Option<Arc<DiskStore>>,
    target: Arc<dyn Target>,
    lending: Arc<Lending>,
    counters: Arc<NodeCounters>,
}

/// Serves metrics at `listener`.
///
/// # Errors
/// If a thread cannot be started.
pub(crate) fn serve(
    listener: MetricsListener,
    node_memory: NodeMemory,
    disk: Option<Arc<DiskStore>>,
    target: Arc<dyn Target>,
    lending: Arc<Lending>,
    counters: Arc<NodeCounters>,
) -> Result<MetricsServer, MetricsError> {
    let mut registry = Registry::with_prefix("aquifer_node");
    registry.register_collector(Box::new(NodeCollector { node_memory, disk, target, lending, counters }));
    MetricsServer::start(listener, registry)
}

impl Collector for NodeCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let encoder = &mut encoder;
        let about = |name, help| MetricFamily { name, help, unit: None };
        let bytes = |name, help| MetricFamily { name, help, unit: Some(&Unit::Bytes) };
        let one = |value: u64| [(Labels::new(), value)];
        let version = [label("version", env!("CARGO_PKG_VERSION"))];
        info(encoder, about("build", "Version of the build."), &version)?;
        gauges(
            encoder,
            bytes("memory", "Memory that the node lends."),
            one(self.lending.status().lent_bytes),
        )?;
        let requested = self.lending.requested_bytes();
        gauges(encoder, bytes("memory_wanted", "Memory that is requested of the node."), one(requested))?;
        gauges(encoder, bytes("free", "Lent memory that is free."), one(self.node_memory.free_bytes()))?;
        let (recalled, _) = self.lending.recalled();
        gauges(encoder, bytes("recalled", "Memory in use that the node recalls."), one(recalled))?;
        let for_heaps = self.counters.held_bytes.load(Relaxed);
        gauges(encoder, bytes("heaps", "Lent memory that heaps on this machine may take."), one(for_heaps))?;
        let on_disk = about("on_disk", "1 if what the node lends is on a disk, and else 0.");
        gauges(encoder, on_disk, one(u64::from(self.disk.is_some())))?;
        let endpoints = u64::try_from(self.target.endpoints()).unwrap_or(u64::MAX);
        gauges(encoder, about("endpoints", "Connected endpoints."), one(endpoints))?;
        let served = self.target.tenant_counters();
        let operations =
            served.iter().map(|(tenant, served)| (vec![label("tenant", tenant.0)], served.operations));
        counters(encoder, about("operations", "One-sided operations served over TCP."), operations)?;
        let moved = served.iter().map(|(tenant, served)| (vec![label("tenant", tenant.0)], served.bytes));
        counters(encoder, bytes("served", "Bytes read and written over TCP."), moved)?;
        let cleared = self.counters.cleared_bytes.load(Relaxed);
        counters(
            encoder,
            bytes("cleared", "Freed memory that was cleared for the next tenant."),
            one(cleared),
        )?;
        if let Some(disk) = &self.disk {
            counters(
                encoder,
                about("disk_errors", "Accesses that failed because of the disk, or of damage on it."),
                one(disk.errors()),
            )?;
        }
        let counts = [
            ("fences", "Fences that were set.", &self.counters.fences),
            ("lease_renewals", "Successful keep-alives of the node's lease.", &self.counters.renewals),
            (
                "lease_renewal_failures",
                "Failed keep-alives of the node's lease.",
                &self.counters.renewal_failures,
            ),
        ];
        counts.into_iter().try_for_each(|(name, help, counter)| {
            counters(encoder, about(name, help), one(counter.load(Relaxed)))
        })
    }
}
