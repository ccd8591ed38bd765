//! The order of events: a Remap that is reported before an event that it depends on is held back.
//!
//! The kernel changes the address space first and queues the event afterwards. In between, another
//! thread can move memory to a range that was just vacated, and its Remap can be read first. The
//! rules are in `docs/formats/paging.md`.

use aquifer_pager::Mutation;

use super::Monitor;
use crate::areas::{Area, Areas};
use crate::edge::Edge;
use crate::kernel::{MoreMessages, UffdMessage};

/// An event with its index among the messages that were read.
pub(super) type ReadEvent<C> = (usize, UffdMessage<C>);

impl<E: Edge> Monitor<E> {
    /// Whether an event must not be applied before later ones are known.
    pub(super) fn must_hold_back(&mut self, event: &UffdMessage<E::Child>) -> bool {
        target(event).is_some_and(|target| self.is_occupied(target) || self.may_be_occupied(target))
    }

    /// Applies the events that were held back, each after those that it depends on. Reads more
    /// messages until all are applied.
    ///
    /// `read`: the number of messages that were read.
    pub(super) fn apply_held_back(&mut self, mut read: usize) {
        let mut events = std::mem::take(&mut self.held_back);
        while !events.is_empty() {
            // Checked before the read, because events that are raised later are not needed.
            let is_complete = self.edge.has_no_unread_event();
            let mut messages = std::mem::take(&mut self.messages);
            let more = self.edge.read_more_messages(&mut messages);
            let first = read;
            read += messages.len();
            self.sort_messages(&mut messages, first, &mut events);
            self.messages = messages;
            let is_complete = read == first
                && if more == MoreMessages::NoRoom {
                    self.unconfirmed = Areas::default();
                    true
                } else {
                    is_complete && self.confirm(&events)
                };
            while let Some(at) = self.next_in_order(&events) {
                let (index, event) = events.remove(at);
                if at > 0 {
                    self.edge.begin_before_others(index);
                }
                self.apply_event(index, event);
            }
            if is_complete || self.has_ended {
                // No event vacates the range any more.
                events.drain(..).for_each(|(index, event)| self.apply_event(index, event));
            } else if read == first {
                self.edge.yield_now();
            }
        }
        self.held_back = events;
    }

    /// Returns the index of the event to apply next: the first one, or one that must be applied
    /// before it. `None` if that one was not read yet.
    fn next_in_order(&mut self, events: &[ReadEvent<E::Child>]) -> Option<usize> {
        let is_seen = &mut vec![false; events.len()];
        if events.is_empty() { None } else { self.first_before(events, 0, is_seen) }
    }

    /// Returns `at`, or the index of an event that must be applied before event `at`. `None` if
    /// that one was not read yet.
    ///
    /// `is_seen`: the events that were considered.
    fn first_before(
        &mut self,
        events: &[ReadEvent<E::Child>],
        at: usize,
        is_seen: &mut [bool],
    ) -> Option<usize> {
        is_seen[at] = true;
        let Some(target) = target(&events[at].1) else { return Some(at) };
        let is_blocked = self.is_occupied(target);
        if !is_blocked && self.may_be_occupied(target) {
            return None;
        }
        // An event that was reported earlier is older in any case.
        for other in 0..if is_blocked { events.len() } else { at } {
            let may_be_first =
                !is_seen[other] && vacates(&events[other].1).is_some_and(|area| area.overlaps(target));
            if may_be_first
                && !is_end_of_remap(events, other)
                && let Some(first) = self.first_before(events, other, is_seen)
            {
                return Some(first);
            }
        }
        (!is_blocked).then_some(at)
    }

    /// Whether the monitor knows pages in a range to which memory was moved.
    ///
    /// The kernel has found the range vacant, or reported an Unmap of it before. So an event that
    /// vacates it is still to come.
    fn is_occupied(&mut self, target: Area) -> bool {
        if Mutation::TrustOrder.is_active() {
            return false;
        }
        let overlaps = |areas: &Areas| areas.missing(target) != [target];
        let is_known = self.are_areas_exact && (overlaps(&self.areas) || overlaps(&self.adopting));
        is_known || self.volume.has_pages(target.start, target.end)
    }
}

/// The range to which an event moves memory.
pub(super) fn target<C>(event: &UffdMessage<C>) -> Option<Area> {
    match *event {
        UffdMessage::Remap { to, pages, .. } => Some(Area { start: to, end: to.saturating_add(pages) }),
        _ => None,
    }
}

/// The range from which an event removes pages.
pub(super) fn vacates<C>(event: &UffdMessage<C>) -> Option<Area> {
    match *event {
        UffdMessage::Remap { from, pages, .. } => Some(Area { start: from, end: from.saturating_add(pages) }),
        UffdMessage::Unmap { start, end } => Some(Area { start, end }),
        _ => None,
    }
}

/// Whether an event is the Unmap that ends a Remap.
fn ends<C>(remap: &UffdMessage<C>, event: &UffdMessage<C>) -> bool {
    match (remap, event) {
        (UffdMessage::Remap { from, pages, .. }, UffdMessage::Unmap { start, end }) => {
            from == start && from.saturating_add(*pages) == *end
        }
        _ => false,
    }
}

/// Whether an event is the Unmap that ends a Remap before it: the Remap must be applied first.
pub(super) fn is_end_of_remap<C>(events: &[ReadEvent<C>], at: usize) -> bool {
    events[..at].iter().any(|(_, remap)| ends(remap, &events[at].1))
}
