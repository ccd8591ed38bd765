//! What a session takes: of its stock, or of the pool.

use std::time::{Duration, Instant};

use aquifer_ipc::ring::{ExtentAnswer, ExtentRequest, ExtentStatus};
use aquifer_pool::{Extent, SizeClass};

use super::{NO_REQUEST, Pool, Session, given, key_of};
use crate::book::{EXTENTS_MAX, Entry, State};

/// Most extents that are taken at once where a program waits for them.
const AT_ONCE_MAX: usize = 64;
/// And no more than so many bytes, for they are all of one node.
const AT_ONCE_BYTES_MAX: u64 = 1 << 20;
/// How often to look whether nodes have cleared enough; after how long without any progress they are not about to; and how long to wait at most.
const CLEARING_LOOK: Duration = Duration::from_millis(20);
const CLEARING_STALLED: Duration = Duration::from_millis(500);
const CLEARING_MAX: Duration = Duration::from_secs(5);

impl<P: Pool> Session<P> {
    /// So many of this size are asked for, one after another.
    pub(super) fn allocate(&mut self, request: u64, class: u8, ahead: usize) -> ExtentAnswer {
        let Some(class) = SizeClass::new(class) else {
            return ExtentAnswer::without_extent(ExtentStatus::BadRequest);
        };
        if let Some(extent) = self.resume(request, class, 1) {
            return given(&extent);
        }
        let mut stocked = self.stock.take(class);
        let at_once = at_once_max(class).min(ahead);
        if stocked.is_none() && at_once > 1 && self.stock_up(class, at_once).is_ok() {
            stocked = self.stock.take(class);
        }
        if let Some(number) = stocked {
            let Some(Entry { extent, .. }) = self.book.entry(number) else {
                return ExtentAnswer::without_extent(ExtentStatus::Failed);
            };
            self.book.set(number, State::Given, request);
            self.holdings.stocked_bytes -= class.bytes();
            return self.give(&extent, 1);
        }
        match self.take_at_any_cost(|session| session.take(class, request)) {
            Ok(extent) => self.give(&extent, 1),
            Err(status) => ExtentAnswer::without_extent(status),
        }
    }

    pub(super) fn allocate_stretch(&mut self, request: u64, sections: u32) -> ExtentAnswer {
        if let Some(first) = self.resume(request, SizeClass::SECTION, sections) {
            return given(&first);
        }
        match self.take_when_clear(sections, request) {
            Ok(first) => self.give(&first, sections),
            Err(status) => ExtentAnswer::without_extent(status),
        }
    }

    /// Take a stretch. What was given back a moment ago is cleared before others may have it: that is waited for, as long as it goes on.
    fn take_when_clear(&mut self, sections: u32, request: u64) -> Result<Extent, ExtentStatus> {
        let begun = Instant::now();
        let (mut least, mut since) = (u32::MAX, begun);
        loop {
            let taken = self.take_at_any_cost(|session| session.take_stretch(sections, request));
            if taken != Err(ExtentStatus::Full) || begun.elapsed() > CLEARING_MAX {
                return taken;
            }
            let Some(left) = self.pool.sections_to_clear(sections) else { return taken };
            if left < least {
                (least, since) = (left, Instant::now());
            } else if since.elapsed() > CLEARING_STALLED {
                return taken;
            }
            std::thread::sleep(CLEARING_LOOK);
        }
    }

    /// Take something of the pool, if need be after what is in stock was given back.
    fn take_at_any_cost<T>(
        &mut self,
        mut take: impl FnMut(&mut Self) -> Result<T, ExtentStatus>,
    ) -> Result<T, ExtentStatus> {
        match take(self) {
            Err(ExtentStatus::Full | ExtentStatus::Quota | ExtentStatus::TooMany)
                if self.holdings.stocked_bytes > 0 =>
            {
                self.drop_stock();
                take(self)
            }
            taken => taken,
        }
    }

