//! Events of the kernel and of the sender.
//!
//! The rules for the kernel's events are in `docs/formats/paging.md`.

use aquifer_pager::{Mutation, PAGES_MAX, PageNumber, Volume};

use super::order::ReadEvent;
use super::{Monitor, PendingFault};
use crate::areas::Area;
use crate::edge::{Edge, SenderEvent};
use crate::journal::PersistentRanges;
use crate::kernel::{PageFault, UffdMessage};

/// Maximum number of attempts to write-protect all pages within one turn.
const PROTECT_TRIES_MAX: u32 = 64;

impl<E: Edge> Monitor<E> {
    /// Reads all messages, applies the events in their order, and queues the faults.
    pub(super) fn read_and_apply(&mut self) {
        let mut messages = std::mem::take(&mut self.messages);
        self.edge.read_messages(&mut messages);
        if Mutation::ServeFaultsBeforeEvents.is_active() {
            let faults: Vec<PageFault> = messages
                .iter()
                .filter_map(
                    |message| if let UffdMessage::Fault(fault) = message { Some(*fault) } else { None },
                )
                .collect();
            faults.into_iter().for_each(|fault| {
                self.serve_fault(fault);
            });
        }
        let read = messages.len();
        let mut held_back = std::mem::take(&mut self.held_back);
        self.sort_messages(&mut messages, 0, &mut held_back);
        self.held_back = held_back;
        self.messages = messages;
        if !self.held_back.is_empty() {
            self.apply_held_back(read);
        }
    }

    /// Queues the faults among messages, the first of which has the index `first`, and applies the
    /// events. Once an event must be held back, it and all later ones are appended to `held_back`.
    pub(super) fn sort_messages(
        &mut self,
        messages: &mut Vec<UffdMessage<E::Child>>,
        first: usize,
        held_back: &mut Vec<ReadEvent<E::Child>>,
    ) {
        let now_ns = self.edge.now_ns();
        for (index, message) in (first..).zip(messages.drain(..)) {
            if message.last_page() > PAGES_MAX {
                self.edge.end_run("a program of it has memory above the addresses that can be paged");
                self.has_ended = true;
            }
            match message {
                UffdMessage::Fault(fault) if !self.has_ended => {
                    self.pending.push(PendingFault { fault, since_ns: now_ns, has_waited: false });
                }
                UffdMessage::Fault(_) => {}
                event if held_back.is_empty() && !self.must_hold_back(&event) => {
                    self.apply_event(index, event);
                }
                event => held_back.push((index, event)),
            }
        }
    }

    /// Applies an event, and records in the journal that it is applied.
    pub(super) fn apply_event(&mut self, index: usize, event: UffdMessage<E::Child>) {
        match event {
            UffdMessage::Fork(child) if self.has_ended => self.edge.abandon_child(child),
            _ if self.has_ended => {}
            UffdMessage::Fault(_) => unreachable!("faults are queued"),
            UffdMessage::Fork(child) => self.apply_fork(child),
            UffdMessage::Remap { from, to, pages } => self.apply_remap(index, from, to, pages),
            UffdMessage::Remove { start, end } => self.apply_remove(Area { start, end }),
            UffdMessage::Unmap { start, end } => self.apply_unmap(Area { start, end }),
        }
        if !self.has_ended {
            let ranges = PersistentRanges { pending_unmaps: &self.pending_unmaps, removed: &self.removed };
            self.edge.event_applied(index, ranges);
        }
    }

    /// Applies a Remove: pages of the range are zeros, and the kernel may still have to drop them.
    fn apply_remove(&mut self, area: Area) {
        self.volume.remove_range(area.start, area.end);
        for part in self.areas.missing(area) {
            self.removed.insert(part);
        }
    }

    /// Applies an Unmap, unless it reports memory that a remap has already moved away.
    fn apply_unmap(&mut self, area: Area) {
        if let Some(at) = self.pending_unmaps.iter().position(|other| *other == area)
            && !Mutation::ApplyStaleUnmap.is_active()
        {
            // If anything is mapped there now, a later remap has moved it there.
            self.pending_unmaps.swap_remove(at);
            self.vacated.remove(area);
            return;
        }
        self.volume.discard(area.start, area.end);
        self.forget_area(area);
    }

    /// Drops the pending unmaps: a fill or a move has just proved that no event is unread.
    pub(super) fn forget_pending_unmaps(&mut self) {
        self.are_areas_exact = true;
        std::mem::take(&mut self.vacated).iter().for_each(|area| self.areas.insert(area));
        if !self.pending_unmaps.is_empty() {
            self.pending_unmaps.clear();
            self.edge.persist_ranges(PersistentRanges { pending_unmaps: &[], removed: &self.removed });
        }
    }

