//! The segments that processes are restoring from copies. All other parts of the host ignore them
//! until the restore is committed.

use std::collections::BTreeMap;

use aquifer_arena::copies::CopyRecord;
use parking_lot::Mutex;

use super::SegmentKey;
use super::memory::SegmentMemory;

/// The memory of a segment that is being restored.
#[derive(Debug)]
pub(super) struct RestoringMemory {
    pub memory: SegmentMemory,
    /// The process that restores the segment.
    pub process: String,
    /// The copies from which it is restored.
    pub record: CopyRecord,
}

/// The segments that are being restored.
#[derive(Debug, Default)]
pub(super) struct Restores(Mutex<BTreeMap<SegmentKey, RestoringMemory>>);

impl Restores {
    pub fn contains(&self, segment: SegmentKey) -> bool {
        self.0.lock().contains_key(&segment)
    }

    /// Adds a segment. Returns the former memory if another thread has added the same segment
    /// meanwhile.
    pub fn add(&self, segment: SegmentKey, restoring: RestoringMemory) -> Option<RestoringMemory> {
        self.0.lock().insert(segment, restoring)
    }

    /// Removes a segment if the given process restores it.
    pub fn remove_of(&self, segment: SegmentKey, process: &str) -> Option<RestoringMemory> {
        let mut all = self.0.lock();
        let is_of_process = all.get(&segment).is_some_and(|restoring| restoring.process == process);
        if is_of_process { all.remove(&segment) } else { None }
    }

    /// The segments that a process restores.
    pub fn of_process(&self, tenant: u32, process: &str) -> Vec<SegmentKey> {
        let all = self.0.lock();
        let is_of_process = |(segment, restoring): &(&SegmentKey, &RestoringMemory)| {
            segment.tenant == tenant && restoring.process == process
        };
        all.iter().filter(is_of_process).map(|(segment, _)| *segment).collect()
    }
}
