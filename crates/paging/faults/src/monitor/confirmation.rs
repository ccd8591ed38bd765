//! Confirmation: determines which parts of newly registered ranges were mapped when they were
//! registered.
//!
//! Registration skips holes, and the kernel does not report them. The memory map shows them
//! afterwards, if no event is unread. Until then a Remap into such a range is held back, because
//! the kernel reports the later move of registered memory only.

use aquifer_pager::Mutation;

use super::Monitor;
use super::order::{ReadEvent, is_end_of_remap, target, vacates};
use crate::areas::{Area, Areas};
use crate::edge::Edge;

impl<E: Edge> Monitor<E> {
    /// Whether a part of a range to which memory is moved is not confirmed.
    pub(super) fn may_be_occupied(&self, target: Area) -> bool {
        let trusts = Mutation::TrustRegistration.is_active() || Mutation::TrustOrder.is_active();
        !trusts && self.unconfirmed.missing(target) != [target]
    }

    /// Queues for adoption the parts of unconfirmed ranges that were registered before `events`,
    /// which are all events that were read and not applied. Returns false if another event is
    /// unread.
    ///
    /// Only existing pages are moved away or unmapped, and memory is moved only to a free range. So
    /// the events and the areas that are registered after them determine which areas were
    /// registered before, in whatever order the events happened.
    pub(super) fn confirm(&mut self, events: &[ReadEvent<E::Child>]) -> bool {
        let ranges: Vec<Area> = self.unconfirmed.iter().collect();
        if ranges.is_empty() {
            return true;
        }
        let Some(after) = self.edge.registered_areas(&ranges) else { return false };
        let targets = events.iter().filter_map(|(_, event)| target(event));
        let vacated = events.iter().filter_map(|(_, event)| vacates(event));
        let mut bounds: Vec<_> =
            after.iter().chain(targets).chain(vacated).flat_map(|area| [area.start, area.end]).collect();
        bounds.sort_unstable();
        bounds.dedup();
        for part in ranges.into_iter().flat_map(|range| split(range, &bounds)) {
            if was_registered(part, events, &after) {
                self.adopting.insert(part);
            }
        }
        self.unconfirmed = Areas::default();
        true
    }
}

/// Whether a range was registered before some events. No event begins or ends inside of it.
fn was_registered<C>(part: Area, events: &[ReadEvent<C>], after: &Areas) -> bool {
    let covers = |area: Area| area.start <= part.start && part.end <= area.end;
    let arrivals = events.iter().filter(|(_, event)| target(event).is_some_and(covers)).count();
    let departures = (0..events.len())
        .filter(|at| vacates(&events[*at].1).is_some_and(covers) && !is_end_of_remap(events, *at))
        .count();
    usize::from(after.contains(part.start)) + departures > arrivals
}

/// The parts of a range between bounds, which are in ascending order.
fn split(range: Area, bounds: &[u64]) -> impl Iterator<Item = Area> {
    let inner = bounds.iter().copied().filter(move |bound| (range.start + 1..range.end).contains(bound));
    let starts: Vec<_> = std::iter::once(range.start).chain(inner).chain([range.end]).collect();
    (1..starts.len()).map(move |at| Area { start: starts[at - 1], end: starts[at] })
}
