//! A batch in flight: records which pages are posted, acknowledged, or must be written again.

use crate::digest::Digest;
use crate::mempool::{BLOCK_PAGES, BlockId};
use crate::page::Location;
use crate::slabs::SlabSet;

/// The kind of a page group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum GroupKind {
    /// The group's pages are written.
    Write,
    /// The group's pages are unchanged, and their clean copies are confirmed.
    Confirm,
}

/// A batch in flight.
///
/// A *page group* is consecutive pages that one WRITE per replica transfers, or a set of unchanged
/// pages that one READ per replica confirms. It is identified by its first page.
#[derive(Debug)]
pub(super) struct BatchWrite {
    /// Identifies the batch in work ids.
    pub number: u64,
    pub owner: u64,
    pub block: BlockId,
    pub count: usize,
    pub crcs: [u32; BLOCK_PAGES],
    pub digests: [Digest; BLOCK_PAGES],
    pub locations: [Option<Location>; BLOCK_PAGES],
    /// The program has exited: pages that are not posted yet need not be written.
    pub is_abandoned: bool,
    /// Pages with data that are not posted yet, as a bit mask.
    pub unposted: u64,
    /// Unchanged pages whose clean copies are not confirmed yet, as a bit mask.
    pub unchanged: u64,
    /// WRITEs and READs in flight.
    pub outstanding: usize,
    /// Indexed by page group: its pages, as a bit mask.
    pub group_pages: [u64; BLOCK_PAGES],
    /// Indexed by page group: its operations in flight.
    pub group_outstanding: [u8; BLOCK_PAGES],
    /// Indexed by page group: the places of the slab's record whose replica has acknowledged it, as
    /// a bit mask.
    pub group_acknowledged: [u8; BLOCK_PAGES],
    /// Indexed by page group: the places whose replica has failed its operation, as a bit mask.
    pub group_failed: [u8; BLOCK_PAGES],
    /// Page groups of unchanged pages.
    confirming_groups: u64,
    /// Page groups of which at least one operation has failed.
    pub failed_groups: u64,
    /// Page groups that no replica has acknowledged yet.
    pub awaited_groups: u64,
    /// Number of times that pages were written again although a replica had acknowledged them.
    pub rewrites: u32,
}

impl BatchWrite {
    /// A batch of `count` pages, none of which is examined yet.
    pub fn new(number: u64, owner: u64, block: BlockId, count: usize) -> Self {
        Self {
            number,
            owner,
            block,
            count,
            crcs: [0; BLOCK_PAGES],
            digests: [0; BLOCK_PAGES],
            locations: [None; BLOCK_PAGES],
            is_abandoned: false,
            unposted: 0,
            unchanged: 0,
            outstanding: 0,
            group_pages: [0; BLOCK_PAGES],
            group_outstanding: [0; BLOCK_PAGES],
            group_acknowledged: [0; BLOCK_PAGES],
            group_failed: [0; BLOCK_PAGES],
            confirming_groups: 0,
            failed_groups: 0,
            awaited_groups: 0,
            rewrites: 0,
        }
    }

    /// Records that the operations of a page group are being posted.
    pub fn begin_group(&mut self, first: usize, pages: u64, kind: GroupKind) {
        self.group_pages[first] = pages;
        self.group_acknowledged[first] = 0;
        self.group_failed[first] = 0;
        self.awaited_groups |= 1 << first;
        match kind {
            GroupKind::Write => self.confirming_groups &= !(1 << first),
            GroupKind::Confirm => self.confirming_groups |= 1 << first,
        }
    }

    /// Whether a page group is of unchanged pages, which are not written.
    pub fn is_confirming(&self, first: usize) -> bool {
        self.confirming_groups & 1 << first != 0
    }

    /// Counts an operation of a page group that was posted.
    pub fn posted(&mut self, first: usize) {
        self.group_outstanding[first] += 1;
        self.outstanding += 1;
    }

    /// The work id of the operation of a page group to the replica at `place` of the slab's record.
    pub fn id(&self, place: usize, first: usize) -> u64 {
        self.number << 16 | (place as u64) << 8 | first as u64
    }

    /// Releases the locations of these pages, and marks the pages to be written to other locations
    /// unless the batch is abandoned.
    pub fn rewrite(&mut self, slabs: &SlabSet, pages: u64) {
        for index in bits(pages) {
            slabs.release(self.locations[index].take().expect("a written page has a location"));
        }
        if !self.is_abandoned {
            self.unposted |= pages;
        }
    }
}

/// The indices of the bits that are set.
pub(super) fn bits(mut mask: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = (mask != 0).then(|| mask.trailing_zeros() as usize)?;
        mask &= mask - 1;
        Some(bit)
    })
}
