//! The memory of a segment at a host: the bytes, and presence bits for each generation in which the
//! host owned the segment.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use aquifer_channel::descriptor_shares::DescriptorCharge;
use aquifer_fabric::{Access, Memory, Region, Scope, Target, TargetError};

use super::journal::{self, JOURNAL_BYTES, JournalEntry};
use crate::pulling::lineage::LINKS_MAX;

/// Length of a page in bytes.
pub const PAGE_BYTES: u64 = 4096;
/// Descriptors that are charged for the memory of a segment. The memory has half as many, but it
/// also uses two of the target's 65,536 regions.
pub const SEGMENT_DESCRIPTORS: usize = 8;

/// The memory of a segment, which other hosts can read.
#[derive(Debug)]
pub struct SegmentMemory {
    /// The keeper's item number.
    pub number: u64,
    /// The tenant of the segment.
    pub tenant: u32,
    /// The memory with the segment's bytes.
    pub data: Arc<Memory>,
    /// The maps of presence bits, and behind them the journal.
    present: Arc<Memory>,
    data_region: Region,
    present_region: Region,
    /// The generation of each map of presence bits.
    maps: [Option<u64>; LINKS_MAX],
    map_bytes: usize,
    /// The sequence number of the last entry in the journal.
    sequence: u64,
    descriptors: DescriptorCharge,
}

impl SegmentMemory {
    /// Creates memory of `bytes` bytes, which hosts with the cluster key can read. The length must
    /// be a multiple of the page size.
    ///
    /// # Errors
    /// If the system or the target refuses.
    pub fn create(
        target: &dyn Target,
        number: u64,
        tenant: u32,
        bytes: u64,
        descriptors: DescriptorCharge,
    ) -> Result<Self, TargetError> {
        let (len, map_bytes) = lengths(bytes)?;
        let data = Memory::create("aquifer-segment", len).map_err(system)?;
        let pages_len = journal_at(map_bytes) + JOURNAL_BYTES;
        let present = Memory::create("aquifer-segment-pages", pages_len).map_err(system)?;
        Self::register(target, (number, tenant), data, present, descriptors)
    }

    /// Opens the memory that an earlier process has left. Returns it with the last entry of its
    /// journal; `None` if there is no valid entry.
    ///
    /// # Errors
    /// If the descriptors are not a segment's memory, or the target refuses.
    pub fn recover(
        target: &dyn Target,
        (number, tenant): (u64, u32),
        data: OwnedFd,
        present: OwnedFd,
        descriptors: DescriptorCharge,
    ) -> Result<(Self, Option<JournalEntry>), TargetError> {
        let data = Memory::whole(data).map_err(system)?;
        let (_, map_bytes) = lengths(data.len() as u64)?;
        let at = journal_at(map_bytes);
        let present = Memory::from_fd(present, at + JOURNAL_BYTES).map_err(system)?;
        let last = journal::read(&present, at);
        let mut memory = Self::register(target, (number, tenant), data, present, descriptors)?;
        let Some((sequence, entry)) = last else { return Ok((memory, None)) };
        memory.sequence = sequence;
        for (map, generation) in memory.maps.iter_mut().zip(&entry.maps) {
            *map = *generation;
        }
        Ok((memory, Some(entry)))
    }

    fn register(
        target: &dyn Target,
        (number, tenant): (u64, u32),
        data: Memory,
        present: Memory,
        descriptors: DescriptorCharge,
    ) -> Result<Self, TargetError> {
        let (_, map_bytes) = lengths(data.len() as u64)?;
        let (data, present) = (Arc::new(data), Arc::new(present));
        let data_region = target.register(Arc::clone(&data), Access::READ, Scope::Anyone)?;
        let present_region = target.register(Arc::clone(&present), Access::READ, Scope::Anyone)?;
        let maps = [None; LINKS_MAX];
        let sequence = 0;
        Ok(Self {
            number,
            tenant,
            data,
            present,
            data_region,
            present_region,
            maps,
            map_bytes,
            sequence,
            descriptors,
        })
    }

