//! The memory of the segments of a host: allocated within the limits of each user, held by the
//! keeper, and read by other hosts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_channel::descriptor_shares::DescriptorShares;
use aquifer_fabric::tcp::TcpTarget;
use aquifer_ipc::{HeldItem, HeldKind};
use aquifer_keeper::KeeperStore;
use parking_lot::Mutex;

use super::held_bytes::HeldBytes;
use super::journal::JournalEntry;
use super::kept::KeptSegment;
use super::memory::{SEGMENT_DESCRIPTORS, SegmentMemory};
use super::numbers::UsedNumbers;
use super::{SegmentError, SegmentKey};

#[derive(Debug)]
pub(super) struct Memories {
    target: TcpTarget,
    keeper: Arc<dyn KeeperStore>,
    /// The number under which the keeper holds the next memory.
    next_number: AtomicU64,
    /// The bytes that each user has.
    held_bytes: Arc<HeldBytes>,
    /// The numbers of segments that each user has used.
    used_numbers: Mutex<UsedNumbers>,
    /// The descriptors of the agent, which are charged to users.
    descriptors: Arc<DescriptorShares>,
    /// Memory that is not used any more, and that the target still has.
    retired: Mutex<Vec<SegmentMemory>>,
}

impl Memories {
    /// `next_number` is greater than the numbers of all memory that the keeper holds.
    pub fn new(
        target: TcpTarget,
        keeper: Arc<dyn KeeperStore>,
        next_number: u64,
        bytes_per_tenant: u64,
        descriptors: Arc<DescriptorShares>,
    ) -> Self {
        Self {
            target,
            keeper,
            next_number: AtomicU64::new(next_number),
            held_bytes: HeldBytes::new(bytes_per_tenant),
            used_numbers: Mutex::default(),
            descriptors,
            retired: Mutex::default(),
        }
    }

    /// The target at which other hosts read the memory.
    pub fn target(&self) -> &TcpTarget {
        &self.target
    }

    pub fn descriptors(&self) -> &Arc<DescriptorShares> {
        &self.descriptors
    }

    /// Allocates memory for a segment. Does not wait for the target.
    ///
    /// # Errors
    /// If the user would have too much, or the system or the keeper refuses.
    pub fn allocate(&self, segment: SegmentKey, bytes: u64) -> Result<SegmentMemory, SegmentError> {
        let descriptors = self.descriptors.charge(segment.tenant, SEGMENT_DESCRIPTORS)?;
        let owner = descriptors.owner();
        self.used_numbers.lock().add(owner, segment)?;
        self.held_bytes.charge(owner, bytes)?;
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let memory = match SegmentMemory::create(&self.target, number, segment.tenant, bytes, descriptors) {
            Ok(memory) => memory,
            Err(error) => {
                self.held_bytes.release(owner, bytes);
                return Err(error.into());
            }
        };
        let record = serde_json::to_string(&segment).expect("numbers can be serialised");
        let item = HeldItem { kind: HeldKind::Segment, id: number, pid: 0, uid: segment.tenant, record };
        match self.keeper.hold(&item, &memory.fds()) {
            Ok(()) => Ok(memory),
            Err(refused) => {
                self.retire(memory);
                Err(refused.into())
            }
        }
    }

    /// Opens memory that the keeper has held, with the last entry of its journal. Has the keeper
    /// release it if it is unusable.
    pub fn recover(&self, kept: KeptSegment) -> Option<(SegmentMemory, Option<JournalEntry>)> {
        let KeptSegment { segment, number, data, present, .. } = kept;
        let descriptors = self.descriptors.charge_always(segment.tenant, SEGMENT_DESCRIPTORS);
        let holder = (number, segment.tenant);
        match SegmentMemory::recover(&self.target, holder, data, present, descriptors) {
            Ok((memory, entry)) => {
                self.held_bytes.charge_always(memory.owner(), memory.bytes());
                Some((memory, entry))
            }
            Err(error) => {
                tracing::error!(%segment, %error, "a kept segment is unusable; it is lost");
                self.keeper.release(HeldKind::Segment, number);
                None
            }
        }
    }

    /// Frees the memory of a segment, but leaves it at the target until [`Self::close_retired`].
    ///
    /// The thread that answers messages of other agents must not wait for the target, which waits
    /// for this thread.
    pub fn retire(&self, memory: SegmentMemory) {
        self.keeper.release(HeldKind::Segment, memory.number);
        self.held_bytes.free_in_background(memory.owner(), &memory.data);
        self.retired.lock().push(memory);
    }

    /// Has the target give up the memory that is not used any more.
    pub fn close_retired(&self) {
        let retired = std::mem::take(&mut *self.retired.lock());
        retired.iter().for_each(|memory| memory.close(&self.target));
    }

    /// Frees the memory of a segment, in the background. No READ into it is in flight.
    pub fn free(&self, memory: &SegmentMemory) {
        self.keeper.release(HeldKind::Segment, memory.number);
        memory.close(&self.target);
        self.held_bytes.free_in_background(memory.owner(), &memory.data);
    }

    /// Frees the memory of a segment before it returns: the program that waits may allocate as
    /// much. No READ into it is in flight.
    pub fn free_now(&self, memory: &SegmentMemory) {
        self.keeper.release(HeldKind::Segment, memory.number);
        memory.close(&self.target);
        self.held_bytes.free(memory.owner(), &memory.data);
    }
}
