//! Copies of segments on memory nodes: their records, and the restore of lost segments from them.
//! The programs read and write the copies themselves.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use aquifer_arena::calls::CopiesStatus;
use aquifer_arena::copies::CopyRecord;
use aquifer_fabric::Memory;

use super::copy_records::{Author, CopiesChange, Restoration};
use super::restores::RestoringMemory;
use super::shared::{Arrival, HostShared};
use super::wire::{Answer, Ask, Request};
use super::{SegmentError, SegmentHost, SegmentKey};
use crate::pulling::Puller;
use aquifer_ownership::{Evidence, Holding, Life};

/// The record of a segment's copies, with the nodes and the memory that a program needs for a sync.
#[derive(Debug)]
pub struct Copies {
    /// The directory's record.
    pub record: Option<CopyRecord>,
    /// The nodes of other machines that can store copies, in the segment's order of preference.
    pub nodes: Vec<u16>,
    /// The nodes of this machine that can store copies, in the same order.
    pub nodes_here: Vec<u16>,
    /// The memory of the segment, if it is owned here.
    pub memory: Option<OwnedFd>,
}

/// A segment that is being restored.
#[derive(Debug)]
pub struct Restoring {
    /// The segment's first address in the arena.
    pub address: u64,
    /// Zeroed memory, into which a program writes the bytes of a copy.
    pub data: Arc<Memory>,
    /// The record of the copies.
    pub record: CopyRecord,
}

impl SegmentHost {
    /// Returns the copies of a segment that is owned here, or that no live host owns.
    ///
    /// # Errors
    /// If another host may own it, or the directory fails.
    pub fn copies(&self, segment: SegmentKey) -> Result<Copies, SegmentError> {
        let memory = match self.owned(segment) {
            Ok(entry) => {
                let data = entry.lock().memory.as_ref().map(|memory| memory.data.fd().try_clone_to_owned());
                Some(data.ok_or(SegmentError::NotOwned(segment))?.map_err(SegmentError::Descriptor)?)
            }
            Err(error) => {
                let evidence = self.shared.evidence(segment)?;
                if !self.shared.registry.is_lost(segment, evidence)? {
                    return Err(error);
                }
                None
            }
        };
        let record = self.shared.registry.copies(segment)?;
        let (nodes, nodes_here) = self.copy_nodes(segment)?;
        Ok(Copies { record, nodes, nodes_here, memory })
    }

    /// Lists the copies of the users' segments: the first `max` after the segment `above`.
    ///
    /// # Errors
    /// If the directory fails.
    pub fn list_copies(
        &self,
        users: &BTreeSet<u32>,
        above: Option<(u32, u64)>,
        max: usize,
    ) -> Result<Vec<CopiesStatus>, SegmentError> {
        let registry = &self.shared.registry;
        let mut list = Vec::new();
        for user in users {
            for segment in registry.segments_with_addresses(*user)? {
                let id = segment.id;
                if above.is_some_and(|above| (*user, id) <= above) {
                    continue;
                }
                if list.len() >= max {
                    return Ok(list);
                }
                let Some(record) = registry.copies(segment)? else { continue };
                let CopyRecord { bytes, version, synced_at_s, trees, former, .. } = record;
                let nodes = trees.iter().map(|tree| tree.node).collect();
                let left_on = former.iter().map(|root| root.node).collect::<BTreeSet<u16>>();
                let has_owner = self.owns(segment) || !registry.is_lost(segment, Evidence::default())?;
                let (user, left_on) = (*user, left_on.into_iter().collect());
                list.push(CopiesStatus { user, id, bytes, version, synced_at_s, nodes, left_on, has_owner });
            }
        }
        Ok(list)
    }

    /// Returns the nodes of other machines and those of this one, in an order that depends on the
    /// segment.
    fn copy_nodes(&self, segment: SegmentKey) -> Result<(Vec<u16>, Vec<u16>), SegmentError> {
        let mut nodes = self.shared.registry.heap_nodes()?;
        nodes.sort_by_cached_key(|node| {
            let mut hasher = DefaultHasher::new();
            (segment, node).hash(&mut hasher);
            hasher.finish()
        });
        let is_here = |node: &u16| self.sockets.join(format!("heaps-{node}.sock")).exists();
        let (here, elsewhere) = nodes.into_iter().partition(is_here);
        Ok((elsewhere, here))
    }

    /// Replaces the record of the copies of a segment that is owned here, or that no live host
    /// owns.
    ///
    /// # Errors
    /// If another host may own the segment, the record was changed meanwhile, or the directory
    /// fails.
    pub fn set_copies(
        &self,
        segment: SegmentKey,
        revision: u64,
        record: Option<&CopyRecord>,
    ) -> Result<(), SegmentError> {
        if !record.is_none_or(CopyRecord::is_valid) {
            return Err(SegmentError::CopyRecord(segment));
        }
        let (author, _alone) = match self.owned(segment) {
            Ok(entry) => {
                self.wait_until_confirmed(segment, &entry);
                (Author::Owner(self.shared.own), None)
            }
            // A new owner's record must not be taken for one that this host does not hold.
            Err(_) => {
                let alone = self.shared.creating.lock();
                (Author::Other(self.shared.evidence(segment)?), Some(alone))
            }
        };
        match self.shared.registry.set_copies(segment, author, revision, record)? {
            CopiesChange::Done => Ok(()),
            CopiesChange::NotOwner => Err(SegmentError::NotOwned(segment)),
            CopiesChange::Changed => Err(SegmentError::CopiesChanged(segment)),
            CopiesChange::Busy => Err(SegmentError::Busy(segment)),
        }
    }