    /// Removes a range from all sets of areas.
    fn forget_area(&mut self, area: Area) {
        self.areas.remove(area);
        self.adopting.remove(area);
        self.removed.remove(area);
        self.vacated.remove(area);
        self.unconfirmed.remove(area);
    }

    /// Applies the completions of the sender since the last call.
    pub(super) fn apply_sender_events(&mut self) {
        let mut events = std::mem::take(&mut self.sender_events);
        self.edge.poll_sender(&mut events);
        for event in events.drain(..) {
            self.apply_sender_event(event);
        }
        self.sender_events = events;
    }

    /// Applies one completion of the sender.
    fn apply_sender_event(&mut self, event: SenderEvent) {
        match event {
            SenderEvent::Staged { block, buffer, found } => {
                self.volume.staged(block, &found);
                self.budget.note_evicted(found.len() as u64);
                self.edge.release_buffer(buffer);
                self.free_buffers.push(buffer);
            }
            SenderEvent::Written(written) => {
                self.repacking.written(written.block);
                self.volume.written(written.block, &written.locations[..written.count]);
            }
        }
    }

    /// Waits for the sender while the condition holds and the program has not ended.
    fn wait_while(&mut self, condition: impl Fn(&Volume) -> bool) {
        while condition(&self.volume) && !self.has_ended {
            if !self.edge.wait_for_sender() {
                self.has_ended = true;
            }
            self.apply_sender_events();
        }
    }

    /// Applies a Fork: the child gets a copy of the page table, after all batches are acknowledged.
    fn apply_fork(&mut self, child: E::Child) {
        // A page that parent and child both write exists twice afterwards. If that may exceed the
        // limit, the first write must be a fault. Both processes run already.
        if self.budget.resident() + self.volume.held() > self.budget.resident_max() {
            self.edge.protect_child(&child, &self.areas);
            self.must_protect = true;
            self.protect();
        }
        if Mutation::ForkWithoutFlush.is_active() {
            self.wait_while(|volume| volume.is_in_flight() && !volume.is_leaving());
        } else {
            self.wait_while(Volume::is_in_flight);
        }
        if self.has_ended {
            return self.edge.abandon_child(child);
        }
        self.volume.reclaim_all();
        let child_volume = self.volume.clone_for_fork();
        // Blocks were reclaimed. With one program more, the fair share of each is smaller, too.
        self.announce_free_block();
        match child_volume {
            Ok(volume) => self.edge.start_child(child, volume, self.areas.clone()),
            Err(error) => self.edge.refuse_child(child, &error),
        }
    }

    /// Discards the pages that a forked child has not inherited from its parent.
    ///
    /// Areas that the child has inherited empty are still registered. They are adopted anew.
    pub(super) fn discard_uninherited(&mut self) {
        let Some(inherited) = self.edge.inherited_areas() else { return };
        if Mutation::InheritAll.is_active() {
            return self.edge.inheritance_checked();
        }
        // Not only in the areas: after a restart none is adopted yet.
        let mut parts = inherited.missing(Area { start: 0, end: PAGES_MAX });
        if Mutation::DiscardInAreas.is_active() {
            parts = self.areas.iter().flat_map(|area| inherited.missing(area)).collect();
        }
        for part in parts {
            self.volume.discard(part.start, part.end);
            self.forget_area(part);
        }
        self.edge.inheritance_checked();
    }

    /// Applies a Remap: page words move to their new numbers.
    fn apply_remap(&mut self, index: usize, from: PageNumber, to: PageNumber, pages: u64) {
        // The sender knows the pages of a batch by the numbers with which they left.
        if !Mutation::RemapWhileLeaving.is_active() {
            self.wait_while(Volume::is_leaving);
        }
        if self.has_ended {
            return;
        }
        self.check_table();
        if self.has_ended {
            return;
        }
        self.volume.discard(to, to + pages);
        self.edge.begin_remap(index);
        self.volume.move_range(from, to, pages);
        let old = Area { start: from, end: from + pages };
        self.forget_area(old);
        self.pending_unmaps.push(old);
        let new = Area { start: to, end: to + pages };
        self.removed.remove(new);
        self.vacated.remove(new);
        self.unconfirmed.remove(new);
        self.vacated.insert(old);
        self.areas.insert(new);
    }

    /// Write-protects all pages after a fork, if they must be.
    ///
    /// The kernel refuses it until the thread that forked has run. That thread runs at this moment,
    /// so this makes several attempts. Once another event is unread, no further attempt can
    /// succeed, and the next turn tries again.
    pub(super) fn protect(&mut self) {
        for _ in 0..PROTECT_TRIES_MAX {
            if !self.must_protect || self.edge.protect(&self.areas) {
                self.must_protect = false;
                return;
            }
            if self.edge.has_message() {
                return;
            }
            self.edge.yield_now();
        }
    }
}
