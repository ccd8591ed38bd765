//! The directory's records of the copies of segments on memory nodes.

use aquifer_arena::copies::CopyRecord;
use aquifer_directory::{Compare, DirectoryError, KeyOperation, Transaction, names};

use super::SegmentKey;
use super::registry::{ATTEMPTS_MAX, Registry};
use aquifer_ownership::{Evidence, Life, SegmentRecord};

/// The host that changes the record of a segment's copies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Author {
    /// The owner of the segment.
    Owner(Life),
    /// Any host, if the segment is lost. The change may only free copies.
    Other(Evidence),
}

/// The result of a request to replace the record of a segment's copies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CopiesChange {
    /// The record was replaced, or was equal already.
    Done,
    /// Another host owns the segment, or may own it.
    NotOwner,
    /// The record was changed meanwhile.
    Changed,
    /// Each attempt failed because another host changed the same records.
    Busy,
}

/// The result of a request to own a segment that is restored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Restoration {
    /// The host owns the segment.
    Owned {
        /// The segment's first address.
        address: u64,
        /// The number above which the segment's hand-overs are numbered.
        generation: u64,
    },
    /// A live host may own the segment.
    Exists,
    /// The record of the copies was changed since they were read.
    Changed,
    /// Each attempt failed because another host changed the same records.
    Busy,
}

impl Registry {
    /// Returns the record of a segment's copies.
    ///
    /// # Errors
    /// If the directory fails.
    pub fn copies(&self, segment: SegmentKey) -> Result<Option<CopyRecord>, DirectoryError> {
        Ok(self.copies_entry(segment)?.0)
    }

    /// Lists the segments of a tenant that have addresses: those that exist, and lost ones with
    /// copies.
    ///
    /// # Errors
    /// If the directory fails.
    pub fn segments_with_addresses(&self, tenant: u32) -> Result<Vec<SegmentKey>, DirectoryError> {
        let ranges = self.ranges(tenant)?.0.ranges;
        Ok(ranges.keys().map(|id| SegmentKey { tenant, id: *id }).collect())
    }

    /// Whether no live host owns a segment, or can get it by a hand-over.
    ///
    /// # Errors
    /// If the directory fails.
    pub fn is_lost(&self, segment: SegmentKey, evidence: Evidence) -> Result<bool, DirectoryError> {
        Ok(self.next_generation_if_lost(segment, evidence, &mut Vec::new())?.is_some())
    }

    /// Returns the first address and the length of a segment.
    ///
    /// # Errors
    /// If the directory fails.
    pub fn range(&self, segment: SegmentKey) -> Result<Option<(u64, u64)>, DirectoryError> {
        Ok(self.ranges(segment.tenant)?.0.ranges.get(&segment.id).copied())
    }

    /// Lists the nodes that serve heaps.
    ///
    /// # Errors
    /// If the directory fails.
    pub fn heap_nodes(&self) -> Result<Vec<u16>, DirectoryError> {
        Ok(names::heaps(&*self.directory)?.iter().map(|service| service.node).collect())
    }

    /// Replaces the record of a segment's copies. If a lost segment has no copies any more, its
    /// number is free.
    ///
    /// # Errors
    /// If the directory fails. Then the record may have been replaced.
    pub fn set_copies(
        &self,
        segment: SegmentKey,
        author: Author,
        revision: u64,
        record: Option<&CopyRecord>,
    ) -> Result<CopiesChange, DirectoryError> {
        for _ in 0..ATTEMPTS_MAX {
            let (found, compare) = self.copies_entry(segment)?;
            if found.as_ref() == record {
                return Ok(CopiesChange::Done);
            }
            let is_next = record.is_none_or(|record| record.revision == revision + 1);
            if found.as_ref().map_or(0, |found| found.revision) != revision || !is_next {
                return Ok(CopiesChange::Changed);
            }
            let mut compares = vec![compare];
            let key = segment.copies_name();
            let mut operations = vec![match record {
                Some(record) => KeyOperation::put(key, names::encode(record), None),
                None => KeyOperation::delete(key),
            }];
            let is_author = match author {
                Author::Owner(owner) => self.is_owner(segment, owner, record, &mut compares)?,
                Author::Other(evidence) => {
                    let last = self.next_generation_if_lost(segment, evidence, &mut compares)?;
                    let last = last.filter(|_| found.is_some_and(|found| frees_only(&found, record)));
                    if let Some(last) = last {
                        self.end(segment, last, record.is_some(), &mut compares, &mut operations)?;
                    }
                    last.is_some()
                }
            };
            if !is_author {
                return Ok(CopiesChange::NotOwner);
            }
            if self.directory.transaction(&Transaction { compares, operations })?.is_committed() {
                return Ok(CopiesChange::Done);
            }
        }
        Ok(CopiesChange::Busy)
    }