    /// Begins to restore a lost segment. Replaces an earlier attempt of the same process.
    ///
    /// # Errors
    /// If a host may own the segment, another process of this host restores it, there are no
    /// copies, the tenant would exceed a limit, or the system refuses.
    pub fn begin_restore(&self, segment: SegmentKey, process: &str) -> Result<Restoring, SegmentError> {
        let shared = &self.shared;
        let evidence = shared.evidence(segment)?;
        if !shared.registry.is_lost(segment, evidence)? {
            return Err(SegmentError::Exists(segment));
        }
        let record = shared.registry.copies(segment)?.filter(CopyRecord::has_copies);
        let record = record.ok_or(SegmentError::NoCopies(segment))?;
        let range = shared.registry.range(segment)?.filter(|(_, bytes)| *bytes == record.bytes);
        let (address, bytes) = range.ok_or(SegmentError::CopyRecord(segment))?;
        self.end_restore(segment, process);
        if shared.restores.contains(segment) {
            return Err(SegmentError::Exists(segment));
        }
        shared.close_idle(segment);
        let memory = shared.memories.allocate(segment, bytes)?;
        let data = Arc::clone(&memory.data);
        let restoring = RestoringMemory { memory, process: process.to_owned(), record: record.clone() };
        let former = shared.restores.add(segment, restoring);
        former.iter().for_each(|former| shared.memories.free(&former.memory));
        Ok(Restoring { address, data, record })
    }

    /// Completes [`Self::begin_restore`]: the memory has the bytes of a copy, and the process owns
    /// the segment from now on.
    ///
    /// # Errors
    /// [`SegmentError::NotRestoring`] if the agent was restarted meanwhile, and errors if a host
    /// owns the segment or the copies have changed. If the directory fails, the caller may retry.
    pub fn finish_restore(&self, segment: SegmentKey, process: &str) -> Result<Arrival, SegmentError> {
        let shared = &self.shared;
        let _alone = shared.creating.lock();
        let restoring =
            shared.restores.remove_of(segment, process).ok_or(SegmentError::NotRestoring(segment))?;
        let restored = shared.evidence(segment).and_then(|evidence| {
            Ok(shared.registry.restore(segment, shared.own, &restoring.record, evidence)?)
        });
        let error = match restored {
            Ok(Restoration::Owned { address, generation }) => {
                return Ok(self.add_owned(segment, process, restoring.memory, address, generation));
            }
            // A transaction without an answer may have recorded the owner already.
            Err(error) => {
                shared.restores.add(segment, restoring);
                return Err(error);
            }
            Ok(Restoration::Exists) => SegmentError::Exists(segment),
            Ok(Restoration::Changed) => SegmentError::CopiesChanged(segment),
            Ok(Restoration::Busy) => SegmentError::Busy(segment),
        };
        shared.memories.free(&restoring.memory);
        Err(error)
    }

    /// Aborts all restores of a process that has ended.
    pub fn end_restores(&self, tenant: u32, process: &str) {
        let segments = self.shared.restores.of_process(tenant, process);
        segments.into_iter().for_each(|segment| self.end_restore(segment, process));
    }

    /// Aborts the restore of a segment by a process, and frees the memory.
    pub fn end_restore(&self, segment: SegmentKey, process: &str) {
        self.shared
            .restores
            .remove_of(segment, process)
            .iter()
            .for_each(|restoring| self.shared.memories.free(&restoring.memory));
    }

    /// Releases a segment that has copies: no process owns it then, and it can be restored from
    /// them.
    ///
    /// # Errors
    /// If there are no copies, and the errors of [`Self::deallocate`].
    pub fn give_up(&self, segment: SegmentKey) -> Result<(), SegmentError> {
        let copies = self.shared.registry.copies(segment)?;
        if !copies.is_some_and(|copies| copies.has_copies()) {
            return Err(SegmentError::NoCopies(segment));
        }
        self.deallocate(segment)
    }
}

impl HostShared {
    /// Returns this host's evidence that a segment, which is not owned here, may be lost.
    pub(super) fn evidence(&self, segment: SegmentKey) -> Result<Evidence, SegmentError> {
        let Some(record) = self.registry.find(segment)? else { return Ok(Evidence::default()) };
        let is_here = self.segments.get(segment).is_some_and(|entry| {
            matches!(entry.lock().holder.holding(), Holding::Owned { .. } | Holding::Sent { .. })
        });
        let unheld = Some(self.own).filter(|own| record.owner == *own && !is_here);
        let is_dead = unheld.is_some() || !self.registry.lives(record.owner)?;
        let refused = match record.intent {
            Some(to) if is_dead && self.registry.lives(to)? => {
                let number = record.generation + 1;
                self.is_refused(segment, record.owner, to, number).then_some((to, number))
            }
            _ => None,
        };
        Ok(Evidence { refused, unheld })
    }

    /// Fences a hand-over whose source is dead: returns true if the target `to` has not received
    /// the segment, and refuses it from now on.
    fn is_refused(&self, segment: SegmentKey, source: Life, to: Life, generation: u64) -> bool {
        let ask = Ask::Fence { source, generation };
        let request = Request { segment, from: self.own, to, ask };
        let answer = if to == self.own { self.answer(&request) } else { self.ask(&request) };
        answer == Some(Answer::NotReceived)
    }

    /// Frees this host's copy of a lost segment, if it has one from an earlier ownership.
    fn close_idle(&self, segment: SegmentKey) {
        let Some(entry) = self.segments.get(segment) else { return };
        let idle = {
            let mut entry = entry.lock();
            let is_absent = matches!(entry.holder.holding(), Holding::Absent | Holding::Prepared { .. });
            let is_idle = entry.puller.as_ref().is_none_or(Puller::is_idle);
            if is_absent && is_idle { entry.memory.take() } else { None }
        };
        idle.iter().for_each(|memory| self.memories.free(memory));
    }
}
