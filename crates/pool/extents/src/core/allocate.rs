//! Allocation for a session, from its stock or from the pool.

use std::time::Duration;

use aquifer_ipc::ring::{RingAnswer, RingRequest, RingStatus};
use aquifer_pool::{Extent, SizeClass};

use super::ExtentPool;
use super::session::{SessionCore, allocated, extent_id};
use crate::book::{BookEntry, EXTENTS_MAX, ExtentState};

/// Request number of entries that no request has changed.
const NO_REQUEST: u64 = u64::MAX;
/// Maximum number of extents that are allocated together while the program waits.
const BATCH_EXTENTS_MAX: usize = 64;
/// Maximum bytes that are allocated together, because they are all on one node.
const BATCH_BYTES_MAX: u64 = 1 << 20;
/// Interval at which the session checks whether nodes have cleared freed sections.
const CLEARING_INTERVAL: Duration = Duration::from_millis(20);
/// Time without a cleared section after which the session no longer waits for nodes to clear
/// sections. A node that shares its processor with others may not run for a while.
const CLEARING_STALLED: Duration = Duration::from_secs(3);
/// Maximum time for which a stretch waits for nodes to clear sections.
const CLEARING_MAX: Duration = Duration::from_secs(10);

impl<P: ExtentPool> SessionCore<P> {
    /// Answers an allocation. `ahead` is the number of equal requests in the ring, with this one.
    pub(super) fn allocate(&mut self, request: u64, class: u8, ahead: usize) -> RingAnswer {
        let Some(class) = SizeClass::new(class) else {
            return RingAnswer::without_extent(RingStatus::BadRequest);
        };
        if let Some(extent) = self.resume_allocation(request, class, 1) {
            return allocated(&extent);
        }
        let mut stocked = self.stock.pop(class);
        let batch = batch_max(class).min(ahead);
        if stocked.is_none() && batch > 1 && self.stock_up(class, batch).is_ok() {
            stocked = self.stock.pop(class);
        }
        if let Some(number) = stocked {
            let Some(BookEntry { extent, .. }) = self.book.entry(number) else {
                return RingAnswer::without_extent(RingStatus::Failed);
            };
            self.book.set_state(number, ExtentState::InUse, request);
            self.usage.stocked_bytes -= class.bytes();
            return self.count_allocation(&extent, 1);
        }
        match self.retry_without_stock(|session| session.allocate_from_pool(class, request)) {
            Ok(extent) => self.count_allocation(&extent, 1),
            Err(status) => RingAnswer::without_extent(status),
        }
    }

    /// Answers the allocation of a stretch.
    pub(super) fn allocate_stretch(&mut self, request: u64, sections: u32) -> RingAnswer {
        if let Some(first) = self.resume_allocation(request, SizeClass::SECTION, sections) {
            return allocated(&first);
        }
        match self.allocate_cleared_stretch(sections, request) {
            Ok(first) => self.count_allocation(&first, sections),
            Err(status) => RingAnswer::without_extent(status),
        }
    }

    /// Allocates a stretch, and waits while nodes clear freed sections that it needs.
    ///
    /// A section that another tenant has freed cannot be allocated before its node has cleared it.
    fn allocate_cleared_stretch(&mut self, sections: u32, request: u64) -> Result<Extent, RingStatus> {
        let began = self.pool.now();
        let (mut progress, mut progress_at) = (None, began);
        loop {
            let stretch =
                self.retry_without_stock(|session| session.allocate_stretch_from_pool(sections, request));
            let bytes = u64::from(sections) * SizeClass::SECTION.bytes();
            let is_full = stretch == Err(RingStatus::Full) && self.pool.has_room(bytes);
            if !is_full || self.pool.now() - began > CLEARING_MAX {
                return stretch;
            }
            let found = self.pool.clearing_progress(sections);
            let now = self.pool.now();
            if found.is_none() {
                return stretch;
            } else if found != progress {
                (progress, progress_at) = (found, now);
            } else if now - progress_at > CLEARING_STALLED {
                return stretch;
            }
            self.pool.pause(CLEARING_INTERVAL);
        }
    }

    /// Allocates from the pool; if that fails for lack of room or quota, frees the stock and
    /// retries.
    fn retry_without_stock<T>(
        &mut self,
        mut allocate: impl FnMut(&mut Self) -> Result<T, RingStatus>,
    ) -> Result<T, RingStatus> {
        match allocate(self) {
            Err(RingStatus::Full | RingStatus::Quota | RingStatus::TooMany)
                if self.usage.stocked_bytes > 0 =>
            {
                self.free_stock();
                allocate(self)
            }
            outcome => outcome,
        }
    }

