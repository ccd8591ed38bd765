//! A partition in memory that an earlier store has kept.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::SealFlags;

use super::super::completed::{Completed, Identity};
use super::super::memory::Memory;
use super::{Partition, Shared};

impl Partition {
    /// The partition in memory that an earlier store with the same options has completed. Its
    /// seconds go on, while the clock of this store shows `now_s`, which is `unix_s` since 1970.
    ///
    /// # Errors
    /// If the memory is not that of this partition, not complete, or damaged.
    pub(in super::super) fn adopt_kept(
        shared: &Shared,
        memory: OwnedFd,
        identity: &Identity,
        has_pool: bool,
        now_s: u32,
        unix_s: i64,
    ) -> io::Result<Self> {
        let bytes = identity.layout.bytes();
        let seals = rustix::fs::fcntl_get_seals(&memory)?;
        let len = u64::try_from(rustix::fs::fstat(&memory)?.st_size).unwrap_or(0);
        if !seals.contains(SealFlags::SHRINK) || len != bytes as u64 {
            return Err(io::Error::other("it has another size, as with other options"));
        }
        let memory = Memory::map(Arc::new(memory), 0, bytes)?;
        let (partition, completed) = Self::adopt(shared, memory, identity, 0, has_pool)?;
        let Some(Completed { now_s: second, unix_s: then_s, .. }) = completed else {
            return Err(io::Error::other("it is not complete, or that of a server with other options"));
        };
        // The time in between has passed for items, too, unless the system's clock was set back.
        let second = i64::from(second) + (unix_s - then_s).max(0);
        partition.shift.set(i32::try_from(second - i64::from(now_s)).unwrap_or(i32::MAX));
        Ok(partition)
    }

    /// Items.
    pub fn items(&self) -> u64 {
        self.lock().items
    }
}
