//! The memory of a segment at a host: its bytes, and for each generation in which the host owned it
//! a bit for each page that is present.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use aquifer_fabric::{Access, Memory, Region, Scope, Target, TargetError};

use crate::pulling::lineage::LINKS_MAX;

/// Bytes of a page.
pub const PAGE_BYTES: u64 = 4096;

/// The memory of a segment, which other hosts can read.
#[derive(Debug)]
pub struct SegmentMemory {
    /// The bytes.
    pub data: Arc<Memory>,
    present: Arc<Memory>,
    data_region: Region,
    present_region: Region,
    /// The generation of each map of pages that are present.
    maps: [Option<u64>; LINKS_MAX],
    map_bytes: usize,
}

impl SegmentMemory {
    /// Memory for `bytes` bytes, whole pages, which hosts with the cluster key can read.
    ///
    /// # Errors
    /// If the system or the target refuses.
    pub fn create(target: &dyn Target, bytes: u64) -> Result<Self, TargetError> {
        let system = |source: io::Error| TargetError::System { what: "cannot create a segment", source };
        let len = usize::try_from(bytes).map_err(|error| system(io::Error::other(error)))?;
        let map_bytes = (bytes / PAGE_BYTES).div_ceil(64) * 8;
        let map_bytes = usize::try_from(map_bytes).map_err(|error| system(io::Error::other(error)))?;
        let data = Arc::new(Memory::create("aquifer-segment", len).map_err(system)?);
        let present = Memory::create("aquifer-segment-pages", map_bytes * LINKS_MAX).map_err(system)?;
        let present = Arc::new(present);
        let data_region = target.register(Arc::clone(&data), Access::READ, Scope::Anyone)?;
        let present_region = target.register(Arc::clone(&present), Access::READ, Scope::Anyone)?;
        Ok(Self { data, present, data_region, present_region, maps: [None; LINKS_MAX], map_bytes })
    }

    /// Takes the memory from the target. No READ of it is in flight any more.
    pub fn close(&self, target: &dyn Target) {
        for key in [self.data_region.key, self.present_region.key] {
            if let Err(error) = target.deregister(key) {
                tracing::warn!(%error, "cannot withdraw the memory of a segment");
            }
        }
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

    /// Begins a map for a generation, without a page or with all, in the place of one that is not
    /// among `needed`. Returns false if there is no place.
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

    /// Records that a page is present. Its bytes must be in place.
    pub fn set_present(&self, generation: u64, page: u32) {
        if let Some(map) = self.map(generation) {
            let word = self.present.atomic_u64(map + page as usize / 64 * 8);
            word.fetch_or(1 << (page % 64), Ordering::Release);
        }
    }

    /// Whether a page is present in a generation.
    #[must_use]
    pub fn is_present(&self, generation: u64, page: u32) -> bool {
        let map = self.map(generation);
        map.is_some_and(|map| self.present.load_u64(map + page as usize / 64 * 8) & 1 << (page % 64) != 0)
    }

    /// The address and the key of the bytes, and those of the map of a generation, for others.
    #[must_use]
    pub fn place(&self, generation: u64) -> Option<[(u64, u32); 2]> {
        let map = self.map(generation)? as u64;
        let Self { data_region, present_region, .. } = self;
        Some([(data_region.base, data_region.key.0), (present_region.base + map, present_region.key.0)])
    }

    fn map(&self, generation: u64) -> Option<usize> {
        self.maps.iter().position(|map| *map == Some(generation)).map(|at| at * self.map_bytes)
    }
}
