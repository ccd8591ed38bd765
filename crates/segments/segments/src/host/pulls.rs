//! Pulls pages: carries out the steps of a puller, and maps the pages in the program.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::memory::{PAGE_BYTES, SegmentMemory};
use super::peer::{Lane, PAGES_MAX};
use super::served::ServedFaults;
use super::shared::{HostShared, Segment};
use super::wire::{Answer, Ask, Request};
use super::{SegmentError, SegmentKey};
use crate::pulling::{ReadEnd, ReadMode, ReadOrder, Step};
use aquifer_ownership::Life;

/// Maximum number of pages that are read at once ahead of programs while demands are expected. It
/// bounds the time for which a demand waits behind these pages.
const PAGES_BETWEEN_DEMANDS: u32 = 8;
/// Interval between attempts to read from a host whose agent is away.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

impl HostShared {
    /// Pulls a page, if it is not present.
    ///
    /// # Errors
    /// If the segment is not owned here, or the page is lost.
    ///
    /// # Panics
    /// If the segment has no such page.
    pub(super) fn pull(&self, segment: SegmentKey, page: u32) -> Result<(), SegmentError> {
        let entry = self.owned(segment)?;
        let step = {
            let mut entry = entry.lock();
            loop {
                // Otherwise a READ could begin after the hand-over, and end in a later generation.
                if !entry.holder.has_access() {
                    return Err(SegmentError::NotOwned(segment));
                }
                let Some(puller) = &mut entry.puller else { return Ok(()) };
                match puller.demand(page) {
                    Some(Step::Complete { .. }) => return Ok(()),
                    Some(step) => break step,
                    // Another thread reads the page.
                    None => {
                        let pulled = Arc::clone(&entry.pulled);
                        pulled.wait(&mut entry);
                    }
                }
            }
        };
        self.carry_out_pull(segment, &entry, vec![step], false)
    }

    /// Pulls pages for which threads of the program wait, and wakes these threads.
    ///
    /// Pages that another thread reads are skipped: that thread wakes the threads that wait for
    /// them. Returns whether no page was skipped.
    ///
    /// # Errors
    /// If the segment is not owned here, or a page is lost: then an access to it raises SIGBUS.
    ///
    /// # Panics
    /// If the segment has no such page.
    pub(super) fn demand(&self, segment: SegmentKey, pages: &[u32]) -> Result<bool, SegmentError> {
        let entry = self.owned(segment)?;
        let steps: Vec<Step> = {
            let mut entry = entry.lock();
            if !entry.holder.has_access() {
                return Err(SegmentError::NotOwned(segment));
            }
            let complete = |page| Some(Step::Complete { page, is_demanded: true });
            let mut demand = |page: &u32| match &mut entry.puller {
                Some(puller) => puller.demand(*page),
                None => complete(*page),
            };
            pages.iter().filter_map(&mut demand).collect()
        };
        let are_all = steps.len() == pages.len();
        self.carry_out_pull(segment, &entry, steps, true)?;
        Ok(are_all)
    }

    /// Pulls the pages of a range that are not present.
    ///
    /// # Errors
    /// If the segment is not owned here, or a page is lost.
    ///
    /// # Panics
    /// If the segment has no such pages.
    pub(super) fn pull_range(&self, segment: SegmentKey, pages: Range<u32>) -> Result<(), SegmentError> {
        for first in pages.clone().step_by(PAGES_MAX as usize) {
            let end = pages.end.min(first.saturating_add(PAGES_MAX));
            self.demand(segment, &(first..end).collect::<Vec<_>>())?;
        }
        // Waits for the pages that other threads pull, and fails if one of them is lost.
        pages.into_iter().try_for_each(|page| self.pull(segment, page))
    }

    /// Pulls all pages that are not present. Then the segment does not depend on other hosts.
    ///
    /// # Errors
    /// If the segment is not owned here, or a page is lost.
    pub(super) fn pull_all(&self, segment: SegmentKey) -> Result<(), SegmentError> {
        while self.pull_ahead(segment)? {}
        let entry = self.owned(segment)?;
        let pages = entry.lock().memory.as_ref().map_or(0, SegmentMemory::pages);
        (0..pages).try_for_each(|page| self.pull(segment, page))?;
        self.finish(segment, &entry);
        Ok(())
    }

