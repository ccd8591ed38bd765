//! Recovery of a program from its journal and its page table, after its agent has died.
//!
//! 1. [`KeptProgram::recover`], for all programs: completes the event that was applied in part,
//!    finds the events that are left to apply, and recovers the volume.
//! 2. [`finish`], once for a mempool: frees the blocks that no volume owns, and reserves a block
//!    for each batch that is in a staging buffer.
//! 3. [`TakenPages::into_resume_state`], for each program that continues: the state with which its
//!    monitor starts.
//!
//! The code touches only memory that both agents map, so the simulator runs it too.

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use aquifer_pager::{
    BlockId, Budget, Memory, Mempool, PageNumber, RecoveredVolume, SlabSet, Volume, finish_move,
};

use crate::areas::{Area, Areas};
use crate::journal::{Journal, JournalContents, PersistentRanges};
use crate::kernel::UffdMessage;
use crate::monitor::{EvictionBatch, ResumeState, partly_staged_block};

/// The fork from which a program comes: the parent, and the sequence number of the event.
pub type Origin = (u64, u64);

/// A program whose agent has died, before its recovery.
#[derive(Debug)]
pub struct KeptProgram {
    id: u64,
    table: Memory,
    journal: Journal,
    contents: JournalContents,
    before_store: Option<fn()>,
}

impl KeptProgram {
    /// Opens the page table and the journal of program `id`.
    ///
    /// # Errors
    /// If `journal` is not a journal of this version.
    pub fn open(id: u64, table: Memory, journal: Memory) -> io::Result<Self> {
        let (journal, contents) = Journal::recover(journal)?;
        Ok(Self { id, table, journal, contents, before_store: None })
    }

    /// Sets a hook that is called before each store to the page table and to the journal.
    ///
    /// The simulator uses it to kill the agent there.
    pub fn before_store(&mut self, hook: fn()) {
        self.before_store = Some(hook);
    }

    /// Whether an event that is left to apply is a fork whose child is not `served`.
    #[must_use]
    pub fn has_unserved_fork(&self, served: &HashSet<Origin>) -> bool {
        let skipped = usize::from(self.is_first_fork_served(served));
        let mut unapplied = self.contents.unapplied.iter().skip(skipped);
        unapplied.any(|(_, message)| matches!(message, UffdMessage::Fork(_)))
    }

    /// Whether the first event that is left to apply is a fork whose child is `served`.
    fn is_first_fork_served(&self, served: &HashSet<Origin>) -> bool {
        matches!(self.contents.unapplied.first(), Some((_, UffdMessage::Fork(_))))
            && served.contains(&(self.id, self.journal.sequence()))
    }

    /// Recovers the program.
    ///
    /// `served` are the origins of all programs that the other agent has served. `find_child`
    /// returns the userfaultfd of a forked child by the process id of the agent that read the event
    /// and its descriptor there.
    ///
    /// # Errors
    /// If the program cannot be resumed. The caller must end it.
    pub fn recover<C>(
        mut self,
        served: &HashSet<Origin>,
        mut find_child: impl FnMut(u32, RawFd) -> Option<C>,
        (slabs, mempool, budget): (Arc<SlabSet>, Arc<Mempool>, Arc<Budget>),
    ) -> io::Result<TakenProgram<C>> {
        self.finish_event(served)?;
        let Self { table, journal, contents, before_store, .. } = self;
        let JournalContents { reader_pid, pending_unmaps, removed, unapplied, .. } = contents;
        let with_child = |(_, message): (usize, UffdMessage<RawFd>)| match message {
            UffdMessage::Fork(fd) => find_child(reader_pid, fd)
                .map(UffdMessage::Fork)
                .ok_or_else(|| io::Error::other("the descriptor of a forked child was lost with the agent")),
            other => Ok(other.map_child(|_| unreachable!("only a fork has a child"))),
        };
        let unapplied = unapplied.into_iter().map(with_child).collect::<io::Result<_>>()?;
        let mut recovered = Volume::recover(table, slabs, mempool, budget).map_err(io::Error::other)?;
        if let Some(hook) = before_store {
            recovered.volume.before_store(hook);
        }
        let pending_unmaps = pending_unmaps.unwrap_or_default();
        let pages = TakenPages { recovered, pending_unmaps, removed };
        Ok(TakenProgram { journal, unapplied, pages })
    }