    /// The first of the extents that a killed agent had already allocated for this request.
    ///
    /// If some of the `count` extents are missing, frees the others and returns `None`.
    fn resume_allocation(&mut self, request: u64, class: SizeClass, count: u32) -> Option<Extent> {
        let numbers = std::mem::take(&mut self.resumed);
        let entries = numbers.into_iter().filter_map(|number| Some((number, self.book.entry(number)?)));
        let entries: Vec<(u32, BookEntry)> = entries
            .filter(|(_, entry)| entry.request == request && entry.state == ExtentState::InUse)
            .collect();
        let extents = || entries.iter().map(|(_, entry)| entry.extent);
        if extents().filter(|extent| extent.class == class).count() == count as usize {
            return extents().min_by_key(|extent| extent.addr);
        }
        for (_, BookEntry { extent, .. }) in &entries {
            self.usage.extents -= 1;
            self.usage.bytes -= extent.class.bytes();
        }
        let numbers: Vec<u32> = entries.into_iter().map(|(number, _)| number).collect();
        self.free_entries(&numbers);
        None
    }

    fn count_allocation(&mut self, first: &Extent, count: u32) -> RingAnswer {
        self.usage.extents += u64::from(count);
        self.usage.bytes += u64::from(count) * first.class.bytes();
        allocated(first)
    }

    /// Allocates an extent for the program and records it in the book.
    fn allocate_from_pool(&mut self, class: SizeClass, request: u64) -> Result<Extent, RingStatus> {
        let _in_progress = self.pool.begin_allocation();
        let extent = self.allocate_within_limits(1, class.bytes(), |pool| pool.allocate(class))?;
        self.record(&extent, ExtentState::InUse, request);
        Ok(extent)
    }

    /// Allocates up to `count` extents, at least one, into the stock.
    pub(super) fn stock_up(&mut self, class: SizeClass, count: usize) -> Result<(), RingStatus> {
        let _in_progress = self.pool.begin_allocation();
        let count = u32::try_from(count).unwrap_or(1);
        let bytes = class.bytes() * u64::from(count);
        let extents = self.allocate_within_limits(count, bytes, |pool| pool.allocate_many(class, count))?;
        let allocated_bytes = class.bytes() * extents.len() as u64;
        self.account.release(bytes - allocated_bytes);
        self.usage.stocked_bytes += allocated_bytes;
        for extent in extents {
            let number = self.record(&extent, ExtentState::Stocked, NO_REQUEST);
            self.stock.push(class, number);
        }
        Ok(())
    }

    /// Allocates a stretch for the program, records its sections, and returns the first.
    fn allocate_stretch_from_pool(&mut self, sections: u32, request: u64) -> Result<Extent, RingStatus> {
        let _in_progress = self.pool.begin_allocation();
        let bytes = u64::from(sections) * SizeClass::SECTION.bytes();
        let stretch = self.allocate_within_limits(sections, bytes, |pool| pool.allocate_stretch(sections))?;
        for extent in stretch.extents() {
            self.record(&extent, ExtentState::InUse, request);
        }
        Ok(stretch.first)
    }

    /// Allocates `count` extents if the book has room for them, the user's quota permits `bytes`,
    /// and as much is free beyond what is left to other users.
    fn allocate_within_limits<T>(
        &mut self,
        count: u32,
        bytes: u64,
        allocate: impl FnOnce(&mut P) -> Result<T, RingStatus>,
    ) -> Result<T, RingStatus> {
        if self.unused_entries.len() + ((EXTENTS_MAX - self.book.end()) as usize) < count as usize {
            return Err(RingStatus::TooMany);
        }
        if !self.account.reserve(bytes, self.pool.quota_bytes()) {
            return Err(RingStatus::Quota);
        }
        if !self.pool.has_room(bytes) {
            self.account.release(bytes);
            return Err(RingStatus::Full);
        }
        allocate(&mut self.pool).inspect_err(|_| self.account.release(bytes))
    }

    /// Records an extent in the book and returns the number of its entry.
    fn record(&mut self, extent: &Extent, state: ExtentState, request: u64) -> u32 {
        let number = self.unused_entries.pop().unwrap_or_else(|| self.book.end());
        self.book.insert(number, extent, state, request);
        self.known.insert(extent_id(extent), number);
        number
    }
}

/// Maximum number of extents of a size class that are allocated together.
pub(super) fn batch_max(class: SizeClass) -> usize {
    usize::try_from(BATCH_BYTES_MAX / class.bytes()).map_or(1, |count| count.clamp(1, BATCH_EXTENTS_MAX))
}

/// Number of equal requests at the start of a non-empty slice.
pub(super) fn equal_requests(requests: &[Option<RingRequest>]) -> usize {
    requests.iter().take_while(|request| **request == requests[0]).count()
}