    /// The descriptors of the memory with the bytes, and of the memory with presence bits and
    /// journal.
    #[must_use]
    pub fn fds(&self) -> [BorrowedFd<'_>; 2] {
        [self.data.fd(), self.present.fd()]
    }

    /// The generation of each map of presence bits.
    #[must_use]
    pub fn maps(&self) -> Vec<Option<u64>> {
        self.maps.to_vec()
    }

    /// Writes an entry to the journal, for the next process of the agent.
    pub fn write_journal(&mut self, entry: &JournalEntry) {
        journal::write(&self.present, journal_at(self.map_bytes), &mut self.sequence, entry);
    }

    /// Deregisters the memory from the target, and waits until no READ of it is in flight.
    pub fn close(&self, target: &dyn Target) {
        for key in [self.data_region.key, self.present_region.key] {
            if let Err(error) = target.deregister(key) {
                tracing::warn!(%error, "cannot deregister the memory of a segment");
            }
        }
    }

    /// The owner of the tenant's user id, to which the memory is charged.
    #[must_use]
    pub const fn owner(&self) -> u32 {
        self.descriptors.owner()
    }

    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.data.len() as u64
    }

    /// Number of pages.
    #[must_use]
    pub fn pages(&self) -> u32 {
        u32::try_from(self.bytes() / PAGE_BYTES).unwrap_or(u32::MAX)
    }

    /// Begins a map for a generation, in the place of one whose generation is not among `needed`.
    /// With `is_whole`, all pages are present, otherwise none. Returns false if there is no place.
    #[must_use]
    pub fn begin_map(&mut self, generation: u64, needed: &[u64], is_whole: bool) -> bool {
        let is_free = |map: &Option<u64>| map.is_none_or(|generation| !needed.contains(&generation));
        let Some(at) = self.maps.iter().position(is_free) else { return false };
        self.maps[at] = Some(generation);
        let word = if is_whole { u64::MAX } else { 0 };
        for offset in (at * self.map_bytes..(at + 1) * self.map_bytes).step_by(8) {
            self.present.atomic_u64(offset).store(word, Ordering::Release);
        }
        true
    }

    /// Sets the presence bit of a page. Its bytes must be in the memory.
    pub fn set_present(&self, generation: u64, page: u32) {
        if let Some(map) = self.map(generation) {
            let word = self.present.atomic_u64(map + page as usize / 64 * 8);
            word.fetch_or(1 << (page % 64), Ordering::Release);
        }
    }

    /// Whether a page is present in the copy of a generation.
    #[must_use]
    pub fn is_present(&self, generation: u64, page: u32) -> bool {
        let map = self.map(generation);
        map.is_some_and(|map| self.present.load_u64(map + page as usize / 64 * 8) & 1 << (page % 64) != 0)
    }

    /// The address and the key at which other hosts read the bytes, and those of the map of a
    /// generation; `None` if the generation has no map.
    #[must_use]
    pub fn place(&self, generation: u64) -> Option<[(u64, u32); 2]> {
        let map = self.map(generation)? as u64;
        let Self { data_region, present_region, .. } = self;
        Some([(data_region.base, data_region.key.0), (present_region.base + map, present_region.key.0)])
    }

    /// The offset in bytes of the map of a generation.
    fn map(&self, generation: u64) -> Option<usize> {
        self.maps.iter().position(|map| *map == Some(generation)).map(|at| at * self.map_bytes)
    }
}

fn system(source: io::Error) -> TargetError {
    TargetError::System { what: "cannot create a segment", source }
}

/// The lengths in bytes of a segment and of a map of its presence bits.
fn lengths(bytes: u64) -> Result<(usize, usize), TargetError> {
    let length = |bytes: u64| usize::try_from(bytes).map_err(|error| system(io::Error::other(error)));
    Ok((length(bytes)?, length((bytes / PAGE_BYTES).div_ceil(64) * 8)?))
}

fn journal_at(map_bytes: usize) -> usize {
    map_bytes * LINKS_MAX
}
