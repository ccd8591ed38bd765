//! The agent's metrics for Prometheus.
//!
//! Metrics are collected from memory at each request, without a request to a node or the
//! directory.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_extents::SessionService;
use aquifer_faults::serve::PagingService;
use aquifer_faults::{FaultStats, FaultWait};
use aquifer_host::membership::LeaseEvents;
use aquifer_host::nodes::NodeRegistry;
use aquifer_latency::LatencyHistogram;
use aquifer_metrics::write::{
    HistogramValue, LATENCY_BOUNDS_NS, Labels, MetricFamily, counters, gauges, histograms, info, label,
};
use aquifer_metrics::{
    Collector, DescriptorEncoder, MetricsAddress, MetricsError, MetricsListener, MetricsServer, Registry,
    Unit,
};
use aquifer_report::{RunStatistics, TenantStatistics, UserStatistics};
use aquifer_segments::host::statistics::TimesOf;
use aquifer_segments::host::{SegmentHost, SegmentStatus};

use crate::connections::Services;
use crate::memory_governor::MemoryGovernor;
use crate::report::{MempoolBytes, borrowed_bytes, mempool_bytes};
use crate::swap_servers::SwapServers;

/// Listens at the address for metrics, if there is one.
///
/// If the agent `resumes` programs that wait for it, a failure is only logged.
///
/// # Errors
/// If the address cannot be used.
pub(crate) fn listen(
    address: Option<&MetricsAddress>,
    resumes: bool,
) -> Result<Option<MetricsListener>, MetricsError> {
    match address.map(MetricsListener::bind).transpose() {
        Err(error) if resumes => {
            tracing::error!(%error, "metrics are not served");
            Ok(None)
        }
        listener => listener,
    }
}

/// Serves metrics at `listener`.
///
/// # Errors
/// If a thread cannot be started.
pub(crate) fn serve(
    listener: MetricsListener,
    services: &Services,
    nodes: &Arc<NodeRegistry>,
    lease: &Arc<LeaseEvents>,
    governor: &Arc<MemoryGovernor>,
) -> Result<MetricsServer, MetricsError> {
    let collector = AgentCollector {
        service: Arc::clone(&services.paging),
        sessions: Arc::clone(&services.sessions),
        nodes: Arc::clone(nodes),
        lease: Arc::clone(lease),
        segments: Arc::clone(&services.segments),
        swap_servers: Arc::clone(&services.swap_servers),
        governor: Arc::clone(governor),
    };
    let mut registry = Registry::with_prefix("aquifer_agent");
    registry.register_collector(Box::new(collector));
    MetricsServer::start(listener, registry)
}

/// Collects the metrics from the services.
#[derive(Debug)]
struct AgentCollector {
    service: Arc<PagingService>,
    sessions: Arc<SessionService>,
    nodes: Arc<NodeRegistry>,
    lease: Arc<LeaseEvents>,
    segments: Arc<SegmentHost>,
    swap_servers: Arc<SwapServers>,
    governor: Arc<MemoryGovernor>,
}

/// A metric of each row: its name, its help text, and the function that reads its value.
type Metric<T> = (&'static str, &'static str, fn(&T) -> u64);

const RUN_BYTES: [Metric<RunStatistics>; 9] = [
    ("limit", "Limit of the run's resident memory.", |run| run.limit_bytes),
    ("resident", "Resident memory of the run at the last sample.", |run| run.resident_bytes),
    ("resident_peak", "The most resident memory in any sample.", |run| run.resident_peak_bytes),
    ("borrowed", "Idle memory of the host that the run has beyond its limit.", |run| run.borrowed_bytes),
    ("cached", "Pages of the run in the page cache of the host.", |run| run.cached_bytes),
    ("mempool_blocks", "Blocks of the mempool that the run uses.", |run| run.mempool_bytes),
    ("remote", "Memory that the run has allocated on memory nodes.", |run| run.remote_bytes),
    ("disk", "Room of disk nodes that the run occupies.", |run| run.disk_bytes),
    ("recalled", "Memory of the run that memory nodes recall.", |run| {
        run.recalled.iter().map(|recalled| recalled.bytes).sum()
    }),
];

/// The reasons for which faults wait, each with its label in the metrics.
const FAULT_WAITS: [(&str, FaultWait); 3] =
    [("host", FaultWait::Host), ("node", FaultWait::Node), ("room", FaultWait::Room)];

