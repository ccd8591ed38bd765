//! Copies of segments on memory nodes: where they are, and what is restored from them. Programs
//! write and read them by themselves.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use aquifer_arena::calls::CopiesStatus;
use aquifer_arena::copies::CopyRecord;
use aquifer_fabric::Memory;

use super::copy_records::{Author, CopiesChange, Restoration};
use super::memory::SegmentMemory;
use super::shared::{Arrival, HostShared, lock};
use super::wire::{Answer, Ask, Request};
use super::{SegmentError, SegmentHost, SegmentKey};
use crate::ownership::Life;

/// What a program knows of the copies of a segment.
#[derive(Debug)]
pub struct Copies {
    /// The directory's record.
    pub record: Option<CopyRecord>,
    /// The nodes that could have copies, the best ones first.
    pub nodes: Vec<u16>,
    /// The memory of the segment, if it is owned here.
    pub memory: Option<OwnedFd>,
}

/// A segment that is being restored.
#[derive(Debug)]
pub struct Restoring {
    /// Its first address.
    pub address: u64,
    /// Zeros, into which a program writes the bytes of a copy.
    pub data: Arc<Memory>,
    /// Where the copies are.
    pub record: CopyRecord,
}

/// The memory of a segment that is being restored, and from which revision of its copies.
#[derive(Debug)]
pub(super) struct RestoringMemory {
    pub memory: SegmentMemory,
    revision: u64,
    refused: Option<Life>,
}

impl SegmentHost {
    /// The copies of a segment that is owned here, or that no live host owns.
    ///
    /// # Errors
    /// If another host may own it, or the directory fails.
    pub fn copies(&self, segment: SegmentKey) -> Result<Copies, SegmentError> {
        let memory = match self.owned(segment) {
            Ok(entry) => {
                let data = lock(&entry).memory.as_ref().map(|memory| memory.data.fd().try_clone_to_owned());
                Some(data.ok_or(SegmentError::NotOwned(segment))?.map_err(SegmentError::Descriptor)?)
            }
            Err(error) => {
                let refused = self.shared.refuse_lost(segment)?;
                if !self.shared.registry.is_lost(segment, refused)? {
                    return Err(error);
                }
                None
            }
        };
        let record = self.shared.registry.copies(segment)?;
        Ok(Copies { record, nodes: self.copy_nodes(segment)?, memory })
    }

    /// The copies of the segments of users, the first `max` after a segment.
    ///
    /// # Errors
    /// Those of the directory.
    pub fn list_copies(
        &self,
        above: Option<(u32, u64)>,
        may_see: impl Fn(u32) -> bool,
        max: usize,
    ) -> Result<Vec<CopiesStatus>, SegmentError> {
        let mut list = Vec::new();
        for (segment, record) in self.shared.registry.all_copies()? {
            let SegmentKey { tenant: user, id } = segment;
            let is_after = above.is_none_or(|above| (user, id) > above);
            if !is_after || !may_see(user) || !record.has_copies() || list.len() >= max {
                continue;
            }
            let CopyRecord { bytes, version, synced_at_s, trees, .. } = record;
            let nodes = trees.iter().map(|tree| tree.node).collect();
            let has_owner = !self.shared.registry.is_lost(segment, None)?;
            list.push(CopiesStatus { user, id, bytes, version, synced_at_s, nodes, has_owner });
        }
        Ok(list)
    }

    /// Nodes of other machines first, then those of this one; of each, another order for each
    /// segment.
    fn copy_nodes(&self, segment: SegmentKey) -> Result<Vec<u16>, SegmentError> {
        let mut nodes = self.shared.registry.heap_nodes()?;
        let is_here = |node: u16| self.sockets.join(format!("heaps-{node}.sock")).exists();
        nodes.sort_by_cached_key(|node| {
            let mut hasher = DefaultHasher::new();
            (segment, node).hash(&mut hasher);
            (is_here(*node), hasher.finish())
        });
        Ok(nodes)
    }

