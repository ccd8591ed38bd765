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

/// The allocator of segment memory.
#[derive(Debug)]
pub(super) struct Memories {
    target: TcpTarget,
    keeper: Arc<dyn KeeperStore>,
    /// The keeper's item number for the next segment memory.
    next_number: AtomicU64,
    /// The bytes of segment memory of each user.
    held_bytes: Arc<HeldBytes>,
    /// The segment numbers that each user has used.
    used_numbers: Mutex<UsedNumbers>,
    /// The descriptors of the agent, which are charged to users.
    descriptors: Arc<DescriptorShares>,
    /// Memory that is freed but still registered with the target.
    retired: Mutex<Vec<SegmentMemory>>,
}

impl Memories {
    /// Creates the allocator. `next_number` must be greater than the item numbers of all segment
    /// memory that the keeper holds.
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
    /// If the user would exceed a limit, or the system or the keeper refuses.
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

    /// Opens memory that the keeper holds, with the last entry of its journal. If the memory is
    /// unusable, it is released from the keeper.
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
                tracing::error!(%segment, %error, "cannot open the memory of a segment; the segment is lost");
                self.keeper.release(HeldKind::Segment, number);
                None
            }
        }
    }

    /// Frees the memory of a segment, but leaves it registered with the target until
    /// [`Self::close_retired`].
    ///
    /// The thread that answers messages of other agents must not wait for the target, because the
    /// target waits for this thread.
    pub fn retire(&self, memory: SegmentMemory) {
        self.keeper.release(HeldKind::Segment, memory.number);
        self.held_bytes.free_in_background(memory.owner(), &memory.data);
        self.retired.lock().push(memory);
    }

    /// Deregisters the memory that was retired.
    pub fn close_retired(&self) {
        let retired = std::mem::take(&mut *self.retired.lock());
        retired.iter().for_each(|memory| memory.close(&self.target));
    }

    /// Frees the memory of a segment in the background. No READ into it may be in flight.
    pub fn free(&self, memory: &SegmentMemory) {
        self.keeper.release(HeldKind::Segment, memory.number);
        memory.close(&self.target);
        self.held_bytes.free_in_background(memory.owner(), &memory.data);
    }

    /// Frees the memory of a segment before it returns, so that a program that waits for it can
    /// allocate the same amount at once. No READ into it may be in flight.
    pub fn free_now(&self, memory: &SegmentMemory) {
        self.keeper.release(HeldKind::Segment, memory.number);
        memory.close(&self.target);
        self.held_bytes.free(memory.owner(), &memory.data);
    }
}
