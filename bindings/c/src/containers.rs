//! Allocation inside segments for C++. `aquifer_containers.h` documents the functions.

use std::alloc::Layout;
use std::ffi::{c_char, c_int, c_void};
use std::ptr::NonNull;

use aquifer_containers::{Description, HeapFault, SegmentHeap};

use crate::errors::{containers_errno, invalid_argument, store_text};
use crate::segments::{CSegment, open_segment, text};

/// `aquifer_segment_heap`: the header of the heap in a segment.
#[derive(Debug)]
pub struct CHeader {
    _private: [u8; 0],
}

/// Stores the address of a heap in `out`, which is not null. Returns 0, or the negative errno of a
/// failure.
fn stored(heap: Result<SegmentHeap, HeapFault>, out: *mut *mut CHeader) -> c_int {
    match heap {
        Ok(heap) => {
            // SAFETY: the caller has checked that `out` is not null, so it is writable.
            unsafe { out.write(std::ptr::with_exposed_provenance_mut(heap.address())) };
            0
        }
        Err(error) => {
            store_text(&error);
            -containers_errno(&error)
        }
    }
}

/// A function that creates or opens a heap.
type OpenHeap = unsafe fn(NonNull<u8>, usize, &str) -> Result<SegmentHeap, HeapFault>;

/// Creates or opens the heap of a segment.
///
/// # Safety
/// As for [`aquifer_segment_heap_create`].
unsafe fn open_heap(
    open: OpenHeap,
    segment: *const CSegment,
    kind: *const c_char,
    out: *mut *mut CHeader,
) -> c_int {
    // SAFETY: the caller passes null or a C string.
    let kind = unsafe { text(kind) }.filter(|_| !out.is_null());
    let Some(kind) = kind else { return invalid_argument() };
    // SAFETY: the caller passes null or a segment.
    let segment = match unsafe { open_segment(segment) } {
        Ok(segment) => &segment.segment,
        Err(errno) => return errno,
    };
    let start = NonNull::new(std::ptr::with_exposed_provenance_mut(segment.address()));
    let start = start.expect("no segment is at address 0");
    // SAFETY: this process owns the segment, and the caller uses it only through its heap.
    stored(unsafe { open(start, segment.bytes(), &Description::of_text(kind)) }, out)
}

/// Creates a heap in a segment.
///
/// # Safety
/// `segment` is null, or was not consumed; `kind` is null or a C string; `heap` is null or
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_heap_create(
    segment: *const CSegment,
    kind: *const c_char,
    heap: *mut *mut CHeader,
) -> c_int {
    // SAFETY: the caller fulfils the same conditions.
    unsafe { open_heap(SegmentHeap::create, segment, kind, heap) }
}

/// Opens the heap of a segment.
///
/// # Safety
/// As for [`aquifer_segment_heap_create`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_heap_open(
    segment: *const CSegment,
    kind: *const c_char,
    heap: *mut *mut CHeader,
) -> c_int {
    // SAFETY: the caller fulfils the same conditions.
    unsafe { open_heap(SegmentHeap::open, segment, kind, heap) }
}

/// Returns the heap at an address; `None` if it is null.
///
/// # Safety
/// `heap` is null, or the heap of a segment that was not consumed.
unsafe fn heap_at(heap: *mut CHeader) -> Option<SegmentHeap> {
    // SAFETY: the caller passes null or an address that `stored` has written.
    unsafe { SegmentHeap::at(heap.expose_provenance()) }
}

/// Allocates memory in a segment. Returns null if the segment is full.
///
/// # Safety
/// `heap` is null, or the heap of a segment that was not consumed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_heap_allocate(
    heap: *mut CHeader,
    bytes: usize,
    align: usize,
) -> *mut c_void {
    // SAFETY: the caller passes null or a heap.
    let heap = unsafe { heap_at(heap) };
    let memory = heap.zip(Layout::from_size_align(bytes.max(1), align).ok());
    let memory = memory.and_then(|(heap, layout)| heap.allocate(layout));
    memory.map_or(std::ptr::null_mut(), |memory| memory.cast().as_ptr())
}

/// Frees memory of a segment.
///
/// # Safety
/// `memory` is null, or [`aquifer_segment_heap_allocate`] has returned it for this heap and
/// alignment, and it is not free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_heap_free(heap: *mut CHeader, memory: *mut c_void, align: usize) {
    // SAFETY: the caller passes null or a heap.
    if let (Some(heap), Some(memory)) = (unsafe { heap_at(heap) }, NonNull::new(memory)) {
        // SAFETY: the caller passes memory of the heap that is not free, with its alignment.
        unsafe { heap.free(memory.cast(), align) }
    }
}

/// Returns the root of a segment, or null if it has none.
///
/// # Safety
/// `heap` is null, or the heap of a segment that was not consumed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_heap_root(heap: *mut CHeader) -> *mut c_void {
    // SAFETY: the caller passes null or a heap.
    let root = unsafe { heap_at(heap) }.map_or(0, SegmentHeap::root);
    std::ptr::with_exposed_provenance_mut(root)
}

/// Sets the root of a segment.
///
/// # Safety
/// `heap` is null, or the heap of a segment that was not consumed; no other thread uses the root.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_heap_set_root(heap: *mut CHeader, root: *mut c_void) {
    // SAFETY: the caller passes null or a heap.
    if let Some(heap) = unsafe { heap_at(heap) } {
        // SAFETY: the caller guarantees that no other thread uses the root.
        unsafe { heap.set_root(root.expose_provenance()) }
    }
}
