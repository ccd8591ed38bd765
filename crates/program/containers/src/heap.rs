//! The memory of a segment with containers: a header with the allocator, and the allocated memory.

use std::alloc::Layout;
use std::mem::size_of;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use rlsf::Tlsf;

/// The first word of a segment with containers: `AQSEGHP`, and the version of the header.
const MAGIC: u64 = u64::from_le_bytes(*b"AQSEGHP\x01");
/// Maximum length of a description in bytes.
const DESCRIPTION_BYTES_MAX: usize = 2024;
/// The state of the allocator: blocks of 32 bytes to 128 GiB, with 16 sizes for each power of two.
type Blocks = Tlsf<'static, u32, u16, 32, 16>;

/// The beginning of a segment with containers. The fields up to the description have the same
/// layout in all builds. The allocator may be used only if the description is the expected one.
#[repr(C, align(64))]
struct Header {
    magic: u64,
    lock: AtomicU32,
    description_len: u32,
    root: usize,
    description: [u8; DESCRIPTION_BYTES_MAX],
    blocks: Blocks,
}

const HEADER_BYTES: usize = size_of::<Header>();

/// The reason why a segment cannot be used for containers.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HeapFault {
    /// The segment has no containers.
    #[error("the segment has no containers")]
    NoContainers,
    /// The segment has containers of another type or build.
    #[error("the segment has «{found}», and this program expects «{expected}»")]
    Mismatch {
        /// The description in the segment.
        found: String,
        /// The description that this program expects.
        expected: String,
    },
    /// The segment is too small.
    #[error("a segment of {bytes} bytes is too small for containers; it needs more than {HEADER_BYTES}")]
    TooSmall {
        /// The length of the segment in bytes.
        bytes: usize,
    },
    /// The description of the type is too long.
    #[error("the description of the type has {bytes} bytes, more than {DESCRIPTION_BYTES_MAX}")]
    LongDescription {
        /// The length of the description in bytes.
        bytes: usize,
    },
}

/// A handle to the heap of a segment: the address of its header. The address is the same in each
/// process that owns the segment, so containers store the handle beside their pointers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentHeap {
    header: NonNull<Header>,
}

// SAFETY: the blocks are changed under the lock of the header. The root is changed only by
// `set_root`, whose caller excludes other threads; the other fields do not change.
unsafe impl Send for SegmentHeap {}
// SAFETY: for the reason given for `Send`.
unsafe impl Sync for SegmentHeap {}

impl SegmentHeap {
    /// Creates a heap without a root in a segment.
    ///
    /// # Errors
    /// If the segment is too small, or the description too long.
    ///
    /// # Safety
    /// The `bytes` bytes at `start` must be page-aligned memory that this process may write.
    /// Nothing else may use them as long as the heap or a copy of the handle is used.
    pub unsafe fn create(start: NonNull<u8>, bytes: usize, description: &str) -> Result<Self, HeapFault> {
        if description.len() > DESCRIPTION_BYTES_MAX {
            return Err(HeapFault::LongDescription { bytes: description.len() });
        }
        let header: NonNull<Header> = start.cast();
        let rest = bytes.checked_sub(HEADER_BYTES).ok_or(HeapFault::TooSmall { bytes })?;
        let mut text = [0; DESCRIPTION_BYTES_MAX];
        text[..description.len()].copy_from_slice(description.as_bytes());
        let description_len = u32::try_from(description.len()).expect("at most 2024 bytes");
        let whole = Header {
            magic: MAGIC,
            lock: AtomicU32::new(0),
            description_len,
            root: 0,
            description: text,
            blocks: Tlsf::new(),
        };
        // SAFETY: the header fits, is page-aligned, and nothing else uses it.
        let blocks = unsafe {
            header.write(whole);
            &mut (*header.as_ptr()).blocks
        };
        // SAFETY: the memory behind the header is in the segment, and only the heap uses it from
        // now on.
        let added = unsafe {
            let first = start.add(HEADER_BYTES);
            blocks.insert_free_block_ptr(NonNull::slice_from_raw_parts(first, rest))
        };
        added.map(|_| Self { header }).ok_or(HeapFault::TooSmall { bytes })
    }