    /// Discards the pages that are not present.
    pub(super) fn discard(&self, segment: SegmentKey) -> Result<(), SegmentError> {
        let entry = self.owned(segment)?;
        if let Some(puller) = &mut entry.lock().puller {
            puller.discard();
        }
        self.release_copies(segment, &entry);
        Ok(())
    }

    /// Pulls some pages ahead of the program, over a connection for these pages only, after demands
    /// and within the rate limit. Returns whether pages are left to pull.
    ///
    /// # Errors
    /// If the segment is not owned here, or a page is lost.
    pub(super) fn pull_ahead(&self, segment: SegmentKey) -> Result<bool, SegmentError> {
        let pages_max = if self.precedence.wait_for_demands() { PAGES_BETWEEN_DEMANDS } else { PAGES_MAX };
        let entry = self.owned(segment)?;
        let steps: Vec<Step> = match &mut entry.lock().puller {
            None => return Ok(false),
            Some(puller) => std::iter::from_fn(|| puller.ahead()).take(pages_max as usize).collect(),
        };
        let began = Instant::now();
        let (are_more, bytes) = (steps.len() == pages_max as usize, steps.len() as u64 * PAGE_BYTES);
        self.carry_out_pull(segment, &entry, steps, false)?;
        std::thread::sleep(self.pull_limiter.charge(bytes, began).saturating_sub(began.elapsed()));
        Ok(are_more)
    }
}

impl HostShared {
    /// Carries out the steps of a puller until all pages are present and mapped in the program, or
    /// lost.
    ///
    /// With `threads_wait`, the READs are a demand, which delays pages ahead of programs.
    fn carry_out_pull(
        &self,
        segment: SegmentKey,
        entry: &Mutex<Segment>,
        steps: Vec<Step>,
        threads_wait: bool,
    ) -> Result<(), SegmentError> {
        let mut pulled = Pulled::default();
        pulled.extend(steps);
        pulled.map_pages(entry);
        while let Some(first) = pulled.orders.first().copied() {
            let is_alike = |order: &ReadOrder| (order.from, order.mode) == (first.from, first.mode);
            let orders = std::mem::take(&mut pulled.orders);
            let (mut alike, others): (Vec<_>, Vec<_>) = orders.into_iter().partition(is_alike);
            pulled.orders = alike.split_off(alike.len().min(PAGES_MAX as usize));
            pulled.orders.extend(others);
            let ends = {
                // The demand ends before the pages are mapped: a program can delay that for ever.
                let _demand = threads_wait.then(|| self.precedence.demand());
                self.read(segment, entry, &alike)
            };
            {
                let mut entry = entry.lock();
                let generation = entry.copies[0].link.generation;
                for (order, end) in alike.iter().zip(ends) {
                    let next = entry.puller.as_mut().and_then(|puller| puller.read_ended(order.page, end));
                    if let (Some(Step::Complete { page, is_demanded }), Some(memory)) = (next, &entry.memory)
                    {
                        memory.set_present(generation, page);
                        self.statistics.count_page(is_demanded);
                    }
                    pulled.extend(next);
                }
                entry.pulled.notify_all();
            }
            pulled.map_pages(entry);
        }
        match pulled.first_lost {
            Some(page) => Err(SegmentError::Lost { segment, page }),
            None if !entry.lock().holder.has_access() => Err(SegmentError::NotOwned(segment)),
            None => Ok(()),
        }
    }

