//! The monitor of one program: resolves its faults and chooses its evictions.
//!
//! One thread turns it. It acts through an [`Edge`] and makes no system call of its own.
//! `docs/formats/paging.md` has the rules that keep every byte right. The most important ones:
//!
//! - Events are applied before any fault that was read with them.
//! - A fill that the kernel refuses as busy is decided anew after the next read.
//! - No message is read while the worker moves pages out.
//! - A page that the program has removed is not evicted before the program has faulted on it again.

mod adoption;
mod confirmation;
mod events;
mod eviction;
mod order;
mod recovery;
mod repack;
mod resolution;

pub(crate) use eviction::SPARE_PAGES;

use std::sync::Arc;

use aquifer_pager::{
    BLOCK_PAGES, Batch, Budget, FETCH_PAGES_MAX, Location, Mutation, PAGE_BYTES, PageNumber, TABLE_BYTES_MAX,
    Volume,
};

use crate::areas::{Area, Areas};
use crate::edge::{Edge, SenderEvent};
use crate::kernel::{MoveOutcome, PageFault, UffdMessage};
use crate::stats::{FaultStats, FaultWait};
use crate::stream::StreamDetector;

use order::ReadEvent;
use recovery::UnplacedBatch;
pub use recovery::{EvictionBatch, ResumeState, partly_staged_block};
use repack::RepackProgress;

/// Maximum number of messages that the journal reads at once.
const MESSAGES_MAX: usize = 64;
/// Size in bytes that a page table may have under any limit: enough for 8 GiB of neighbouring
/// pages.
const TABLE_BYTES_FREE: usize = 16 << 20;

/// The outcome of a turn: the next action of the caller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TurnOutcome {
    /// Turn again at once.
    Again,
    /// Sleep until the kernel or the sender has something for the monitor.
    Sleep,
    /// Close the monitor: the program has ended.
    Ended,
}

/// A fault that was read and is not resolved.
#[derive(Clone, Copy, Debug)]
struct PendingFault {
    fault: PageFault,
    since_ns: u64,
    /// Whether the fault had to wait for the sender or for room.
    has_waited: bool,
}

/// The monitor of one program.
#[derive(Debug)]
pub struct Monitor<E: Edge> {
    edge: E,
    volume: Volume,
    budget: Arc<Budget>,
    stats: Arc<FaultStats>,
    /// Registered and adopted areas.
    areas: Areas,
    /// Whether events that were read before a restart must be applied before anything else.
    has_unapplied_events: bool,
    /// Areas that the sampler has found and that are not yet registered.
    found: Vec<Area>,
    /// Ranges that were registered in part, in which the registered parts are not known yet.
    unconfirmed: Areas,
    /// Registered ranges that are not yet adopted.
    adopting: Areas,
    /// Whether `areas` and `adopting` are as of the last event that was applied. After a restart
    /// they are known only when no event is unread.
    are_areas_exact: bool,
    /// Events that must be applied after others; empty between two reads.
    held_back: Vec<ReadEvent<E::Child>>,
    /// Ranges outside of `areas` that the program has removed: the kernel may not yet have
    /// dropped what is present there.
    removed: Areas,
    /// Ranges that a remap moved away, and for which the kernel has not yet reported the unmap.
    pending_unmaps: Vec<Area>,
    /// Ranges that a remap moved away, and that are still registered if the kernel reports no unmap
    /// (`MREMAP_DONTUNMAP`).
    vacated: Areas,
    streams: StreamDetector,
    messages: Vec<UffdMessage<E::Child>>,
    /// Faults that wait for the sender, for room, or for the next turn.
    pending: Vec<PendingFault>,
    /// The faults of this turn; kept for its capacity, like the other vectors.
    being_served: Vec<PendingFault>,
    sender_events: Vec<SenderEvent>,
    /// Staging buffers without a batch.
    free_buffers: Vec<usize>,
    victims: Batch,
    move_outcomes: Vec<MoveOutcome>,
    locations: Vec<Location>,
    present: Vec<PageNumber>,
    /// Time before which no batch is evicted, because the last one moved no page.
    stalled_until_ns: u64,
    /// Time before which inherited pages are not checked again.
    next_claim_ns: u64,
    /// Whether the other programs know that this one cannot make room. Without it, two idle
    /// monitors wake each other for ever.
    has_woken_others: bool,
    /// Whether other programs hold the blocks that this one needs to make room.
    lacks_block: bool,
    /// Whether this program is queued for a block.
    wants_block: bool,
    /// Batches that were evicted before a restart and have no block yet.
    unplaced_batches: Vec<UnplacedBatch>,
    /// Whether the pages must be write-protected, because of a fork.
    must_protect: bool,
    repacking: RepackProgress,
    /// Whether the program has ended.
    has_ended: bool,
    /// The wait of the fault that is being served.
    fault_wait: FaultWait,
}