const RUN_COUNTERS: [Metric<RunStatistics>; 17] = [
    ("faults", "Page faults served.", |run| run.faults),
    ("zero_pages", "Pages filled with zeros.", |run| run.zero_pages),
    ("mempool_hits", "Pages filled from the mempool's reclaimable queue.", |run| run.mempool_hits),
    ("staging_hits", "Pages filled from the mempool's staging queue.", |run| run.staging_hits),
    ("cache_hits", "Pages filled from the page cache of the host.", |run| run.cache_hits),
    ("remote_reads", "Pages read from memory nodes.", |run| run.remote_reads),
    ("remote_read_trips", "READs posted for remote_reads.", |run| run.remote_read_trips),
    ("prefetched", "Pages read before a fault on them.", |run| run.prefetched),
    (
        "unchanged_pages",
        "Evicted pages that were not written again because a memory node has the same bytes.",
        |run| run.unchanged_pages,
    ),
    ("remote_writes", "Pages written to memory nodes; each replica counts.", |run| run.remote_writes),
    ("remote_write_trips", "WRITEs posted for remote_writes.", |run| run.remote_write_trips),
    ("vacated_slabs", "Sparse slabs that were emptied and freed.", |run| run.vacated_slabs),
    ("repacked_pages", "Pages that were moved out of sparse slabs.", |run| run.repacked_pages),
    ("moved_bytes", "Bytes copied to other memory nodes because theirs recall memory.", |run| {
        run.moved_bytes
    }),
    ("disk_errors", "Reads and writes that failed because of the disk of a node.", |run| run.disk_errors),
    ("evictions", "Pages evicted from programs.", |run| run.evictions),
    ("lost_pages", "Pages that could not be read from any replica.", |run| run.lost_pages),
];

const USER_BYTES: [Metric<UserStatistics>; 1] =
    [("tenant_extents", "Memory that the tenant's sessions have allocated in the pool.", |tenant| {
        tenant.allocated_bytes
    })];

const USER_COUNTERS: [Metric<UserStatistics>; 1] =
    [("tenant_extents_refused", "Requests refused because a key opens nothing.", |tenant| tenant.refused)];

const TENANT_GAUGES: [Metric<TenantStatistics>; 2] = [
    ("tenant_runs", "Runs of the tenant.", |tenant| count_u64(tenant.runs)),
    ("tenant_processes", "Processes in the tenant's runs.", |tenant| count_u64(tenant.processes)),
];

const TENANT_BYTES: [Metric<TenantStatistics>; 6] = [
    ("tenant_resident", "Resident memory of the tenant's runs at the last sample.", |tenant| {
        tenant.resident_bytes
    }),
    ("tenant_borrowed", "Idle memory of the host that the tenant's runs have.", |tenant| {
        tenant.borrowed_bytes
    }),
    ("tenant_cached", "Pages of the tenant's runs in the page cache of the host.", |tenant| {
        tenant.cached_bytes
    }),
    ("tenant_mempool_blocks", "Blocks of the mempool that the tenant's runs use.", |tenant| {
        tenant.mempool_bytes
    }),
    ("tenant_remote", "Memory that the tenant's runs have allocated on memory nodes.", |tenant| {
        tenant.remote_bytes
    }),
    ("tenant_disk", "Room of disk nodes that the tenant's runs occupy.", |tenant| tenant.disk_bytes),
];

const TENANT_COUNTERS: [Metric<TenantStatistics>; 5] = [
    ("tenant_faults", "Page faults served, ended runs included.", |tenant| tenant.faults),
    ("tenant_cache_hits", "Pages filled from the page cache of the host, ended runs included.", |tenant| {
        tenant.cache_hits
    }),
    ("tenant_remote_reads", "Pages read from memory nodes, ended runs included.", |tenant| {
        tenant.remote_reads
    }),
    ("tenant_evictions", "Pages evicted from programs, ended runs included.", |tenant| tenant.evictions),
    ("tenant_lost_pages", "Pages that could not be read from any replica, ended runs included.", |tenant| {
        tenant.lost_pages
    }),
];

