//! Our keys inside an etcd that others use too.
//!
//! `/aquifer/CLUSTER/keys/KEY` is a user's key; `/aquifer/CLUSTER/epoch` is changed at each grant of a lease, and is no
//! user's to see.

use etcd_client::KeyValue;

use aquifer_directory::DirectoryError;
use aquifer_directory::{Entry, LeaseId};

/// Where one cluster's keys are.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    prefix: String,
    /// The key that counts leases.
    pub epoch: String,
}

impl Keys {
    pub fn new(cluster: &str) -> Self {
        Self { prefix: format!("/aquifer/{cluster}/keys/"), epoch: format!("/aquifer/{cluster}/epoch") }
    }

    /// A user's key, or prefix, as it is in etcd.
    pub fn outer(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// The user's key behind one in etcd.
    pub fn inner(&self, key: &[u8]) -> Result<String, DirectoryError> {
        let key = std::str::from_utf8(key).map_err(|_| DirectoryError::Protocol {
            why: "it tells of a key that is not UTF-8".to_owned(),
        })?;
        let inner = key.strip_prefix(&self.prefix).ok_or_else(|| DirectoryError::Protocol {
            why: format!("it tells of the key {key:?}, which was not asked for"),
        })?;
        Ok(inner.to_owned())
    }

    pub fn entry(&self, found: &KeyValue) -> Result<Entry, DirectoryError> {
        Ok(Entry {
            key: self.inner(found.key())?,
            value: found.value().to_vec(),
            version: unsigned(found.mod_revision())?,
            lease: lease_of(found)?,
        })
    }
}

/// The end of the range of all keys that begin with `prefix`, which is not empty.
pub(super) fn end_of(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    let last = end.last_mut().expect("every prefix in etcd begins with ours");
    // UTF-8 has no byte 255.
    *last += 1;
    end
}

pub(super) fn lease_of(found: &KeyValue) -> Result<Option<LeaseId>, DirectoryError> {
    let lease = unsigned(found.lease())?;
    Ok((lease != 0).then_some(LeaseId(lease)))
}

/// A lease as etcd names it: its numbers are above zero.
pub(super) fn lease_number(id: LeaseId) -> Result<i64, DirectoryError> {
    i64::try_from(id.0).ok().filter(|number| *number > 0).ok_or(DirectoryError::LeaseGone(id))
}

/// A revision or number of a lease.
pub(super) fn unsigned(number: i64) -> Result<u64, DirectoryError> {
    u64::try_from(number)
        .map_err(|_| DirectoryError::Protocol { why: format!("it has the number {number} in it") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_come_back_and_others_do_not() {
        let keys = Keys::new("c");
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
    fn numbers_that_etcd_has_no_lease_for_are_gone() {
        for id in [0, u64::MAX, 1 << 63] {
            assert_eq!(lease_number(LeaseId(id)), Err(DirectoryError::LeaseGone(LeaseId(id))));
        }
        assert_eq!(lease_number(LeaseId(7)), Ok(7));
    }
}
