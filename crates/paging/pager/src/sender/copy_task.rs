//! The state of one task of the healer.

use aquifer_pool::Extent;

use crate::mempool::BLOCK_PAGES;
use crate::slabs::SlabId;

/// Number of pages that one message copies.
pub(super) const CHUNK_PAGES: u32 = 64;
const _: () = assert!(CHUNK_PAGES as usize == BLOCK_PAGES);

/// The copying of one slab to a new replica, or the repair of one page.
#[derive(Debug)]
pub(super) struct CopyTask {
    pub(super) slab: SlabId,
    pub(super) to: Extent,
    /// The place of the new replica in the slab's record; `None` for a repair.
    pub(super) place: Option<usize>,
    pub(super) kind: CopyKind,
    /// The chunk that is being copied: its first page, and its number of pages.
    pub(super) at: u32,
    pub(super) pages: u32,
    /// The number of pages of a chunk: one if the disk of a node could not return more of them.
    pub(super) chunk_pages: u32,
    pub(super) end: u32,
    /// Places in the slab's record from which the chunk could not be read, as a bit mask.
    pub(super) failed_places: u8,
    /// Whether the chunk is read again because its checksums were wrong in all replicas: the damage
    /// may have been in transit.
    pub(super) is_read_again: bool,
    /// The place from which the chunk is read.
    pub(super) from: usize,
    pub(super) step: CopyStep,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CopyKind {
    /// One page of a replica is damaged.
    Repair,
    /// A replica is missing.
    Missing,
    /// A replica is moved. Contains the old one, unless it was freed first.
    Move(Option<Extent>),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CopyStep {
    /// The chunk is read when none of the slab's WRITEs is in flight.
    Ready,
    Reading,
    Read,
    /// The disk of the node could not return all pages of the chunk.
    Unreadable,
    Writing,
    Written,
    /// All is copied, and the new replica is in use. The old one is freed when no operation on it
    /// is in flight.
    Switching,
    /// A node has failed.
    Failed,
}

impl CopyTask {
    /// The task to copy all pages of a slab to the extent that is recorded at `place`.
    pub(super) fn new(slab: SlabId, (to, place): (Extent, usize), kind: CopyKind) -> Self {
        Self {
            slab,
            to,
            place: Some(place),
            kind,
            at: 0,
            pages: 0,
            chunk_pages: CHUNK_PAGES,
            end: to.class.chunks(),
            failed_places: 0,
            is_read_again: false,
            from: 0,
            step: CopyStep::Ready,
        }
    }

    /// Whether the task moves a replica.
    pub(super) const fn is_move(&self) -> bool {
        matches!(self.kind, CopyKind::Move(_))
    }
}