impl Collector for AgentCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let encoder = &mut encoder;
        self.encode_host(encoder)?;
        let tenants: Vec<_> =
            self.service.tenants().into_iter().map(|of| (vec![label("tenant", of.tenant)], of)).collect();
        encode_all(encoder, &tenants, None, &TENANT_GAUGES, gauges)?;
        encode_all(encoder, &tenants, Some(&Unit::Bytes), &TENANT_BYTES, gauges)?;
        encode_all(encoder, &tenants, None, &TENANT_COUNTERS, counters)?;
        self.encode_extents(encoder)?;
        self.encode_segments(encoder)?;
        let runs = self.service.runs();
        let stats: Vec<FaultStats> = runs.iter().map(|run| run.stats()).collect();
        let labels = runs.iter().map(|run| vec![label("run", run.id()), label("tenant", run.tenant())]);
        let labels: Vec<Labels> = labels.collect();
        let reports = runs.iter().zip(&stats).map(|(run, stats)| run.report_with(stats));
        // A swap device is a host, whose number no other device has.
        let swapped = self.swap_servers.reports().into_iter().map(|report| {
            let run = format!("swap-{}", report.host);
            (vec![label("run", run), label("tenant", report.statistics.tenant)], report.statistics)
        });
        let rows: Vec<_> = labels.iter().cloned().zip(reports).chain(swapped).collect();
        encode_runs(encoder, &rows)?;
        let latency = MetricFamily {
            name: "fault_latency",
            help: "Time from reading a fault to placing its page.",
            unit: Some(&Unit::Seconds),
        };
        let all = stats.iter().map(|stats| histogram(&stats.latency()));
        histograms(encoder, latency, labels.iter().cloned().zip(all))?;
        let wait = MetricFamily {
            name: "fault_wait",
            help: "Time from reading a fault to placing its page, by what it has waited for.",
            unit: Some(&Unit::Seconds),
        };
        let by_wait = labels.iter().zip(&stats).flat_map(|(labels, stats)| {
            FAULT_WAITS.map(|(name, wait)| {
                let labels = labels.iter().cloned().chain([label("for", name)]).collect();
                (labels, histogram(stats.latency_of(wait)))
            })
        });
        histograms(encoder, wait, by_wait)
    }
}

impl AgentCollector {
    /// Encodes the metrics of the host as a whole.
    fn encode_host(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let about = |name, help| MetricFamily { name, help, unit: None };
        let bytes = |name, help| MetricFamily { name, help, unit: Some(&Unit::Bytes) };
        let one = |value: u64| [(Labels::new(), value)];
        let version = [label("version", env!("CARGO_PKG_VERSION"))];
        info(encoder, about("build", "Version of the build."), &version)?;
        let MempoolBytes { max, used, cached } = mempool_bytes(&self.service);
        gauges(encoder, bytes("mempool", "Largest size of the mempool."), one(max))?;
        gauges(encoder, bytes("mempool_used", "Blocks of the mempool in use."), one(used))?;
        gauges(encoder, bytes("mempool_cached", "Blocks of the mempool in the page cache."), one(cached))?;
        let borrowed = borrowed_bytes(&self.service);
        gauges(encoder, bytes("host_borrowed", "Idle memory that elastic runs have."), one(borrowed))?;
        let available = self.governor.available_bytes();
        gauges(encoder, bytes("host_available", "Available memory of the machine."), one(available))?;
        let keep_free = self.governor.keep_free_bytes();
        gauges(
            encoder,
            bytes("host_keep_free", "Memory of the machine that stays available."),
            one(keep_free),
        )?;
        gauges(
            encoder,
            about("nodes", "Memory nodes in the directory."),
            one(count_u64(self.nodes.count())),
        )?;
        let (renewals, failures) = (self.lease.renewals.load(Relaxed), self.lease.failures.load(Relaxed));
        counters(
            encoder,
            about("lease_renewals", "Successful keep-alives of the host's lease."),
            one(renewals),
        )?;
        let help = "Failed keep-alives of the host's lease.";
        counters(encoder, about("lease_renewal_failures", help), one(failures))
    }
}

impl AgentCollector {
    /// Encodes the metrics of extents.
    fn encode_extents(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let users = self.sessions.users();
        let users: Vec<_> = users.into_iter().map(|of| (vec![label("tenant", of.tenant)], of)).collect();
        encode_all(encoder, &users, Some(&Unit::Bytes), &USER_BYTES, gauges)?;
        encode_all(encoder, &users, None, &USER_COUNTERS, counters)
    }
}