    /// What an agent that was killed took for the request that it could not conclude: the first of so many, if they are all there. Else they go back.
    fn resume(&mut self, request: u64, class: SizeClass, count: u32) -> Option<Extent> {
        let numbers = std::mem::take(&mut self.resumed);
        let taken = numbers.into_iter().filter_map(|number| Some((number, self.book.entry(number)?)));
        let taken: Vec<(u32, Entry)> =
            taken.filter(|(_, entry)| entry.request == request && entry.state == State::Given).collect();
        let extents = || taken.iter().map(|(_, entry)| entry.extent);
        if extents().filter(|extent| extent.class == class).count() == count as usize {
            return extents().min_by_key(|extent| extent.addr);
        }
        for (_, Entry { extent, .. }) in &taken {
            self.holdings.extents -= 1;
            self.holdings.bytes -= extent.class.bytes();
        }
        let numbers: Vec<u32> = taken.into_iter().map(|(number, _)| number).collect();
        self.return_to_pool(&numbers);
        None
    }

    fn give(&mut self, first: &Extent, count: u32) -> ExtentAnswer {
        self.holdings.extents += u64::from(count);
        self.holdings.bytes += u64::from(count) * first.class.bytes();
        given(first)
    }

    /// Take one of the pool for the program, and write it down.
    fn take(&mut self, class: SizeClass, request: u64) -> Result<Extent, ExtentStatus> {
        let _under_way = self.pool.under_way();
        let extent = self.take_within(1, class.bytes(), |pool| pool.allocate(class))?;
        self.note(&extent, State::Given, request);
        Ok(extent)
    }

    /// Take up to so many into the stock, at least one.
    pub(super) fn stock_up(&mut self, class: SizeClass, count: usize) -> Result<(), ExtentStatus> {
        let _under_way = self.pool.under_way();
        let count = u32::try_from(count).unwrap_or(1);
        let bytes = class.bytes() * u64::from(count);
        let taken = self.take_within(count, bytes, |pool| pool.allocate_many(class, count))?;
        let taken_bytes = class.bytes() * taken.len() as u64;
        self.account.give(bytes - taken_bytes);
        self.holdings.stocked_bytes += taken_bytes;
        for extent in taken {
            let number = self.note(&extent, State::Stocked, NO_REQUEST);
            self.stock.put(class, number);
        }
        Ok(())
    }

    /// Take so many sections side by side, and write them down; the first of them.
    fn take_stretch(&mut self, sections: u32, request: u64) -> Result<Extent, ExtentStatus> {
        let _under_way = self.pool.under_way();
        let bytes = u64::from(sections) * SizeClass::SECTION.bytes();
        let stretch = self.take_within(sections, bytes, |pool| pool.allocate_stretch(sections))?;
        for extent in stretch.extents() {
            self.note(&extent, State::Given, request);
        }
        Ok(stretch.first)
    }

    /// Take something that is so many extents, if the book has room for them and the user may have so much.
    fn take_within<T>(
        &mut self,
        count: u32,
        bytes: u64,
        take: impl FnOnce(&mut P) -> Result<T, ExtentStatus>,
    ) -> Result<T, ExtentStatus> {
        if self.gaps.len() + ((EXTENTS_MAX - self.book.end()) as usize) < count as usize {
            return Err(ExtentStatus::TooMany);
        }
        if !self.account.take(bytes, self.pool.quota_bytes()) {
            return Err(ExtentStatus::Quota);
        }
        take(&mut self.pool).inspect_err(|_| self.account.give(bytes))
    }

    fn note(&mut self, extent: &Extent, state: State, request: u64) -> u32 {
        let number = self.gaps.pop().unwrap_or_else(|| self.book.end());
        self.book.add(number, extent, state, request);
        self.known.insert(key_of(extent), number);
        number
    }
}

/// How many of a size are taken at once.
pub(super) fn at_once_max(class: SizeClass) -> usize {
    usize::try_from(AT_ONCE_BYTES_MAX / class.bytes()).map_or(1, |most| most.clamp(1, AT_ONCE_MAX))
}

/// How many requests for the same size come one after another.
pub(super) fn alike(requests: &[Option<ExtentRequest>]) -> usize {
    requests.iter().take_while(|request| **request == requests[0]).count()
}
