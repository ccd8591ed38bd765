//! Copies of segments on memory nodes: where they are, and what is restored from them. Programs
//! write and read them by themselves.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use aquifer_arena::copies::CopyRecord;
use aquifer_fabric::Memory;

use super::copy_records::{CopiesChange, Restoration};
use super::memory::SegmentMemory;
use super::shared::{Arrival, lock};
use super::{SegmentError, SegmentHost, SegmentKey};

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
            Err(_) if self.shared.registry.is_without_owner(segment)? => None,
            Err(error) => return Err(error),
        };
        let record = self.shared.registry.copies(segment)?;
        Ok(Copies { record, nodes: self.copy_nodes(segment)?, memory })
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

    /// Replaces the record of the copies of a segment that is owned here, or that no live host owns.
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
        let owner = match self.owned(segment) {
            Ok(entry) => {
                self.settle(segment, &entry);
                Some(self.shared.own)
            }
            Err(_) => None,
        };
        match self.shared.registry.set_copies(segment, owner, revision, record)? {
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
        if !registry.is_without_owner(segment)? {
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
        let restoring = RestoringMemory { memory, revision: record.revision };
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
        let RestoringMemory { memory, revision } = restoring.ok_or(SegmentError::NoCopies(segment))?;
        let restored = self.shared.registry.restore(segment, self.shared.own, revision);
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
