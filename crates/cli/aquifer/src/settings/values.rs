//! Values in settings files, which are parsed as on the command line.

use aquifer_agent::Backup;
use aquifer_ipc::size;
use aquifer_metrics::MetricsAddress;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

use crate::cli::{parse_grace_ms, parse_lent_memory, parse_mempool, parse_time_ms};

pub(super) fn bytes<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    size::parse(&String::deserialize(from)?).map(Some).map_err(D::Error::custom)
}

pub(super) fn backup<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Backup>, D::Error> {
    String::deserialize(from)?.parse().map(Some).map_err(D::Error::custom)
}

pub(super) fn bytes_or_auto<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    size::parse_or_auto(&String::deserialize(from)?).map(Some).map_err(D::Error::custom)
}

pub(super) fn bytes_or_zero<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    size::parse_or_zero(&String::deserialize(from)?).map(Some).map_err(D::Error::custom)
}

pub(super) fn lent_memory<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    parse_lent_memory(&String::deserialize(from)?).map(Some).map_err(D::Error::custom)
}

pub(super) fn mempool_bytes<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    parse_mempool(&String::deserialize(from)?).map(Some).map_err(D::Error::custom)
}

pub(super) fn time_ms<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    parse_time_ms(&String::deserialize(from)?).map(Some).map_err(D::Error::custom)
}

pub(super) fn grace_ms<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    parse_grace_ms(&String::deserialize(from)?).map(Some).map_err(D::Error::custom)
}

pub(super) fn metrics_address<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<MetricsAddress>, D::Error> {
    String::deserialize(from)?.parse().map(Some).map_err(D::Error::custom)
}

fn in_range<'de, T, D>(from: D, min: T, max: T) -> Result<Option<T>, D::Error>
where
    T: Deserialize<'de> + PartialOrd + std::fmt::Display,
    D: Deserializer<'de>,
{
    let number = T::deserialize(from)?;
    if number < min || number > max {
        return Err(D::Error::custom(format!("{number} is not in {min}..={max}")));
    }
    Ok(Some(number))
}

pub(super) fn node_number<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u16>, D::Error> {
    in_range(from, 1, u16::MAX)
}

pub(super) fn heap_node_number<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u16>, D::Error> {
    in_range(from, 1, 4095)
}

pub(super) fn threads<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u16>, D::Error> {
    in_range(from, 1, 64)
}

pub(super) fn operations<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    in_range(from, 1, u32::MAX)
}
