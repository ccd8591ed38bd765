//! What a node counts, for whoever fetches it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use aquifer_fabric::Target;
use aquifer_metrics::write::{Labels, MetricFamily, counters, gauges, info, label};
use aquifer_metrics::{
    Collector, DescriptorEncoder, MetricsError, MetricsListener, MetricsServer, Registry, Unit,
};
use aquifer_pool::NodeMemory;

use crate::lending::Lending;

/// What happened between the node and the directory.
#[derive(Debug, Default)]
pub(crate) struct Events {
    /// Epochs of hosts that were shut out.
    pub fences: AtomicU64,
    /// Times that the lease was kept.
    pub renewals: AtomicU64,
    /// Times that it could not be.
    pub renewal_failures: AtomicU64,
    /// Bytes that were cleared for another tenant.
    pub cleared_bytes: Arc<AtomicU64>,
}

impl Events {
    /// Count one.
    pub fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Relaxed);
    }
}

/// What is looked at when somebody asks.
#[derive(Debug)]
struct Figures {
    node_memory: NodeMemory,
    target: Arc<dyn Target>,
    lending: Arc<Lending>,
    events: Arc<Events>,
}

/// Answer whoever asks at `listener`.
///
/// # Errors
/// If there is no thread for it.
pub(crate) fn serve(
    listener: MetricsListener,
    node_memory: NodeMemory,
    target: Arc<dyn Target>,
    lending: Arc<Lending>,
    events: Arc<Events>,
) -> Result<MetricsServer, MetricsError> {
    let mut registry = Registry::with_prefix("aquifer_node");
    registry.register_collector(Box::new(Figures { node_memory, target, lending, events }));
    MetricsServer::start(listener, registry)
}

impl Collector for Figures {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let encoder = &mut encoder;
        let about = |name, help| MetricFamily { name, help, unit: None };
        let bytes = |name, help| MetricFamily { name, help, unit: Some(&Unit::Bytes) };
        let one = |value: u64| [(Labels::new(), value)];
        let version = [label("version", env!("CARGO_PKG_VERSION"))];
        info(encoder, about("build", "Which Aquifer it is."), &version)?;
        gauges(encoder, bytes("memory", "Memory that the node lends."), one(self.lending.told().lent_bytes))?;
        let wanted = self.lending.wanted_bytes();
        gauges(encoder, bytes("memory_wanted", "Memory that it is asked to lend."), one(wanted))?;
        gauges(encoder, bytes("free", "Of it, what nobody has taken."), one(self.node_memory.free_bytes()))?;
        let endpoints = u64::try_from(self.target.endpoints()).unwrap_or(u64::MAX);
        gauges(encoder, about("endpoints", "Endpoints that are connected."), one(endpoints))?;
        let served = self.target.tenant_counters();
        let operations =
            served.iter().map(|(tenant, served)| (vec![label("tenant", tenant.0)], served.operations));
        counters(encoder, about("operations", "One-sided operations done over TCP."), operations)?;
        let moved = served.iter().map(|(tenant, served)| (vec![label("tenant", tenant.0)], served.bytes));
        counters(encoder, bytes("served", "Bytes read and written over TCP."), moved)?;
        let cleared = self.events.cleared_bytes.load(Relaxed);
        counters(encoder, bytes("cleared", "Memory that was cleared for whoever is next."), one(cleared))?;
        let events = [
            ("fences", "Epochs of hosts that were shut out.", &self.events.fences),
            ("lease_renewals", "Times that the node's lease was kept.", &self.events.renewals),
            (
                "lease_renewal_failures",
                "Times that the node's lease could not be kept.",
                &self.events.renewal_failures,
            ),
        ];
        events.into_iter().try_for_each(|(name, help, counter)| {
            counters(encoder, about(name, help), one(counter.load(Relaxed)))
        })
    }
}
