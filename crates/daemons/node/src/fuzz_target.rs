//! The fuzz target for the keeper's record of a node's memory.

use crate::kept_memory::KeptMemoryRecord;

/// Parses the record.
///
/// # Panics
/// If a check fails.
#[must_use]
pub fn parse_record(text: &str) -> bool {
    let Ok(record) = serde_json::from_str::<KeptMemoryRecord>(text) else { return false };
    let again = serde_json::to_string(&record).expect("plain structs are JSON");
    assert_eq!(serde_json::from_str::<KeptMemoryRecord>(&again).ok(), Some(record));
    true
}

/// A record.
#[must_use]
pub fn record_seed() -> String {
    let record = KeptMemoryRecord { epoch: 17, key: 0x1234_5678, is_disk: false };
    serde_json::to_string(&record).expect("plain structs are JSON")
}