    /// Completes the event that was applied in part, if there is one.
    ///
    /// Only the first event can be applied in part: a fork whose child is served already, or a
    /// remap that had begun.
    fn finish_event(&mut self, served: &HashSet<Origin>) -> io::Result<()> {
        let too_many = || io::Error::other("more of its memory was being moved than the journal can record");
        let mut pending_unmaps = self.contents.pending_unmaps.clone().ok_or_else(too_many)?;
        let mut removed = self.contents.removed.clone().unwrap_or_default();
        let remapping = self.contents.remapping;
        if let Some((_, UffdMessage::Remap { from, to, pages })) =
            remapping.and_then(|index| self.contents.unapplied.get(index))
        {
            let table = Memory::whole(self.table.fd().try_clone_to_owned()?)?;
            finish_move(table, (*from, *to, *pages), self.before_store).map_err(io::Error::other)?;
            pending_unmaps.push(Area { start: *from, end: from + pages });
            removed.remove(Area { start: *to, end: to + pages });
        } else if !self.is_first_fork_served(served) {
            return Ok(());
        }
        let index = remapping.unwrap_or(0);
        if let Some(hook) = self.before_store {
            hook();
        }
        self.journal
            .skip_event(index, PersistentRanges { pending_unmaps: &pending_unmaps, removed: &removed });
        self.contents.pending_unmaps = Some(pending_unmaps);
        if let Some(old) = &mut self.contents.removed {
            *old = removed;
        }
        self.contents.unapplied.remove(index);
        Ok(())
    }
}

/// A recovered program, which can be resumed.
#[derive(Debug)]
pub struct TakenProgram<C> {
    /// The journal of the program.
    pub journal: Journal,
    /// Events that were read and not applied. The monitor must read them first.
    pub unapplied: Vec<UffdMessage<C>>,
    /// The pages of the program.
    pub pages: TakenPages,
}

/// The recovered pages of a program.
#[derive(Debug)]
pub struct TakenPages {
    recovered: RecoveredVolume,
    pending_unmaps: Vec<Area>,
    /// See [`PersistentRanges::removed`]; `None` if any page may have been removed.
    removed: Option<Areas>,
}

impl TakenPages {
    /// The volume of the program.
    #[must_use]
    pub fn volume(&self) -> &Volume {
        &self.recovered.volume
    }

    /// Reserves a block for each batch that left the program and did not reach the mempool.
    fn reserve_blocks(&mut self, batches: &[EvictionBatch]) {
        let leaving: BTreeSet<PageNumber> = self.recovered.leaving.iter().copied().collect();
        let volume = &mut self.recovered.volume;
        let is_unplaced = |batch: &&EvictionBatch| {
            batch.iter().any(|(page, _)| leaving.contains(page))
                && partly_staged_block(volume, batch, &leaving).is_none()
        };
        let unplaced = batches.iter().filter(is_unplaced).count();
        volume.reserve_blocks(unplaced);
    }

    /// Closes the volume of a program that has ended meanwhile.
    pub fn close(self) {
        let mut volume = self.recovered.volume;
        volume.close();
    }

    /// Makes the state with which the program's monitor starts.
    ///
    /// `registered`: the registered ranges of the program. `batches`: per staging buffer, the pages
    /// of the last command, and the outcome of each.
    #[must_use]
    pub fn into_resume_state(self, registered: Areas, batches: Vec<EvictionBatch>) -> ResumeState {
        let Self { recovered, pending_unmaps, removed } = self;
        let removed = removed.unwrap_or_else(|| registered.clone());
        ResumeState { recovered, registered, pending_unmaps, removed, batches }
    }
}

/// Frees the blocks that no volume owns, and reserves blocks for batches in staging buffers.
///
/// `used`: the blocks of all volumes. `programs`: each with the batch in each staging buffer, which
/// the worker need not have completed. Must be called when all programs are recovered and before
/// any of them runs.
pub fn finish<'a>(
    mempool: &Mempool,
    used: &HashSet<BlockId>,
    programs: impl IntoIterator<Item = (&'a mut TakenPages, Vec<EvictionBatch>)>,
) {
    mempool.finish_recovery(used);
    for (pages, batches) in programs {
        pages.reserve_blocks(&batches);
    }
}
