//! The keys of a cluster in an etcd that other programs may use.
//!
//! `/aquifer/CLUSTER/keys/KEY` is a key of the directory.
//! `/aquifer/CLUSTER/epoch` changes at each grant of a lease, and is not visible in the directory.

use etcd_client::KeyValue;

use aquifer_directory::DirectoryError;
use aquifer_directory::{DirectoryEntry, LeaseId};

/// The keys of one cluster.
#[derive(Clone, Debug)]
pub(super) struct EtcdKeys {
    prefix: String,
    /// The key that changes at each grant of a lease.
    pub epoch: String,
}

impl EtcdKeys {
    pub fn new(cluster: &str) -> Self {
        Self { prefix: format!("/aquifer/{cluster}/keys/"), epoch: format!("/aquifer/{cluster}/epoch") }
    }

    /// The key in etcd of a directory key or prefix.
    pub fn outer(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// The directory key of a key in etcd.
    pub fn inner(&self, key: &[u8]) -> Result<String, DirectoryError> {
        let key = std::str::from_utf8(key).map_err(|_| DirectoryError::Protocol {
            why: "etcd reports a key that is not UTF-8".to_owned(),
        })?;
        let inner = key.strip_prefix(&self.prefix).ok_or_else(|| DirectoryError::Protocol {
            why: format!("etcd reports the key {key:?}, which was not requested"),
        })?;
        Ok(inner.to_owned())
    }

    pub fn entry(&self, found: &KeyValue) -> Result<DirectoryEntry, DirectoryError> {
        Ok(DirectoryEntry {
            key: self.inner(found.key())?,
            value: found.value().to_vec(),
            version: unsigned(found.mod_revision())?,
            lease: lease_of(found)?,
        })
    }
}

/// The end of the range of all keys that begin with `prefix`, which must not be empty.
pub(super) fn end_of(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    let last = end.last_mut().expect("every prefix in etcd begins with /aquifer/");
    // No overflow: UTF-8 has no byte 255.
    *last += 1;
    end
}

/// The lease of a key in etcd.
pub(super) fn lease_of(found: &KeyValue) -> Result<Option<LeaseId>, DirectoryError> {
    let lease = unsigned(found.lease())?;
    Ok((lease != 0).then_some(LeaseId(lease)))
}

/// A lease's number in etcd, where numbers are greater than 0.
pub(super) fn lease_number(id: LeaseId) -> Result<i64, DirectoryError> {
    i64::try_from(id.0).ok().filter(|number| *number > 0).ok_or(DirectoryError::LeaseGone(id))
}

/// A revision or a lease's number from etcd.
pub(super) fn unsigned(number: i64) -> Result<u64, DirectoryError> {
    u64::try_from(number)
        .map_err(|_| DirectoryError::Protocol { why: format!("etcd reports the negative number {number}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_the_cluster_are_recognised() {
        let keys = EtcdKeys::new("c");
        for key in ["a", "a/b", "é", "epoch"] {
            assert_eq!(keys.inner(keys.outer(key).as_bytes()).unwrap(), key);
            assert_ne!(keys.outer(key), keys.epoch);
        }
        for foreign in [b"/aquifer/c/epoch".as_slice(), b"/aquifer/cc/keys/a", b"", b"/aquifer/c/keys/\xff"] {
            assert!(matches!(keys.inner(foreign), Err(DirectoryError::Protocol { .. })), "{foreign:?}");
        }
    }

    #[test]
    fn a_range_ends_after_its_prefix() {
        assert_eq!(end_of("/a/"), b"/a0");
        assert!("/a/é".as_bytes() < end_of("/a/é").as_slice());
        assert!("/a/é\u{10ffff}".as_bytes() < end_of("/a/é").as_slice());
    }

    #[test]
    fn numbers_that_no_lease_of_etcd_has_are_gone() {
        for id in [0, u64::MAX, 1 << 63] {
            assert_eq!(lease_number(LeaseId(id)), Err(DirectoryError::LeaseGone(LeaseId(id))));
        }
        assert_eq!(lease_number(LeaseId(7)), Ok(7));
    }
}
