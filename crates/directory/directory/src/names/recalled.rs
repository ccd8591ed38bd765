//! Memory of runs that nodes recall.

use serde::{Deserialize, Serialize};

use super::decode;
use crate::{Directory, DirectoryError};

/// Prefix of the keys with the recalled memory of each host's runs.
pub const RECALLED: &str = "recalled/";

/// The most runs in a [`RecalledRecord`].
pub const RECALLED_RUNS_MAX: usize = 64;

/// The key of the recalled memory of a host's runs.
#[must_use]
pub fn recalled_key(host: u16) -> String {
    format!("{RECALLED}{host}")
}

/// The runs of a host with memory that nodes recall, at `recalled/{host}` while the lease of its
/// agent lasts. The key is absent if there are none.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RecalledRecord {
    /// The host's number.
    pub host: u16,
    /// Memory of each run on each node, the largest first, and at most [`RECALLED_RUNS_MAX`].
    pub runs: Vec<RecalledRun>,
}

/// Memory of a run that a node recalls.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RecalledRun {
    /// The node's number.
    pub node: u16,
    /// Name of the run's program.
    pub name: String,
    /// Id of the run's user.
    pub tenant: u32,
    /// Bytes that hold pages.
    pub bytes: u64,
    /// The part of the bytes of which no other node has a copy.
    pub only_copy_bytes: u64,
}

/// The runs of all hosts with memory that nodes recall. Records that are not valid are omitted.
///
/// # Errors
/// An error of the directory.
pub fn recalled_records(directory: &dyn Directory) -> Result<Vec<RecalledRecord>, DirectoryError> {
    let listing = directory.list(RECALLED)?;
    Ok(listing.entries.iter().filter_map(|entry| decode(entry).ok()).collect())
}