    /// Replaces the record of the copies of a segment that is owned here, or that no live host
    /// owns.
    ///
    /// # Errors
    /// If another host may own it, the record is another one by now, or the directory fails.
    pub fn set_copies(
        &self,
        segment: SegmentKey,
        revision: u64,
        record: Option<&CopyRecord>,
    ) -> Result<(), SegmentError> {
        if !record.is_none_or(CopyRecord::is_valid) {
            return Err(SegmentError::CopyRecord(segment));
        }
        let author = match self.owned(segment) {
            Ok(entry) => {
                self.settle(segment, &entry);
                Author::Owner(self.shared.own)
            }
            Err(_) => Author::Finder { refused: self.shared.refuse_lost(segment)? },
        };
        match self.shared.registry.set_copies(segment, author, revision, record)? {
            CopiesChange::Done => Ok(()),
            CopiesChange::NotOwner => Err(SegmentError::NotOwned(segment)),
            CopiesChange::Changed => Err(SegmentError::CopiesChanged(segment)),
            CopiesChange::Busy => Err(SegmentError::Busy(segment)),
        }
    }

    /// Begins to restore a segment that no live host owns.
    ///
    /// # Errors
    /// If a host may own it, there are no copies, the tenant has too much, or the system refuses.
    pub fn begin_restore(&self, segment: SegmentKey, process: &str) -> Result<Restoring, SegmentError> {
        let registry = &self.shared.registry;
        let refused = self.shared.refuse_lost(segment)?;
        if !registry.is_lost(segment, refused)? {
            return Err(SegmentError::Exists(segment));
        }
        let record = registry.copies(segment)?.filter(CopyRecord::has_copies);
        let record = record.ok_or(SegmentError::NoCopies(segment))?;
        let range = registry.range(segment)?.filter(|(_, bytes)| *bytes == record.bytes);
        let (address, bytes) = range.ok_or(SegmentError::CopyRecord(segment))?;
        let key = (segment, process.to_owned());
        self.end_restore(&key);
        let memory = self.shared.new_memory(segment, bytes)?;
        let data = Arc::clone(&memory.data);
        let restoring = RestoringMemory { memory, revision: record.revision, refused };
        let former = lock(&self.shared.restoring).insert(key, restoring);
        former.iter().for_each(|former| self.shared.close_memory(&former.memory));
        Ok(Restoring { address, data, record })
    }

    /// A process owns a segment whose memory has the bytes of a copy by now.
    ///
    /// # Errors
    /// If a host owns it meanwhile, or the copies have changed, or the directory fails.
    pub fn finish_restore(&self, segment: SegmentKey, process: &str) -> Result<Arrival, SegmentError> {
        let restoring = lock(&self.shared.restoring).remove(&(segment, process.to_owned()));
        let RestoringMemory { memory, revision, refused } =
            restoring.ok_or(SegmentError::NoCopies(segment))?;
        let restored = self.shared.registry.restore(segment, self.shared.own, revision, refused);
        let error = match restored {
            Ok(Restoration::Owned { address, generation }) => {
                return Ok(self.own_new(segment, process, memory, address, generation));
            }
            Ok(Restoration::Exists) => SegmentError::Exists(segment),
            Ok(Restoration::Changed) => SegmentError::CopiesChanged(segment),
            Ok(Restoration::Busy) => SegmentError::Busy(segment),
            Err(error) => error.into(),
        };
        self.shared.close_memory(&memory);
        Err(error)
    }

    /// Gives up what a process was restoring that has ended.
    pub fn end_restores(&self, tenant: u32, process: &str) {
        let keys: Vec<_> = lock(&self.shared.restoring)
            .keys()
            .filter(|(segment, name)| segment.tenant == tenant && name == process)
            .cloned()
            .collect();
        keys.iter().for_each(|key| self.end_restore(key));
    }

    fn end_restore(&self, key: &(SegmentKey, String)) {
        let restoring = lock(&self.shared.restoring).remove(key);
        restoring.iter().for_each(|restoring| self.shared.close_memory(&restoring.memory));
    }
}

impl HostShared {
    /// If the owner of a segment has died, has the target of its last hand-over say whether it has
    /// received it. Returns the target if it has not, and will not.
    pub(super) fn refuse_lost(&self, segment: SegmentKey) -> Result<Option<Life>, SegmentError> {
        let Some(record) = self.registry.find(segment)? else { return Ok(None) };
        let Some(to) = record.intent else { return Ok(None) };
        if self.registry.lives(record.owner)? || !self.registry.lives(to)? {
            return Ok(None);
        }
        let ask = Ask::Fence { source: record.owner, generation: record.generation + 1 };
        let request = Request { segment, from: self.own, to, ask };
        let answer = if to == self.own { self.answer(&request) } else { self.ask(&request) };
        Ok((answer == Some(Answer::NotReceived)).then_some(to))
    }
}
