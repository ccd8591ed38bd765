//! The allocator of a segment, which lies in the segment itself.

use std::alloc::Layout;
use std::mem::size_of;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use rlsf::Tlsf;

/// `AQSEGHP`, and the version of the header.
const MAGIC: u64 = u64::from_le_bytes(*b"AQSEGHP\x01");
/// Longest description.
const DESCRIPTION_BYTES_MAX: usize = 2024;
/// Blocks of 32 bytes to 128 GiB, with 16 steps for each power of two.
type Blocks = Tlsf<'static, u32, u16, 32, 16>;

/// What a segment with containers begins with. The fields up to the description are the same in all
/// builds; the others are used if the description is the expected one.
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

/// Why a segment cannot be used for containers.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HeapFault {
    /// It has none.
    #[error("the segment has no containers")]
    NoContainers,
    /// It has others.
    #[error("the segment has «{found}», and this program expects «{expected}»")]
    Mismatch {
        /// What it has.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// It is too small.
    #[error("a segment of {bytes} bytes is too small for containers; it needs more than {HEADER_BYTES}")]
    TooSmall {
        /// Its length.
        bytes: usize,
    },
    /// The type has too long a name.
    #[error("the description of the type has {bytes} bytes, more than {DESCRIPTION_BYTES_MAX}")]
    LongDescription {
        /// Its length.
        bytes: usize,
    },
}

/// The allocator of a segment: the address of its header. It is the same in each process that owns
/// the segment, so containers keep it beside their pointers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentHeap {
    header: NonNull<Header>,
}

// SAFETY: the blocks are changed under the lock of the header, and nothing else of it is changed
// once the segment is open.
unsafe impl Send for SegmentHeap {}
// SAFETY: the same reason as for `Send`.
unsafe impl Sync for SegmentHeap {}

impl SegmentHeap {
    /// Makes a segment one with containers. It has no root.
    ///
    /// # Errors
    /// If it is too small, or the description too long.
    ///
    /// # Safety
    /// The `bytes` bytes at `start` are memory that this process may write, page-aligned, and
    /// nothing else uses them as long as the heap or a copy of it is used.
    pub unsafe fn create(start: NonNull<u8>, bytes: usize, description: &str) -> Result<Self, HeapFault> {
        if description.len() > DESCRIPTION_BYTES_MAX {
            return Err(HeapFault::LongDescription { bytes: description.len() });
        }
        let header: NonNull<Header> = start.cast();
        let rest = bytes.checked_sub(HEADER_BYTES).ok_or(HeapFault::TooSmall { bytes })?;
        let mut text = [0; DESCRIPTION_BYTES_MAX];
        text[..description.len()].copy_from_slice(description.as_bytes());
        let description_len = u32::try_from(description.len()).expect("it is short");
        let whole = Header {
            magic: MAGIC,
            lock: AtomicU32::new(0),
            description_len,
            root: 0,
            description: text,
            blocks: Tlsf::new(),
        };
        // SAFETY: the header fits, is aligned as a page is, and nothing else uses it.
        let blocks = unsafe {
            header.write(whole);
            &mut (*header.as_ptr()).blocks
        };
        // SAFETY: the memory behind the header is in the segment, and is the heap's from now on.
        let added = unsafe {
            let first = start.add(HEADER_BYTES);
            blocks.insert_free_block_ptr(NonNull::slice_from_raw_parts(first, rest))
        };
        added.map(|_| Self { header }).ok_or(HeapFault::TooSmall { bytes })
    }

    /// Opens a segment with containers that another process has made.
    ///
    /// # Errors
    /// If it has none, or others than expected.
    ///
    /// # Safety
    /// As for [`Self::create`]. The segment's processes must be trusted: what they have written
    /// besides the header is not checked.
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
        // A process that was killed may have held it.
        heap.lock().store(0, Ordering::Release);
        Ok(heap)
    }

    /// The heap as an address, for [`Self::at`].
    #[must_use]
    pub fn address(self) -> usize {
        self.header.as_ptr().expose_provenance()
    }

    /// The heap at an address.
    ///
    /// # Safety
    /// [`Self::address`] has returned it, of a heap that is open in this process.
    #[must_use]
    pub unsafe fn at(address: usize) -> Option<Self> {
        NonNull::new(std::ptr::with_exposed_provenance_mut(address)).map(|header| Self { header })
    }

    /// The address of the root, or 0.
    #[must_use]
    pub fn root(self) -> usize {
        // SAFETY: the header is valid as long as the heap is used.
        unsafe { (*self.header.as_ptr()).root }
    }

    /// Makes an object in the segment the root.
    ///
    /// # Safety
    /// No other thread uses the root meanwhile.
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
    /// The heap has allocated it with this alignment, and nothing refers to it any more.
    pub unsafe fn free(self, memory: NonNull<u8>, align: usize) {
        // SAFETY: the caller says so.
        self.locked(|blocks| unsafe { blocks.deallocate(memory, align) });
    }

    /// Makes memory longer or shorter, perhaps elsewhere; `None` if the segment is full. Then the
    /// memory is as it was.
    ///
    /// # Safety
    /// The heap has allocated it with the new layout's alignment.
    #[must_use]
    pub unsafe fn resize(self, memory: NonNull<u8>, layout: Layout) -> Option<NonNull<u8>> {
        // SAFETY: the caller says so.
        self.locked(|blocks| unsafe { blocks.reallocate(memory, layout) })
    }

    fn lock(&self) -> &AtomicU32 {
        // SAFETY: the header is valid as long as the heap is used.
        unsafe { &(*self.header.as_ptr()).lock }
    }

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
        // SAFETY: the memory is as long as that.
        let heap = unsafe { SegmentHeap::create(start, layout.size(), "words") }.unwrap();
        // SAFETY: no other thread uses the root.
        unsafe { heap.set_root(0x3000_0000_1234) };
        // SAFETY: the memory is as long as that, and the header was written.
        let head = unsafe { std::slice::from_raw_parts(start.as_ptr(), 32) };
        let golden = *b"AQSEGHP\x01\0\0\0\0\x05\0\0\0\x34\x12\0\0\0\x30\0\0words\0\0\0";
        assert_eq!(head, golden);
        assert_eq!(offset_of!(Header, blocks), 2048);
        // SAFETY: it was allocated with this layout.
        unsafe { dealloc(start.as_ptr(), layout) };
    }
}
