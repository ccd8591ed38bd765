//! Families of figures: a name, a sentence, and a row for each set of labels.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;

/// What tells the rows of a family apart: names and values, those made by [`label`].
pub type Labels = Vec<(&'static str, String)>;

/// How many there were up to each of some bounds.
#[derive(Clone, PartialEq, Debug)]
pub struct Histogram {
    /// The sum of all.
    pub sum: f64,
    /// How many there were.
    pub count: u64,
    /// Upper bounds in order, the last of them [`f64::MAX`], and how many are above the one before and not above this one.
    pub buckets: Vec<(f64, u64)>,
}

/// What a family is called: its name without prefix, unit and `_total`, a sentence, its unit.
#[derive(Clone, Copy, Debug)]
pub struct Family<'a> {
    /// The name.
    pub name: &'a str,
    /// The sentence.
    pub help: &'a str,
    /// Goes behind the name.
    pub unit: Option<&'a Unit>,
}

/// A label with any value: whatever a program is called, it cannot forge a line.
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

/// Write a family of counters: they only grow, and begin at 0 with the daemon.
///
/// # Errors
/// The encoder's.
pub fn counters(
    encoder: &mut DescriptorEncoder<'_>,
    family: Family<'_>,
    rows: impl IntoIterator<Item = (Labels, u64)>,
) -> fmt::Result {
    rows_of(encoder, family, MetricType::Counter, rows, |row, value| {
        row.encode_counter::<Labels, _, f64>(value, None)
    })
}

/// Write a family of gauges: they are what is now.
///
/// # Errors
/// The encoder's; a value above 2^63.
pub fn gauges(
    encoder: &mut DescriptorEncoder<'_>,
    family: Family<'_>,
    rows: impl IntoIterator<Item = (Labels, u64)>,
) -> fmt::Result {
    rows_of(encoder, family, MetricType::Gauge, rows, |row, value| row.encode_gauge(value))
}

/// Write what is known by its labels alone.
///
/// # Errors
/// The encoder's.
pub fn info(
    encoder: &mut DescriptorEncoder<'_>,
    family: Family<'_>,
    labels: &[(&'static str, String)],
) -> fmt::Result {
    let mut metric = encoder.encode_descriptor(family.name, family.help, family.unit, MetricType::Info)?;
    metric.encode_info(&labels.to_vec())
}

/// Write a family of histograms.
///
/// # Errors
/// The encoder's.
pub fn histograms(
    encoder: &mut DescriptorEncoder<'_>,
    family: Family<'_>,
    rows: impl IntoIterator<Item = (Labels, Histogram)>,
) -> fmt::Result {
    rows_of(encoder, family, MetricType::Histogram, rows, |row, histogram| {
        row.encode_histogram::<Labels>(histogram.sum, histogram.count, &histogram.buckets, None)
    })
}

fn rows_of<T>(
    encoder: &mut DescriptorEncoder<'_>,
    family: Family<'_>,
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