    /// Whether a host owns a segment of the length of its copies. A transaction with the compares
    /// fails if that changes.
    fn is_owner(
        &self,
        segment: SegmentKey,
        owner: Life,
        copies: Option<&CopyRecord>,
        compares: &mut Vec<Compare>,
    ) -> Result<bool, DirectoryError> {
        let is_length = |(_, bytes): (u64, u64)| copies.is_none_or(|copies| copies.bytes == bytes);
        if !self.range(segment)?.is_some_and(is_length) {
            return Ok(false);
        }
        let Some(entry) = self.directory.get(&segment.name())? else { return Ok(false) };
        let record: SegmentRecord = names::decode(&entry)?;
        compares.push(Compare::version(segment.name(), entry.version));
        Ok(record.owner == owner && self.life_of(owner, compares)?)
    }

    /// Removes the record of a lost segment without copies. The segment keeps its addresses, and so
    /// stays listed, while a record names what is left of its copies on nodes.
    fn end(
        &self,
        segment: SegmentKey,
        last: u64,
        is_listed: bool,
        compares: &mut Vec<Compare>,
        operations: &mut Vec<KeyOperation>,
    ) -> Result<(), DirectoryError> {
        let (mut ranges, compare) = self.ranges(segment.tenant)?;
        if is_listed {
            ranges.retire(last)
        } else {
            ranges.remove(segment.id, last)
        }
        compares.push(compare);
        operations.push(KeyOperation::put(segment.ranges_name(), names::encode(&ranges), None));
        operations.push(KeyOperation::delete(segment.name()));
        Ok(())
    }

    /// Records a host as the owner of a lost segment that it has restored from the copies `read`.
    ///
    /// # Errors
    /// If the directory fails. Then the host may be recorded as the owner.
    pub fn restore(
        &self,
        segment: SegmentKey,
        owner: Life,
        read: &CopyRecord,
        evidence: Evidence,
    ) -> Result<Restoration, DirectoryError> {
        for _ in 0..ATTEMPTS_MAX {
            let (mut ranges, compare) = self.ranges(segment.tenant)?;
            let (copies, copies_compare) = self.copies_entry(segment)?;
            let mut compares = vec![compare, copies_compare];
            let Some(last) = self.next_generation_if_lost(segment, evidence, &mut compares)? else {
                return Ok(Restoration::Exists);
            };
            let is_same = copies.as_ref() == Some(read);
            let range = ranges.ranges.get(&segment.id).copied();
            let Some((address, _)) = range.filter(|_| is_same) else { return Ok(Restoration::Changed) };
            ranges.retire(last);
            let record = SegmentRecord::new(owner, ranges.generation);
            let operations = vec![
                KeyOperation::put(segment.name(), names::encode(&record), None),
                KeyOperation::put(segment.ranges_name(), names::encode(&ranges), None),
            ];
            if self.directory.transaction(&Transaction { compares, operations })?.is_committed() {
                return Ok(Restoration::Owned { address, generation: ranges.generation });
            }
        }
        Ok(Restoration::Busy)
    }

    /// Returns the record of a segment's copies. A transaction with the compare fails if it
    /// changes.
    pub(super) fn copies_entry(
        &self,
        segment: SegmentKey,
    ) -> Result<(Option<CopyRecord>, Compare), DirectoryError> {
        let key = segment.copies_name();
        Ok(match self.directory.get(&key)? {
            Some(entry) => (Some(names::decode(&entry)?), Compare::version(key, entry.version)),
            None => (None, Compare::absent(key)),
        })
    }
}

/// Whether `next` has no copies, and names no roots that `found` does not name.
fn frees_only(found: &CopyRecord, next: Option<&CopyRecord>) -> bool {
    let Some(next) = next else { return true };
    let of_trees = found.trees.iter().flat_map(|tree| tree.former(found.bytes));
    let known: Vec<_> = of_trees.chain(found.former.iter().copied()).collect();
    next.trees.is_empty() && next.former.iter().all(|root| known.contains(root))
}