    /// Opens the heap of a segment that another process has created.
    ///
    /// # Errors
    /// If the segment has no heap, or its description is not the expected one.
    ///
    /// # Safety
    /// As for [`Self::create`]. The processes that have owned the segment must be trusted: only the
    /// magic number and the description are checked.
    pub unsafe fn open(start: NonNull<u8>, bytes: usize, expected: &str) -> Result<Self, HeapFault> {
        if bytes < HEADER_BYTES {
            return Err(HeapFault::NoContainers);
        }
        let header: NonNull<Header> = start.cast();
        // SAFETY: the header is inside the segment, and any bytes are valid for these fields.
        let (magic, len, description) = unsafe {
            let header = header.as_ptr();
            ((*header).magic, (*header).description_len as usize, &(*header).description)
        };
        let found = description.get(..len).filter(|_| magic == MAGIC).ok_or(HeapFault::NoContainers)?;
        let found = String::from_utf8_lossy(found);
        if found != expected {
            return Err(HeapFault::Mismatch { found: found.into_owned(), expected: expected.to_owned() });
        }
        let heap = Self { header };
        // A process that was killed may have held the lock.
        heap.lock().store(0, Ordering::Release);
        Ok(heap)
    }

    /// Returns the address of the heap, for [`Self::at`].
    #[must_use]
    pub fn address(self) -> usize {
        self.header.as_ptr().expose_provenance()
    }

    /// Returns the heap at an address; `None` for 0.
    ///
    /// # Safety
    /// The address must come from [`Self::address`] of a heap that is open in this process.
    #[must_use]
    pub unsafe fn at(address: usize) -> Option<Self> {
        NonNull::new(std::ptr::with_exposed_provenance_mut(address)).map(|header| Self { header })
    }

    /// Returns the address of the root; 0 if there is none.
    #[must_use]
    pub fn root(self) -> usize {
        // SAFETY: the header is valid as long as the heap is used.
        unsafe { (*self.header.as_ptr()).root }
    }

    /// Sets the address of the root, a value in the segment.
    ///
    /// # Safety
    /// No other thread may use the root at the same time.
    pub unsafe fn set_root(self, root: usize) {
        // SAFETY: the header is valid, and no other thread uses the field.
        unsafe { (*self.header.as_ptr()).root = root }
    }

    /// Allocates memory; `None` if the segment is full.
    #[must_use]
    pub fn allocate(self, layout: Layout) -> Option<NonNull<u8>> {
        self.locked(|blocks| blocks.allocate(layout))
    }

    /// Frees memory.
    ///
    /// # Safety
    /// The heap must have allocated the memory with this alignment, and nothing may refer to it any
    /// more.
    pub unsafe fn free(self, memory: NonNull<u8>, align: usize) {
        // SAFETY: the caller guarantees it.
        self.locked(|blocks| unsafe { blocks.deallocate(memory, align) });
    }

    /// Resizes memory, and moves it if necessary. Returns `None` if the segment is full; then the
    /// memory is unchanged.
    ///
    /// # Safety
    /// The heap must have allocated the memory with the alignment of the new layout.
    #[must_use]
    pub unsafe fn resize(self, memory: NonNull<u8>, layout: Layout) -> Option<NonNull<u8>> {
        // SAFETY: the caller guarantees it.
        self.locked(|blocks| unsafe { blocks.reallocate(memory, layout) })
    }

    fn lock(&self) -> &AtomicU32 {
        // SAFETY: the header is valid as long as the heap is used.
        unsafe { &(*self.header.as_ptr()).lock }
    }

    /// Calls `use_blocks` with the lock held.
    fn locked<T>(self, use_blocks: impl FnOnce(&mut Blocks) -> T) -> T {
        let lock = self.lock();
        while lock.compare_exchange_weak(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            std::thread::yield_now();
        }
        // SAFETY: the lock is held, so no other thread uses the blocks.
        let result = use_blocks(unsafe { &mut (*self.header.as_ptr()).blocks });
        lock.store(0, Ordering::Release);
        result
    }
}

#[cfg(test)]
mod tests {
    use std::alloc::{alloc_zeroed, dealloc};
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn golden_header() {
        let layout = Layout::from_size_align(1 << 20, 4096).unwrap();
        // SAFETY: the layout has a size.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
        // SAFETY: the memory has this length.
        let heap = unsafe { SegmentHeap::create(start, layout.size(), "words") }.unwrap();
        // SAFETY: no other thread uses the root.
        unsafe { heap.set_root(0x3000_0000_1234) };
        // SAFETY: the memory has more than 32 bytes, and the header was written.
        let head = unsafe { std::slice::from_raw_parts(start.as_ptr(), 32) };
        let golden = *b"AQSEGHP\x01\0\0\0\0\x05\0\0\0\x34\x12\0\0\0\x30\0\0words\0\0\0";
        assert_eq!(head, golden);
        assert_eq!(offset_of!(Header, blocks), 2048);
        // SAFETY: the memory was allocated with this layout.
        unsafe { dealloc(start.as_ptr(), layout) };
    }
}
