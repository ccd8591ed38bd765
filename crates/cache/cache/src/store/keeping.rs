//! Partitions whose memory outlives the store: a store completes them, and a later store adopts
//! them.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;

use super::partition::Partition;
use super::{Shared, Store, StoreOptions, cas, identity, layout_of};

impl Store {
    /// Creates a store that adopts the memory of partitions that an earlier store with the same
    /// options has completed, by their numbers. A partition whose memory cannot be used, or exceeds
    /// the limit, is empty. `now_s` is the second of this store's clock, and `unix_s` the same
    /// second since 1970.
    ///
    /// # Errors
    /// If the system has no memory or descriptors for it.
    pub fn with_kept(
        options: &StoreOptions,
        mut kept: BTreeMap<usize, OwnedFd>,
        now_s: u32,
        unix_s: i64,
    ) -> io::Result<Self> {
        let shared = Shared::new(options);
        let has_pool = options.pool > 0;
        let mut adopted = Vec::new();
        let partition = |number: usize| {
            let identity = identity(options, &shared, number);
            let adopt = |memory| Partition::adopt_kept(&shared, memory, &identity, has_pool, now_s, unix_s);
            match kept.remove(&number).map(adopt) {
                Some(Ok(partition)) => {
                    adopted.push(number);
                    return Ok(partition);
                }
                Some(Err(error)) => {
                    tracing::warn!(%error, partition = number, "cannot adopt a kept partition; it is empty");
                }
                None => {}
            }
            Partition::create(number, layout_of(options), cas::before_first(number, 0), has_pool)
        };
        let partitions = (0..options.partitions).map(partition).collect::<io::Result<_>>()?;
        let adopted = adopted.into();
        Ok(Self { adopted, ..Self::with_partitions(options, partitions, shared) })
    }

    /// The partitions whose memory was that of an earlier store.
    #[must_use]
    pub fn adopted(&self) -> &[usize] {
        &self.adopted
    }

    /// Completes a partition, for a later store with the same options; returns its memory. No
    /// thread may use the store any more. `None` if its items are to be flushed in a later second.
    ///
    /// # Errors
    /// If there is no descriptor left.
    pub fn keep(
        &self,
        options: &StoreOptions,
        partition: usize,
        now_s: u32,
        unix_s: i64,
    ) -> io::Result<Option<OwnedFd>> {
        let kept = &self.partitions[partition];
        if kept.flush_s() != 0 {
            return Ok(None);
        }
        kept.complete(&self.shared, &identity(options, &self.shared, partition), now_s, unix_s);
        kept.descriptor().map(Some)
    }
}