impl<E: Edge> Monitor<E> {
    /// Creates a monitor for a program with pages in `volume` and registered `areas`.
    #[must_use]
    pub fn new(
        edge: E,
        volume: Volume,
        budget: Arc<Budget>,
        stats: Arc<FaultStats>,
        areas: Areas,
        buffers: usize,
    ) -> Self {
        Self {
            edge,
            volume,
            budget,
            stats,
            areas,
            has_unapplied_events: false,
            found: Vec::new(),
            unconfirmed: Areas::default(),
            adopting: Areas::default(),
            are_areas_exact: true,
            held_back: Vec::new(),
            removed: Areas::default(),
            pending_unmaps: Vec::new(),
            vacated: Areas::default(),
            streams: StreamDetector::default(),
            messages: Vec::with_capacity(MESSAGES_MAX),
            pending: Vec::with_capacity(MESSAGES_MAX),
            being_served: Vec::with_capacity(MESSAGES_MAX),
            sender_events: Vec::with_capacity(8),
            free_buffers: (0..buffers).collect(),
            victims: Batch::with_capacity(BLOCK_PAGES),
            move_outcomes: Vec::with_capacity(BLOCK_PAGES),
            locations: Vec::with_capacity(FETCH_PAGES_MAX),
            present: Vec::new(),
            stalled_until_ns: 0,
            next_claim_ns: 0,
            has_woken_others: false,
            lacks_block: false,
            wants_block: false,
            unplaced_batches: Vec::new(),
            must_protect: false,
            repacking: RepackProgress::default(),
            has_ended: false,
            fault_wait: FaultWait::Nothing,
        }
    }

    /// The edge of the monitor.
    pub fn edge(&mut self) -> &mut E {
        &mut self.edge
    }

    /// The pages of the program.
    pub fn volume(&mut self) -> &mut Volume {
        &mut self.volume
    }

    /// The registered and adopted areas.
    #[must_use]
    pub fn areas(&self) -> &Areas {
        &self.areas
    }

    /// Records that the program has ended.
    pub fn end(&mut self) {
        self.has_ended = true;
    }

    /// Frees all memory of the program, after its batches in flight have ended.
    ///
    /// The sender must have abandoned the program before, so that no batch waits for room.
    pub fn close(mut self) {
        while self.volume.is_in_flight() {
            self.edge.wait_for_sender();
            self.apply_sender_events();
        }
        // The worker may wait for the pins.
        for batch in std::mem::take(&mut self.unplaced_batches) {
            self.edge.release_buffer(batch.buffer());
        }
        self.volume.close();
        self.announce_free_block();
    }

    /// Makes all progress that is possible without waiting.
    pub fn turn(&mut self) -> TurnOutcome {
        self.apply_sender_events();
        self.check_table();
        if !self.has_ended && !self.place_batches() {
            // Nothing notifies this monitor when the mempool has a free block, so it polls.
            self.has_ended = !self.edge.wait_for_sender();
            return if self.has_ended { TurnOutcome::Ended } else { TurnOutcome::Again };
        }
        if std::mem::take(&mut self.has_unapplied_events) && !Mutation::AdoptBeforeEvents.is_active() {
            // The kernel counts these events as read, so a proof of adoption would not fail for
            // them.
            self.read_and_apply();
        }
        self.register_found();
        // Adoption reads messages too: the faults among them are served below.
        let waits_for_event = self.adopt_some() || !self.found.is_empty() || !self.unconfirmed.is_empty();
        self.read_and_apply();
        self.discard_uninherited();
        self.protect();
        let must_retry = self.serve_pending() || self.must_protect || waits_for_event;
        self.make_room();
        let moves_more = self.repack();
        if self.has_ended {
            TurnOutcome::Ended
        } else if must_retry {
            self.edge.yield_now();
            TurnOutcome::Again
        } else if moves_more || self.adopting.iter().next().is_some() {
            TurnOutcome::Again
        } else {
            TurnOutcome::Sleep
        }
    }

    /// Ends the run if its page table is larger than its limit.
    ///
    /// A program that touches one page in each 2 MiB needs as much memory for the table as for the
    /// pages.
    fn check_table(&mut self) {
        // A run that has given idle memory back keeps the table that it needed.
        let limit = self.budget.allowed_peak().saturating_mul(PAGE_BYTES as u64);
        let limit = usize::try_from(limit).unwrap_or(usize::MAX).clamp(TABLE_BYTES_FREE, TABLE_BYTES_MAX);
        let bytes = self.volume.table_bytes();
        if bytes > limit && !self.has_ended {
            self.edge.end_run(&format!(
                "its pages are so far apart that a page table of {} MiB would be needed, which is more than \
                 its limit: give it a larger --local",
                bytes >> 20
            ));
            self.has_ended = true;
        }
    }

    /// Whether faults wait for the sender or for room.
    #[must_use]
    pub fn has_pending_faults(&self) -> bool {
        !self.pending.is_empty()
    }
}
