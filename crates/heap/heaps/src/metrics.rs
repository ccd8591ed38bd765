//! The service's metrics for Prometheus.

use std::fmt;
use std::sync::Arc;

use aquifer_metrics::write::{Labels, MetricFamily, counters, gauges, info, label};
use aquifer_metrics::{
    Collector, DescriptorEncoder, MetricsError, MetricsListener, MetricsServer, Registry, Unit,
};
use aquifer_objects::service::HeapService;
use aquifer_objects::service::report::HeapReport;

/// Collects the metrics at each request.
#[derive(Debug)]
struct HeapsCollector(Arc<HeapService>);

/// Serves metrics at `listener`.
///
/// # Errors
/// If a thread cannot be started.
pub(crate) fn serve(
    listener: MetricsListener,
    service: Arc<HeapService>,
) -> Result<MetricsServer, MetricsError> {
    let mut registry = Registry::with_prefix("aquifer_heaps");
    registry.register_collector(Box::new(HeapsCollector(service)));
    MetricsServer::start(listener, registry)
}

impl Collector for HeapsCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let encoder = &mut encoder;
        let bytes = |name, help| MetricFamily { name, help, unit: Some(&Unit::Bytes) };
        let about = |name, help| MetricFamily { name, help, unit: None };
        let version = [label("version", env!("CARGO_PKG_VERSION"))];
        info(encoder, about("build", "Version of the build."), &version)?;
        let (taken, total) = self.0.memory_bytes();
        gauges(encoder, bytes("memory", "Limit of the memory of all heaps."), [(Labels::new(), total)])?;
        gauges(encoder, bytes("taken", "Memory that heaps have reserved."), [(Labels::new(), taken)])?;
        let reports: Vec<HeapReport> =
            self.0.tenants().into_iter().filter_map(|tenant| self.0.report(tenant)).collect();
        let of_tenant = |value: fn(&HeapReport) -> u64| {
            reports
                .iter()
                .map(move |report| (vec![label("tenant", report.tenant)], value(report)))
                .collect::<Vec<_>>()
        };
        gauges(encoder, bytes("held", "Memory of blocks."), of_tenant(|report| report.held_bytes))?;
        let live = bytes("live", "Memory of objects, with their headers.");
        gauges(encoder, live, of_tenant(|report| report.live_bytes))?;
        gauges(
            encoder,
            bytes("limit", "Limit of the memory of blocks."),
            of_tenant(|report| report.limit_bytes),
        )?;
        gauges(encoder, about("objects", "Objects."), of_tenant(|report| report.objects))?;
        counters(encoder, about("merges", "Blocks that were merged."), of_tenant(|report| report.merges))?;
        let corrections = about("corrections", "Pointers that were corrected.");
        counters(encoder, corrections, of_tenant(|report| report.corrections))?;
        let classes = reports.iter().flat_map(|report| {
            report.classes.iter().map(|class| {
                let labels = vec![label("tenant", report.tenant), label("slot_bytes", class.slot_bytes)];
                (labels, class.held_bytes)
            })
        });
        gauges(encoder, bytes("class_held", "Memory of the blocks of a size class."), classes)?;
        let classes = reports.iter().flat_map(|report| {
            report.classes.iter().map(|class| {
                let labels = vec![label("tenant", report.tenant), label("slot_bytes", class.slot_bytes)];
                (labels, class.objects * u64::from(class.slot_bytes))
            })
        });
        gauges(encoder, bytes("class_live", "Memory of the objects of a size class."), classes)
    }
}
