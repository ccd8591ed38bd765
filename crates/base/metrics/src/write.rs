//! Encodes families of metrics: a name, a help text, and a value for each set of labels.

use std::fmt;
use std::time::Duration;

use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;

/// The labels of a value: names and escaped values, as [`label`] returns them.
pub type Labels = Vec<(&'static str, String)>;

/// The value of a histogram.
#[derive(Clone, PartialEq, Debug)]
pub struct HistogramValue {
    /// The sum of all observations.
    pub sum: f64,
    /// The number of observations.
    pub count: u64,
    /// Upper bounds in ascending order, the last of them [`f64::MAX`], and for each the number of
    /// observations between the previous bound and this one.
    pub buckets: Vec<(f64, u64)>,
}

/// Upper bounds of the buckets for latencies, in ns.
pub const LATENCY_BOUNDS_NS: [u64; 16] = [
    5_000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    50_000_000,
    100_000_000,
    500_000_000,
    1_000_000_000,
    10_000_000_000,
];

impl HistogramValue {
    /// The value of latencies. `counts` has the number in each bucket of [`LATENCY_BOUNDS_NS`], and
    /// last the number above all bounds; `sum_ns` is their sum in ns.
    #[must_use]
    pub fn of_latencies(counts: Vec<u64>, sum_ns: u64) -> Self {
        let seconds = |ns| Duration::from_nanos(ns).as_secs_f64();
        let bounds = LATENCY_BOUNDS_NS.map(seconds).into_iter().chain([f64::MAX]);
        Self { sum: seconds(sum_ns), count: counts.iter().sum(), buckets: bounds.zip(counts).collect() }
    }
}

/// The name, help text and unit of a family.
#[derive(Clone, Copy, Debug)]
pub struct MetricFamily<'a> {
    /// The name, without prefix, unit and the suffix `_total`.
    pub name: &'a str,
    /// The help text, a sentence.
    pub help: &'a str,
    /// The unit, which is appended to the name.
    pub unit: Option<&'a Unit>,
}

/// A label whose value is escaped, so that the name of a program cannot forge a line.
#[must_use]
pub fn label(name: &'static str, value: impl fmt::Display) -> (&'static str, String) {
    let mut escaped = String::new();
    for character in value.to_string().chars() {
        match character {
            '\\' => escaped.push_str("\\\\"),
            '"' => escaped.push_str("\\\""),
            '\n' => escaped.push_str("\\n"),
            other => escaped.push(other),
        }
    }
    (name, escaped)
}

/// Encodes a family of counters, which never decrease and begin at 0 with the daemon.
///
/// # Errors
/// The error of the encoder.
pub fn counters(
    encoder: &mut DescriptorEncoder<'_>,
    family: MetricFamily<'_>,
    rows: impl IntoIterator<Item = (Labels, u64)>,
) -> fmt::Result {
    encode_rows(encoder, family, MetricType::Counter, rows, |row, value| {
        row.encode_counter::<Labels, _, f64>(value, None)
    })
}

/// Encodes a family of gauges, which are present values.
///
/// # Errors
/// The error of the encoder, also for a value of 2^63 or more.
pub fn gauges(
    encoder: &mut DescriptorEncoder<'_>,
    family: MetricFamily<'_>,
    rows: impl IntoIterator<Item = (Labels, u64)>,
) -> fmt::Result {
    encode_rows(encoder, family, MetricType::Gauge, rows, |row, value| row.encode_gauge(value))
}

/// Encodes an info metric, which consists of labels.
///
/// # Errors
/// The error of the encoder.
pub fn info(
    encoder: &mut DescriptorEncoder<'_>,
    family: MetricFamily<'_>,
    labels: &[(&'static str, String)],
) -> fmt::Result {
    let mut metric = encoder.encode_descriptor(family.name, family.help, family.unit, MetricType::Info)?;
    metric.encode_info(&labels.to_vec())
}

/// Encodes a family of histograms.
///
/// # Errors
/// The error of the encoder.
pub fn histograms(
    encoder: &mut DescriptorEncoder<'_>,
    family: MetricFamily<'_>,
    rows: impl IntoIterator<Item = (Labels, HistogramValue)>,
) -> fmt::Result {
    encode_rows(encoder, family, MetricType::Histogram, rows, |row, histogram| {
        row.encode_histogram::<Labels>(histogram.sum, histogram.count, &histogram.buckets, None)
    })
}

fn encode_rows<T>(
    encoder: &mut DescriptorEncoder<'_>,
    family: MetricFamily<'_>,
    kind: MetricType,
    rows: impl IntoIterator<Item = (Labels, T)>,
    encode: impl Fn(&mut MetricEncoder<'_>, &T) -> fmt::Result,
) -> fmt::Result {
    let mut metric = encoder.encode_descriptor(family.name, family.help, family.unit, kind)?;
    for (labels, value) in rows {
        if labels.is_empty() {
            encode(&mut metric, &value)?;
        } else {
            encode(&mut metric.encode_family(&labels)?, &value)?;
        }
    }
    Ok(())
}
