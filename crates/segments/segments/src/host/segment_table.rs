//! The segments of a host, by their keys.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::SegmentKey;
use super::shared::Segment;
use aquifer_ownership::Life;

/// A segment that several threads use.
pub(super) type SharedSegment = Arc<Mutex<Segment>>;

/// All segments of which this host has a state, also those that have left. No method returns with
/// the table locked, and only [`Self::remove_if`] locks a segment.
#[derive(Debug, Default)]
pub(super) struct SegmentTable(Mutex<BTreeMap<SegmentKey, SharedSegment>>);

impl SegmentTable {
    pub fn get(&self, segment: SegmentKey) -> Option<SharedSegment> {
        self.0.lock().get(&segment).cloned()
    }

    /// Returns a segment, which is added as absent if the table does not have it.
    pub fn get_or_add(&self, segment: SegmentKey, own: Life) -> SharedSegment {
        let absent = || Arc::new(Mutex::new(Segment::absent(own)));
        Arc::clone(self.0.lock().entry(segment).or_insert_with(absent))
    }

    /// Replaces a segment. Returns the former one.
    pub fn replace(&self, segment: SegmentKey, new: Segment) -> Option<SharedSegment> {
        self.0.lock().insert(segment, Arc::new(Mutex::new(new)))
    }

    /// Removes an entry for which the condition holds, unless it was replaced or another thread
    /// has a reference to it. Locks the table and then the segment.
    pub fn remove_if(
        &self,
        segment: SegmentKey,
        entry: &SharedSegment,
        condition: impl Fn(&Segment) -> bool,
    ) {
        let mut segments = self.0.lock();
        let is_known = segments.get(&segment).is_some_and(|known| Arc::ptr_eq(known, entry));
        // The references of the table and of the caller.
        let is_alone = Arc::strong_count(entry) == 2;
        if is_known && is_alone && condition(&entry.lock()) {
            segments.remove(&segment);
        }
    }

    pub fn contains(&self, segment: SegmentKey) -> bool {
        self.0.lock().contains_key(&segment)
    }

    /// Returns a snapshot of all keys and segments.
    pub fn all(&self) -> Vec<(SegmentKey, SharedSegment)> {
        self.0.lock().iter().map(|(segment, entry)| (*segment, Arc::clone(entry))).collect()
    }
}
