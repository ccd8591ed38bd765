//! Carries out what a puller has decided.

use std::sync::{Arc, Mutex};

use super::shared::{HostShared, Segment, lock};
use super::wire::{Ask, Request};
use super::{SegmentError, SegmentKey};
use crate::ownership::Life;
use crate::pulling::{ReadEnd, ReadMode, ReadOrder, Step};

/// Attempts to read from a host whose lease lasts.
const READS_MAX: u32 = 5;

impl HostShared {
    /// Carries out the READs of a page, until it is here.
    pub(super) fn pull(
        &self,
        segment: SegmentKey,
        entry: &Mutex<Segment>,
        mut step: Step,
    ) -> Result<(), SegmentError> {
        loop {
            let order = match step {
                Step::Read(order) => order,
                Step::Complete { .. } => return Ok(()),
                Step::Lost { page, .. } => return Err(SegmentError::Lost { segment, page }),
            };
            let end = self.read(entry, order);
            let mut entry = lock(entry);
            let generation = entry.copies[0].link.generation;
            let next = entry.puller.as_mut().and_then(|puller| puller.read_ended(order.page, end));
            // The segment has moved on.
            let Some(next) = next else { return Err(SegmentError::NotOwned(segment)) };
            if let (Step::Complete { page, .. }, Some(memory)) = (next, &entry.memory) {
                memory.set_present(generation, page);
            }
            step = next;
        }
    }

    pub(super) fn read(&self, entry: &Mutex<Segment>, order: ReadOrder) -> ReadEnd {
        let ReadOrder { page, from, mode, .. } = order;
        let (data, place) = {
            let entry = lock(entry);
            let Some(memory) = &entry.memory else { return ReadEnd::Gone };
            if mode == ReadMode::Own {
                let is_present = memory.is_present(from.generation, page);
                return if is_present { ReadEnd::Found } else { ReadEnd::NotThere };
            }
            let place = entry.copies.iter().find(|place| place.link == from).copied();
            (Arc::clone(&memory.data), place)
        };
        let Some(place) = place else { return ReadEnd::Gone };
        for _ in 0..READS_MAX {
            if let Some(peer) = self.peer(from.at, Some(place.address)) {
                match lock(&peer).read(&data, &place, page, mode) {
                    ReadEnd::Gone => {}
                    end => return end,
                }
                self.forget_peer(from.at, &peer);
            }
            if matches!(self.registry.address(from.at), Ok(None)) {
                break;
            }
        }
        ReadEnd::Gone
    }

    /// If all pages are here, tells the other hosts that their copies are not needed.
    pub(super) fn finish(&self, segment: SegmentKey, entry: &Mutex<Segment>) {
        let (others, generation) = {
            let mut entry = lock(entry);
            if entry.puller.as_ref().is_none_or(|puller| puller.missing() > 0 || !puller.is_idle()) {
                return;
            }
            entry.puller = None;
            let others = entry.copies.split_off(1);
            (others, entry.copies[0].link.generation)
        };
        let mut hosts: Vec<Life> = others.iter().map(|place| place.link.at).collect();
        hosts.sort_unstable();
        hosts.dedup();
        for to in hosts.into_iter().filter(|to| *to != self.own) {
            // A host that does not hear it keeps the memory until it is asked again.
            let ask = Ask::Release { generation };
            let _ = self.ask(&Request { segment, from: self.own, to, ask });
        }
    }
}
