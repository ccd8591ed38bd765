//! A partition whose memory outlives the store: a store completes it, and a later store adopts it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::SealFlags;

use super::super::completed::{Completed, Identity};
use super::super::log::{Damaged, Log, Origin};
use super::super::memory::Memory;
use super::super::presence::Presence;
use super::super::runs::SharedMemory;
use super::{Partition, Shared};

impl Partition {
    /// Marks the memory as complete, so that another store can adopt it. No thread may use the
    /// partition any more.
    pub fn complete(&self, shared: &Shared, identity: &Identity, now_s: u32, unix_s: i64) {
        let mut inner = self.log.lock();
        // From here on nothing is evicted, cleaned or freed.
        self.begin_leaving();
        self.drop_all_remote(shared, &mut inner);
        inner.log.complete(shared);
        let now_s = self.clock_offset.to_partition(now_s);
        let completed = Completed { cas: inner.log.cas, items: inner.items, now_s, unix_s };
        completed.write(&self.memory, identity);
    }

    /// Adopts the memory of a partition that a store with the same options has completed. If the
    /// memory is not complete, returns an empty partition in it, whose cas numbers begin after
    /// `cas`.
    ///
    /// # Errors
    /// If the memory is damaged, or cannot be cleared.
    pub fn adopt(
        shared: &Shared,
        memory: Memory,
        identity: &Identity,
        cas: u64,
        has_pool: bool,
    ) -> io::Result<(Self, Option<Completed>)> {
        let (number, layout) = (identity.partition, identity.layout);
        let memory = Arc::new(memory);
        if let Some(adopted) = Self::adopt_completed(shared, &memory, identity, has_pool)? {
            return Ok((adopted.0, Some(adopted.1)));
        }
        memory.clear()?;
        let log = Log::new(number, Arc::clone(&memory), layout, cas);
        Ok((Self { has_pool, ..Self::with_log(number, memory, layout, log, 0) }, None))
    }

    /// Adopts the memory of a partition that another store has completed. Returns `None`, and
    /// changes nothing, if that store had other options, or if the memory is not complete.
    ///
    /// # Errors
    /// If the memory is damaged.
    fn adopt_completed(
        shared: &Shared,
        memory: &SharedMemory,
        identity: &Identity,
        has_pool: bool,
    ) -> io::Result<Option<(Self, Completed)>> {
        let (number, layout) = (identity.partition, identity.layout);
        let Some(completed) = Completed::adopt(memory, identity) else { return Ok(None) };
        let log = Log::adopt(number, Arc::clone(memory), layout, shared, completed.cas, Origin::Restart);
        let damaged = |Damaged| io::Error::other(format!("the memory of partition {number} is damaged"));
        let log = log.map_err(damaged)?;
        let memory = Arc::clone(memory);
        let partition = Self { has_pool, ..Self::with_log(number, memory, layout, log, completed.items) };
        let mut inner = partition.log.lock();
        partition.charge_index(shared, &mut inner);
        partition.publish_oldest(&mut inner);
        drop(inner);
        Ok(Some((partition, completed)))
    }

    /// Adopts the memory of a partition that an earlier store with the same options has completed.
    /// The partition's seconds continue. The clock of this store shows `now_s`, and the time since
    /// 1970 is `unix_s`.
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
            return Err(io::Error::other("the memory has the size of a server with other options"));
        }
        let memory = Arc::new(Memory::map(Arc::new(memory), 0, bytes)?);
        let Some((partition, completed)) = Self::adopt_completed(shared, &memory, identity, has_pool)? else {
            return Err(io::Error::other("the memory is not complete, or is of a server with other options"));
        };
        if shared.budget.used() > shared.budget.limit() {
            partition.forget(shared, Presence::Unknown)?;
            return Err(io::Error::other("the memory exceeds the limit of this server"));
        }
        let Completed { now_s: second, unix_s: then_s, .. } = completed;
        // The time since then has passed for items, too, unless the system's clock was set back.
        let second = i64::from(second).saturating_add(unix_s.saturating_sub(then_s).max(0));
        partition.clock_offset.set(i32::try_from(second - i64::from(now_s)).unwrap_or(i32::MAX));
        Ok(partition)
    }

    /// The number of items.
    pub fn items(&self) -> u64 {
        self.log.lock().items
    }
}
