//! The allocator of a segment, with the interface that containers need.

use std::alloc::Layout;
use std::ptr::NonNull;

use allocator_api2::alloc::{AllocError, Allocator};

use crate::heap::SegmentHeap;

/// Error: the segment has no memory for an allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the segment is full")]
pub struct SegmentFull;

/// Allocates memory in a segment. Each container has a copy, and returns it by `allocator`.
#[derive(Clone, Copy, Debug)]
pub struct SegmentAllocator(pub(crate) SegmentHeap);

impl From<SegmentHeap> for SegmentAllocator {
    fn from(heap: SegmentHeap) -> Self {
        Self(heap)
    }
}

// SAFETY: memory that the heap has allocated stays valid until it is freed, wherever the allocator
// is moved, and all copies of an allocator refer to the same heap.
unsafe impl Allocator for SegmentAllocator {
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        if layout.size() == 0 {
            let dangling = NonNull::new(std::ptr::without_provenance_mut(layout.align()));
            return dangling.map(|start| NonNull::slice_from_raw_parts(start, 0)).ok_or(AllocError);
        }
        let memory = self.0.allocate(layout).ok_or(AllocError)?;
        Ok(NonNull::slice_from_raw_parts(memory, layout.size()))
    }

    unsafe fn deallocate(&self, memory: NonNull<u8>, layout: Layout) {
        if layout.size() > 0 {
            // SAFETY: the caller guarantees that the heap has allocated the memory.
            unsafe { self.0.free(memory, layout.align()) }
        }
    }

    unsafe fn grow(
        &self,
        memory: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Result<NonNull<[u8]>, AllocError> {
        if old.size() == 0 || old.align() != new.align() {
            let grown = self.allocate(new)?;
            // SAFETY: both are at least as long as the old layout, and do not overlap.
            unsafe {
                std::ptr::copy_nonoverlapping(memory.as_ptr(), grown.cast::<u8>().as_ptr(), old.size());
                self.deallocate(memory, old);
            }
            return Ok(grown);
        }
        // SAFETY: the caller guarantees that the heap has allocated the memory, with this
        // alignment.
        let grown = unsafe { self.0.resize(memory, new) }.ok_or(AllocError)?;
        Ok(NonNull::slice_from_raw_parts(grown, new.size()))
    }
}