    /// Performs READs of the same copy in the same mode. Returns their results.
    fn read(&self, segment: SegmentKey, entry: &Mutex<Segment>, orders: &[ReadOrder]) -> Vec<ReadEnd> {
        let gone = || vec![ReadEnd::Gone; orders.len()];
        let ReadOrder { from, mode, .. } = orders[0];
        let (data, place) = {
            let entry = entry.lock();
            let Some(memory) = &entry.memory else { return gone() };
            if mode == ReadMode::Own {
                let is_present = |order: &ReadOrder| memory.is_present(from.generation, order.page);
                let end = |order| if is_present(order) { ReadEnd::Found } else { ReadEnd::NotThere };
                return orders.iter().map(end).collect();
            }
            let place = entry.copies.iter().find(|place| place.link == from).copied();
            (Arc::clone(&memory.data), place)
        };
        let lane = if orders.iter().any(|order| order.is_urgent) { Lane::Urgent } else { Lane::Ahead };
        let pages: Vec<u32> = orders.iter().map(|order| order.page).collect();
        let Some(mut place) = place else { return gone() };
        loop {
            if let Some(peer) = self.peer(from.at, lane, Some(place.address)) {
                let ends = peer.lock().read(&data, &place, &pages, mode);
                if let Some(ends) = ends {
                    return ends;
                }
                self.peers.remove(from.at, lane, &peer);
            }
            // An agent that has ended may be restarted, and then has its memory again.
            if matches!(self.registry.lives(from.at), Ok(false)) || self.is_ending() {
                return gone();
            }
            // The copy may have been discarded meanwhile.
            if !entry.lock().copies.iter().any(|place| place.link == from) {
                return gone();
            }
            // A restarted agent has the copy at another address, with other keys.
            let ask = Ask::Place { generation: from.generation };
            match self.ask(&Request { segment, from: self.own, to: from.at, ask }) {
                Some(Answer::Place(found)) if found.link == from => place = found,
                Some(_) => return gone(),
                None => std::thread::sleep(RETRY_INTERVAL),
            }
            if let Some(known) = entry.lock().copies.iter_mut().find(|known| known.link == from) {
                *known = place;
            }
        }
    }

    /// Ends pulling if all pages are present, and notifies the other hosts that their copies are
    /// not needed.
    pub(super) fn finish(&self, segment: SegmentKey, entry: &Mutex<Segment>) {
        {
            let mut entry = entry.lock();
            if entry.puller.as_ref().is_none_or(|puller| puller.missing() > 0 || !puller.is_idle()) {
                return;
            }
            entry.puller = None;
        }
        self.release_copies(segment, entry);
    }

    /// Notifies the other hosts that have copies of a segment that these are not needed.
    pub(super) fn release_copies(&self, segment: SegmentKey, entry: &Mutex<Segment>) {
        let (others, generation) = {
            let mut entry = entry.lock();
            let Some(first) = entry.copies.first() else { return };
            let generation = first.link.generation;
            let others = entry.copies.split_off(1);
            entry.save();
            (others, generation)
        };
        let mut hosts: Vec<Life> = others.iter().map(|place| place.link.at).collect();
        hosts.sort_unstable();
        hosts.dedup();
        for to in hosts.into_iter().filter(|to| *to != self.own) {
            // A host that does not receive the request keeps the memory until the next release.
            let ask = Ask::Release { generation };
            let _ = self.ask(&Request { segment, from: self.own, to, ask });
        }
    }
}

/// The progress of the pages that one call pulls.
#[derive(Default)]
struct Pulled {
    /// READs to perform.
    orders: Vec<ReadOrder>,
    /// Present pages that are not mapped in the program yet.
    complete: Vec<u32>,
    /// Lost pages for which threads wait.
    lost: Vec<u32>,
    first_lost: Option<u32>,
}

impl Extend<Step> for Pulled {
    fn extend<T: IntoIterator<Item = Step>>(&mut self, steps: T) {
        for step in steps {
            match step {
                Step::Read(order) => self.orders.push(order),
                Step::Complete { page, .. } => self.complete.push(page),
                Step::Lost { page, is_demanded } => {
                    self.lost.extend(is_demanded.then_some(page));
                    self.first_lost = self.first_lost.or(Some(page));
                }
            }
        }
    }
}

impl Pulled {
    /// Maps the present pages in the program and poisons the lost ones, and wakes the threads that
    /// wait for them.
    fn map_pages(&mut self, entry: &Mutex<Segment>) {
        let faults = entry.lock().served.as_ref().and_then(ServedFaults::faults);
        let (complete, lost) = (std::mem::take(&mut self.complete), std::mem::take(&mut self.lost));
        let Some(faults) = faults else { return };
        let runs = complete.chunk_by(|page, next| *next == page + 1);
        let map = |run: &[u32]| faults.resume_all(run[0]..run[run.len() - 1] + 1);
        // Fails if the mapping is gone: the segment was handed over, or the program has ended.
        let mapped = runs.map(map).chain(lost.iter().map(|page| faults.poison(*page)));
        for error in mapped.filter_map(Result::err) {
            tracing::debug!(%error, "cannot map a pulled page in the program");
        }
    }
}
