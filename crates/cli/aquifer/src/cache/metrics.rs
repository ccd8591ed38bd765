//! The cache's metrics for Prometheus.

use std::fmt;
use std::sync::atomic::Ordering;

use aquifer_cache::server::ServerHandle;
use aquifer_latency::LatencyHistogram;
use aquifer_metrics::write::{
    HistogramValue, LATENCY_BOUNDS_NS, Labels, MetricFamily, counters, gauges, histograms, info, label,
};
use aquifer_metrics::{
    Collector, DescriptorEncoder, MetricsError, MetricsListener, MetricsServer, Registry, Unit,
};

/// Collects the metrics at each request.
#[derive(Debug)]
struct CacheCollector(ServerHandle);

/// Serves metrics at `listener`.
///
/// # Errors
/// If a thread cannot be started.
pub fn serve(listener: MetricsListener, server: ServerHandle) -> Result<MetricsServer, MetricsError> {
    let mut registry = Registry::with_prefix("aquifer_cache");
    registry.register_collector(Box::new(CacheCollector(server)));
    MetricsServer::start(listener, registry)
}

fn bytes(name: &'static str, help: &'static str) -> MetricFamily<'static> {
    MetricFamily { name, help, unit: Some(&Unit::Bytes) }
}

fn about(name: &'static str, help: &'static str) -> MetricFamily<'static> {
    MetricFamily { name, help, unit: None }
}

impl Collector for CacheCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let encoder = &mut encoder;
        info(
            encoder,
            about("build", "Version of the build."),
            &[label("version", env!("CARGO_PKG_VERSION"))],
        )?;
        self.items(encoder)?;
        self.requests(encoder)?;
        self.pool(encoder)
    }
}

impl CacheCollector {
    fn items(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let store = self.0.store();
        let (content, removed) = (store.content(), store.removed());
        let one = |value| [(Labels::new(), value)];
        gauges(encoder, about("items", "Items, with those in the pool."), one(content.items))?;
        gauges(encoder, bytes("item", "Memory of items here."), one(content.item_bytes))?;
        gauges(encoder, bytes("used", "Memory of items and index."), one(store.budget().used()))?;
        gauges(encoder, bytes("limit", "Most memory of items and index."), one(store.budget().limit()))?;
        let here = store.partitions().iter().filter(|items| items.is_here()).count();
        gauges(encoder, about("partitions", "Partitions on this server."), one(here as u64))?;
        gauges(encoder, about("connections", "Connections of clients."), one(self.0.connections()))?;
        let evicted = about("evictions", "Items that were removed to free memory.");
        counters(encoder, evicted, one(removed.evicted))?;
        counters(encoder, about("expirations", "Items that have expired."), one(removed.expired))
    }

    fn requests(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let sums = self.0.sums();
        let of =
            |command, outcome, count| (vec![label("command", command), label("outcome", outcome)], count);
        let requests = [
            of("get", "hit", sums.get_hits),
            of("get", "miss", sums.get_misses),
            of("set", "done", sums.cmd_set),
            of("touch", "hit", sums.touch_hits),
            of("touch", "miss", sums.touch_misses),
            of("delete", "hit", sums.delete_hits),
            of("delete", "miss", sums.delete_misses),
        ];
        counters(encoder, about("requests", "Keys of requests that were served."), requests)?;
        let help = "Requests that have ended because no server might answer for their partition.";
        let unavailable = [("miss", sums.partition_misses), ("error", sums.partition_errors)]
            .map(|(outcome, count)| (vec![label("outcome", outcome)], count));
        counters(encoder, about("unavailable_requests", help), unavailable)
    }

    fn pool(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let store = self.0.store();
        if !store.has_pool() {
            return Ok(());
        }
        let pool = store.pool();
        let load =
            |counter: &std::sync::atomic::AtomicU64| [(Labels::new(), counter.load(Ordering::Relaxed))];
        let items = [(Labels::new(), store.items_in_pool())];
        gauges(encoder, about("pool_items", "Items in the pool."), items)?;
        gauges(encoder, bytes("pool", "Memory in the pool."), load(&pool.bytes))?;
        counters(encoder, about("pool_hits", "Items that were fetched from the pool."), load(&pool.hits))?;
        counters(encoder, about("pool_losses", "Items that the pool had lost."), load(&pool.losses))?;
        let times = [("local", &self.0.local_times()), ("pool", &pool.times)];
        let rows = times.map(|(tier, times)| (vec![label("tier", tier)], histogram(times)));
        let help = "Time of hits: here, from the turn in which a request is read to its end; in the pool, \
                    until the item is here.";
        let about = MetricFamily { name: "hit", help, unit: Some(&Unit::Seconds) };
        histograms(encoder, about, rows)
    }
}

fn histogram(times: &LatencyHistogram) -> HistogramValue {
    let sum_ns = u64::try_from(times.sum()).unwrap_or(u64::MAX);
    HistogramValue::of_latencies(times.between(&LATENCY_BOUNDS_NS), sum_ns)
}