impl AgentCollector {
    /// Encodes the metrics of segments.
    fn encode_segments(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let about = |name, help| MetricFamily { name, help, unit: None };
        let bytes = |name, help| MetricFamily { name, help, unit: Some(&Unit::Bytes) };
        let seconds = |name, help| MetricFamily { name, help, unit: Some(&Unit::Seconds) };
        let one = |value: u64| [(Labels::new(), value)];
        let segments = self.segments.list_all();
        let sum = |of: fn(&SegmentStatus) -> u64| one(segments.iter().map(of).sum());
        gauges(
            encoder,
            about("segments", "Segments of this host's processes."),
            one(count_u64(segments.len())),
        )?;
        gauges(encoder, bytes("segment_memory", "Length of these segments."), sum(|segment| segment.bytes))?;
        let help = "Parts of these segments that are still at other hosts.";
        gauges(encoder, bytes("segment_missing", help), sum(|segment| segment.missing_bytes))?;
        let statistics = self.segments.statistics();
        let totals = statistics.totals();
        for (name, help, value) in [
            ("segments_handed_over", "Segments handed over to other hosts.", totals.handed_over),
            ("segments_received", "Segments received from other hosts.", totals.received),
            ("segments_declined", "Hand-overs that their target has declined.", totals.declined),
            ("segment_pages_on_touch", "Pages pulled when a thread waited for them.", totals.pages_on_touch),
            ("segment_pages_ahead", "Pages pulled ahead of programs.", totals.pages_ahead),
        ] {
            counters(encoder, about(name, help), one(value))?;
        }
        let help = "Pause of a segment for a hand-over to another host.";
        let value = [(Labels::new(), times(&statistics.transfers))];
        histograms(encoder, seconds("segment_transfer", help), value)?;
        let help = "Pause of threads that touch pages of segments which are elsewhere.";
        let value = [(Labels::new(), times(&statistics.waits))];
        histograms(encoder, seconds("segment_wait", help), value)
    }
}

/// The histogram of times of segments.
fn times(times: &TimesOf) -> HistogramValue {
    let (sum_ns, counts) = times.between(&LATENCY_BOUNDS_NS);
    HistogramValue::of_latencies(counts, sum_ns)
}

/// Encodes the metrics of runs.
fn encode_runs(encoder: &mut DescriptorEncoder<'_>, rows: &[(Labels, RunStatistics)]) -> fmt::Result {
    // The name is a label of one family only; `group_left(name)` joins it to the others.
    let named = rows.iter().map(|(labels, run)| {
        let name = label("name", &run.name);
        (labels.iter().cloned().chain([name]).collect(), 1)
    });
    let family = MetricFamily { name: "run_name", help: "Name of the run's program.", unit: None };
    gauges(encoder, family, named)?;
    let processes: [Metric<RunStatistics>; 1] =
        [("processes", "Processes of the run.", |run| count_u64(run.processes))];
    encode_all(encoder, rows, None, &processes, gauges)?;
    encode_all(encoder, rows, Some(&Unit::Bytes), &RUN_BYTES, gauges)?;
    encode_all(encoder, rows, None, &RUN_COUNTERS, counters)
}

/// Encodes a family for each metric, with a value for each of `rows`.
fn encode_all<T>(
    encoder: &mut DescriptorEncoder<'_>,
    rows: &[(Labels, T)],
    unit: Option<&Unit>,
    metrics: &[Metric<T>],
    write: fn(&mut DescriptorEncoder<'_>, MetricFamily<'_>, Vec<(Labels, u64)>) -> fmt::Result,
) -> fmt::Result {
    metrics.iter().try_for_each(|&(name, help, of)| {
        let values = rows.iter().map(|(labels, row)| (labels.clone(), of(row))).collect();
        write(encoder, MetricFamily { name, help, unit }, values)
    })
}

/// The value of a histogram of fault latencies.
fn histogram(latency: &LatencyHistogram) -> HistogramValue {
    let sum_ns = u64::try_from(latency.sum()).unwrap_or(u64::MAX);
    HistogramValue::of_latencies(latency.between(&LATENCY_BOUNDS_NS), sum_ns)
}

/// A count as the value of a metric.
fn count_u64(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}
