//! Recovery of the segments that an earlier process of the agent has left.

use aquifer_directory::DirectoryRetries;

use super::jobs::Job;
use super::journal::JournalEntry;
use super::kept::KeptSegment;
use super::memory::SegmentMemory;
use super::programs::ProcessIdentity;
use super::shared::{HostShared, Segment};
use super::{SegmentError, SegmentKey};
use crate::pulling::{Lineage, Puller};
use aquifer_ownership::{Holding, Input};

impl HostShared {
    /// Recovers the segments that the keeper holds, and removes the directory's records of segments
    /// that this host owned and that are lost.
    pub(super) fn restore(
        &self,
        kept: Vec<KeptSegment>,
        retries: &DirectoryRetries,
    ) -> Result<(), SegmentError> {
        for kept in kept {
            let segment = kept.segment;
            match self.memories.recover(kept) {
                Some((memory, Some(entry))) if entry.holder.own() == self.own => {
                    self.restore_segment(segment, memory, entry, retries)?;
                }
                // The memory was never used, or only by an earlier life of the host.
                Some((memory, _)) => self.memories.free(&memory),
                None => {}
            }
        }
        let is_held = |segment| self.segments.contains(segment);
        let owned = retries.repeat(|| self.registry.segments_of(self.own))?;
        for lost in owned.into_iter().filter(|segment| !is_held(*segment)) {
            tracing::error!(segment = %lost, "a segment is lost: its memory was not recovered");
            let _was_removed = retries.repeat(|| self.registry.remove(lost, self.own))?;
        }
        Ok(())
    }

    fn restore_segment(
        &self,
        segment: SegmentKey,
        memory: SegmentMemory,
        entry: JournalEntry,
        retries: &DirectoryRetries,
    ) -> Result<(), SegmentError> {
        let JournalEntry { holder, copies, address, process, identity, passes, .. } = entry;
        let mut restored =
            Segment { holder, copies, address, process, identity, passes, ..Segment::absent(self.own) };
        // The memory's regions have new keys.
        for place in restored.copies.iter_mut().filter(|place| place.link.at == self.own) {
            *place = self.own_place(&memory, place.link.generation).unwrap_or(*place);
        }
        if !restored.copies.is_empty() {
            let lineage = Lineage::of(restored.copies.iter().map(|place| place.link));
            let generation = restored.copies[0].link.generation;
            let is_present = |page| memory.is_present(generation, page);
            // Also without other copies: discarded pages are not present.
            let puller = Puller::resumed(self.own, memory.pages(), lineage, is_present);
            restored.puller = Some(puller).filter(|puller| puller.missing() > 0);
        }
        restored.memory = Some(memory);
        let is_gone = match restored.holder.holding() {
            // Without a record, the segment was deallocated.
            Holding::Owned { .. } | Holding::Sent { .. } => {
                retries.repeat(|| self.registry.find(segment))?.is_none()
            }
            Holding::Absent | Holding::Prepared { .. } => false,
        };
        let newer = self.segments.get(segment);
        let newer = newer.is_some_and(|other| other.lock().generation() > restored.generation());
        if is_gone || newer {
            restored.memory.iter().for_each(|memory| self.memories.free(memory));
            return Ok(());
        }
        let mut outputs = Vec::new();
        restored.holder.step(&Input::Restarted, &mut outputs);
        restored.save();
        let older = self.segments.replace(segment, restored);
        let older = older.and_then(|older| older.lock().memory.take());
        older.iter().for_each(|memory| self.memories.free(memory));
        self.jobs.push(Job::CarryOut(segment, outputs));
        Ok(())
    }

    /// Whether a running process other than `identity` owns segments under the name `process`. Such
    /// a process has not reconnected to this process of the agent yet.
    pub(super) fn is_used_by_another(
        &self,
        tenant: u32,
        process: &str,
        identity: Option<ProcessIdentity>,
    ) -> bool {
        let segments = self.segments.all();
        segments.iter().filter(|(segment, _)| segment.tenant == tenant).any(|(_, entry)| {
            let entry = entry.lock();
            let owner = entry.identity.filter(|_| entry.holder.has_access() && entry.process == process);
            owner.is_some_and(|owner| Some(owner) != identity && owner.is_running())
        })
    }

    /// Whether the host is being dropped.
    pub(super) fn is_ending(&self) -> bool {
        self.jobs.has_ended()
    }
}

impl Segment {
    /// The generation of the segment's newest copy.
    fn generation(&self) -> Option<u64> {
        self.copies.first().map(|place| place.link.generation)
    }
}
