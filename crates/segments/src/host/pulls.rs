//! Carries out what a puller has decided.

use std::sync::{Arc, Mutex};

use super::peer::{Lane, PAGES_MAX};
use super::shared::{HostShared, Segment, lock};
use super::wire::{Ask, Request};
use super::{SegmentError, SegmentKey};
use crate::ownership::Life;
use crate::pulling::{ReadEnd, ReadMode, ReadOrder, Step};

/// Attempts to read from a host whose lease lasts.
const READS_MAX: u32 = 5;

impl HostShared {
    /// Carries out what a puller has decided, until the pages are here.
    pub(super) fn pull(
        &self,
        segment: SegmentKey,
        entry: &Mutex<Segment>,
        steps: Vec<Step>,
    ) -> Result<(), SegmentError> {
        let (mut orders, mut lost) = (Vec::new(), None);
        sort(steps, &mut orders, &mut lost);
        while let Some(first) = orders.first().copied() {
            let is_alike = |order: &ReadOrder| (order.from, order.mode) == (first.from, first.mode);
            let (mut alike, others): (Vec<_>, Vec<_>) = orders.into_iter().partition(is_alike);
            orders = alike.split_off(alike.len().min(PAGES_MAX));
            orders.extend(others);
            let ends = self.read(entry, &alike);
            let mut entry = lock(entry);
            let generation = entry.copies[0].link.generation;
            for (order, end) in alike.iter().zip(ends) {
                let next = entry.puller.as_mut().and_then(|puller| puller.read_ended(order.page, end));
                if let (Some(Step::Complete { page, .. }), Some(memory)) = (next, &entry.memory) {
                    memory.set_present(generation, page);
                }
                sort(next, &mut orders, &mut lost);
            }
        }
        match lost {
            Some(page) => Err(SegmentError::Lost { segment, page }),
            None if !lock(entry).holder.has_access() => Err(SegmentError::NotOwned(segment)),
            None => Ok(()),
        }
    }

    /// Makes READs of the same copy, in the same way. Returns their ends.
    fn read(&self, entry: &Mutex<Segment>, orders: &[ReadOrder]) -> Vec<ReadEnd> {
        let gone = || vec![ReadEnd::Gone; orders.len()];
        let ReadOrder { from, mode, .. } = orders[0];
        let (data, place) = {
            let entry = lock(entry);
            let Some(memory) = &entry.memory else { return gone() };
            if mode == ReadMode::Own {
                let is_present = |order: &ReadOrder| memory.is_present(from.generation, order.page);
                let end = |order| if is_present(order) { ReadEnd::Found } else { ReadEnd::NotThere };
                return orders.iter().map(end).collect();
            }
            let place = entry.copies.iter().find(|place| place.link == from).copied();
            (Arc::clone(&memory.data), place)
        };
        let Some(place) = place else { return gone() };
        let lane = if orders.iter().any(|order| order.is_urgent) { Lane::Urgent } else { Lane::Ahead };
        let pages: Vec<u32> = orders.iter().map(|order| order.page).collect();
        for _ in 0..READS_MAX {
            if let Some(peer) = self.peer(from.at, lane, Some(place.address)) {
                let ends = lock(&peer).read(&data, &place, &pages, mode);
                if let Some(ends) = ends {
                    return ends;
                }
                self.forget_peer(from.at, lane, &peer);
            }
            if matches!(self.registry.address(from.at), Ok(None)) {
                break;
            }
        }
        gone()
    }

    /// If all pages are here, tells the other hosts that their copies are not needed.
    pub(super) fn finish(&self, segment: SegmentKey, entry: &Mutex<Segment>) {
        {
            let mut entry = lock(entry);
            if entry.puller.as_ref().is_none_or(|puller| puller.missing() > 0 || !puller.is_idle()) {
                return;
            }
            entry.puller = None;
        }
        self.release_copies(segment, entry);
    }

    /// Tells the other hosts that have copies of a segment that these are not needed.
    pub(super) fn release_copies(&self, segment: SegmentKey, entry: &Mutex<Segment>) {
        let (others, generation) = {
            let mut entry = lock(entry);
            let Some(first) = entry.copies.first() else { return };
            let generation = first.link.generation;
            (entry.copies.split_off(1), generation)
        };
        let mut hosts: Vec<Life> = others.iter().map(|place| place.link.at).collect();
        hosts.sort_unstable();
        hosts.dedup();
        for to in hosts.into_iter().filter(|to| *to != self.own) {
            // A host that misses it keeps the memory until the next release.
            let ask = Ask::Release { generation };
            let _ = self.ask(&Request { segment, from: self.own, to, ask });
        }
    }
}

/// Adds READs to `orders`, and the first page that is lost to `lost`.
fn sort(steps: impl IntoIterator<Item = Step>, orders: &mut Vec<ReadOrder>, lost: &mut Option<u32>) {
    for step in steps {
        match step {
            Step::Read(order) => orders.push(order),
            Step::Lost { page, .. } => *lost = lost.or(Some(page)),
            Step::Complete { .. } => {}
        }
    }
}
