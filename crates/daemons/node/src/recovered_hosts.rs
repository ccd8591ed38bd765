//! Fences of hosts that were recovered before a node started.

use aquifer_directory::names;
use aquifer_directory::{Directory, DirectoryError};
use aquifer_fabric::{Host, Target};

/// Fences all hosts that were recovered. Returns the version of their record, which the transaction
/// that writes the node's record must compare.
///
/// # Errors
/// Those of the directory.
pub fn fence_recovered(directory: &dyn Directory, target: &dyn Target) -> Result<u64, DirectoryError> {
    let (recovered, version) = names::recovered_hosts(directory)?;
    recovered.epochs.iter().for_each(|(host, epoch)| target.fence(Host(*host), *epoch));
    Ok(version)
}
