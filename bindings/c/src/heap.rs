//! Heaps of objects for C. `aquifer_heap.h` documents the functions.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;

use aquifer_objects::client::{ClientError, DirectRead, HeapClient};
use aquifer_objects::pointer::Pointer;
use aquifer_objects::slot::ReadVerdict;
use parking_lot::{Mutex, MutexGuard};

use crate::errors::{self, heap_errno, invalid_argument, store_text};

/// `aquifer_heap`.
#[derive(Debug)]
pub struct CHeap {
    /// The process that opened the heap: see [`crate::CSession`].
    owner: u32,
    client: Mutex<HeapClient>,
}

/// `aquifer_pointer`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CPointer {
    pub(crate) words: [u64; 2],
}

/// `aquifer_get_job`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CGetJob {
    pub(crate) pointer: CPointer,
    pub(crate) out: *mut c_void,
    pub(crate) bytes: usize,
}

/// The return value of a call: a number that is not negative, or a negative errno.
fn value(outcome: Result<c_int, ClientError>) -> c_int {
    outcome.unwrap_or_else(|error| {
        store_text(&error);
        -heap_errno(&error)
    })
}

/// Locks a heap for this thread. Returns the negative errno if it is null or belongs to another
/// process.
///
/// # Safety
/// `heap` is null or open.
unsafe fn lock<'a>(heap: *const CHeap) -> Result<MutexGuard<'a, HeapClient>, c_int> {
    // SAFETY: the caller passes null or an open heap.
    let heap = unsafe { heap.as_ref() }.ok_or_else(invalid_argument)?;
    if heap.owner != std::process::id() {
        return Err(errors::forked());
    }
    Ok(heap.client.lock())
}

/// Returns the pointer at an address; `None` if the address is null, or its bytes are not the
/// pointer of an object.
///
/// # Safety
/// `pointer` is null or readable.
pub(crate) unsafe fn pointer_at(pointer: *const CPointer) -> Option<Pointer> {
    // SAFETY: the caller passes null or a pointer's words.
    let CPointer { words } = *unsafe { pointer.as_ref() }?;
    Pointer::from_words(words)
}

/// Returns the bytes at an address; `None` if the address is null and `bytes` is not 0.
///
/// # Safety
/// `bytes` bytes are readable at `from`, unless it is null.
pub(crate) unsafe fn bytes_at<'a>(from: *const c_void, bytes: usize) -> Option<&'a [u8]> {
    if bytes == 0 {
        return Some(&[]);
    }
    let is_possible = !from.is_null() && isize::try_from(bytes).is_ok();
    // SAFETY: the caller passes readable memory of that length.
    is_possible.then(|| unsafe { std::slice::from_raw_parts(from.cast(), bytes) })
}

/// Returns the buffer at an address; `None` if the address is null and `bytes` is not 0.
///
/// # Safety
/// `bytes` bytes are writable at `out`, unless it is null.
unsafe fn buffer_at<'a>(out: *mut c_void, bytes: usize) -> Option<&'a mut [u8]> {
    if bytes == 0 {
        return Some(&mut []);
    }
    let is_possible = !out.is_null() && isize::try_from(bytes).is_ok();
    // SAFETY: the caller passes writable memory of that length, which nothing else uses now.
    is_possible.then(|| unsafe { std::slice::from_raw_parts_mut(out.cast(), bytes) })
}

/// Connects a client to a heap; `None` on failure.
///
/// # Safety
/// `socket` is null or a C string.
pub(crate) unsafe fn open_client(socket: *const c_char, node: u16) -> Option<HeapClient> {
    #[cfg(feature = "verbs")]
    aquifer_fabric_verbs::install();
    let node = (node > 0).then_some(node);
    let opened = if socket.is_null() {
        HeapClient::connect(node)
    } else {
        // SAFETY: the caller passes a C string.
        let path = unsafe { CStr::from_ptr(socket) };
        HeapClient::connect_at(OsStr::from_bytes(path.to_bytes()).into(), node)
    };
    opened.inspect_err(|error| store_text(error)).ok()
}

/// Opens a heap; `socket` null: with the default agent. Returns null on failure.
///
/// # Safety
/// `socket` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_open(socket: *const c_char, node: u16) -> *mut CHeap {
    // SAFETY: the caller passes null or a C string.
    let client = unsafe { open_client(socket, node) };
    let open =
        |client| Box::into_raw(Box::new(CHeap { owner: std::process::id(), client: Mutex::new(client) }));
    client.map_or(std::ptr::null_mut(), open)
}

/// Closes a heap. Ignores null.
///
/// # Safety
/// `heap` is null, or was returned by [`aquifer_heap_open`] and is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_close(heap: *mut CHeap) {
    if !heap.is_null() {
        // SAFETY: the pointer is from `Box::into_raw`, and the caller does not use it any more.
        let heap = unsafe { Box::from_raw(heap) };
        if heap.owner != std::process::id() {
            // The connection belongs to the parent.
            std::mem::forget(heap);
        }
    }
}

/// Stores the pointer of a new object.
///
/// # Safety
/// `heap` is null or open; `pointer` is null or writable.
unsafe fn store_new(
    heap: *const CHeap,
    pointer: *mut CPointer,
    allocate: impl FnOnce(&mut HeapClient) -> Result<Pointer, ClientError>,
) -> c_int {
    if pointer.is_null() {
        return invalid_argument();
    }
    // SAFETY: the caller passes null or an open heap.
    let mut client = match unsafe { lock(heap) } {
        Ok(client) => client,
        Err(errno) => return errno,
    };
    value(allocate(&mut client).map(|allocated| {
        // SAFETY: the caller passes writable memory for it.
        unsafe { pointer.write(CPointer { words: allocated.words() }) };
        0
    }))
}

/// Runs a call on an object, and stores its corrected pointer.
///
/// # Safety
/// `heap` is null or open; `pointer` is null or readable and writable.
unsafe fn use_object(
    heap: *const CHeap,
    pointer: *mut CPointer,
    call: impl FnOnce(&mut HeapClient, &mut Pointer) -> Result<c_int, ClientError>,
) -> c_int {
    // SAFETY: the caller passes null or a pointer's words.
    let Some(mut object) = (unsafe { pointer_at(pointer) }) else { return invalid_argument() };
    // SAFETY: the caller passes null or an open heap.
    let mut client = match unsafe { lock(heap) } {
        Ok(client) => client,
        Err(errno) => return errno,
    };
    let outcome = call(&mut client, &mut object);
    // SAFETY: the pointer was read from this address, which the caller passes as writable.
    unsafe { pointer.write(CPointer { words: object.words() }) };
    value(outcome)
}

/// Returns the root object of the heap, which the first call allocates.
///
/// # Safety
/// `heap` is null or open; `pointer` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_root(heap: *const CHeap, bytes: u32, pointer: *mut CPointer) -> c_int {
    // SAFETY: the caller fulfils the same conditions.
    unsafe { store_new(heap, pointer, |client| client.root(bytes)) }
}

/// Allocates an object of zeros.
///
/// # Safety
/// `heap` is null or open; `pointer` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_allocate(
    heap: *const CHeap,
    bytes: u32,
    pointer: *mut CPointer,
) -> c_int {
    // SAFETY: the caller fulfils the same conditions.
    unsafe { store_new(heap, pointer, |client| client.allocate(bytes)) }
}

/// Allocates an object with the given bytes.
///
/// # Safety
/// `heap` is null or open; `from` is null or has `bytes` bytes; `pointer` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_create(
    heap: *const CHeap,
    from: *const c_void,
    bytes: usize,
    pointer: *mut CPointer,
) -> c_int {
    // SAFETY: the caller passes null or readable memory of that length.
    let Some(contents) = (unsafe { bytes_at(from, bytes) }) else { return invalid_argument() };
    // SAFETY: the caller fulfils the same conditions.
    unsafe { store_new(heap, pointer, |client| client.create(contents)) }
}

/// Frees an object.
///
/// # Safety
/// `heap` is null or open; `pointer` is null or readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_free(heap: *const CHeap, pointer: *const CPointer) -> c_int {
    // SAFETY: the caller passes null or a pointer's words.
    let Some(object) = (unsafe { pointer_at(pointer) }) else { return invalid_argument() };
    // SAFETY: the caller passes null or an open heap.
    match unsafe { lock(heap) } {
        Ok(mut client) => value(client.free(object).map(|()| 0)),
        Err(errno) => errno,
    }
}

/// Reads the first bytes of an object one-sidedly.
///
/// # Safety
/// `heap` is null or open; `pointer` is null or readable and writable; `out` is null or has room
/// for `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_get(
    heap: *const CHeap,
    pointer: *mut CPointer,
    out: *mut c_void,
    bytes: usize,
) -> c_int {
    // SAFETY: the caller passes null or room of that length.
    let Some(out) = (unsafe { buffer_at(out, bytes) }) else { return invalid_argument() };
    // SAFETY: the caller fulfils the same conditions.
    unsafe { use_object(heap, pointer, |client, object| client.get(object, out).map(|()| 0)) }
}

/// Reads the first bytes of several objects.
///
/// # Safety
/// `heap` is null or open; `jobs` is null or has `count` jobs, whose pointers are null or have room
/// for their bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_get_many(
    heap: *const CHeap,
    jobs: *mut CGetJob,
    count: usize,
) -> c_int {
    let is_possible = count == 0 || !jobs.is_null() && isize::try_from(count).is_ok();
    if !is_possible {
        return invalid_argument();
    }
    let mut reads = Vec::with_capacity(count);
    for at in 0..count {
        // SAFETY: the caller passes that number of jobs, each with its own room.
        let (object, out) = unsafe {
            let job = *jobs.add(at);
            (Pointer::from_words(job.pointer.words), buffer_at(job.out, job.bytes))
        };
        let (Some(object), Some(out)) = (object, out) else { return invalid_argument() };
        reads.push(DirectRead::new(object, out));
    }
    // SAFETY: the caller passes null or an open heap.
    let mut client = match unsafe { lock(heap) } {
        Ok(client) => client,
        Err(errno) => return errno,
    };
    let outcome = client.get_many(&mut reads);
    for (at, read) in reads.iter().enumerate() {
        // SAFETY: the caller passes that number of jobs.
        unsafe { (*jobs.add(at)).pointer = CPointer { words: read.pointer.words() } };
    }
    value(outcome.map(|()| 0))
}

/// Reads the first bytes of an object one-sidedly, without a retry.
///
/// # Safety
/// `heap` is null or open; `pointer` is null or readable; `out` is null or has room for `bytes`
/// bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_direct_read(
    heap: *const CHeap,
    pointer: *const CPointer,
    out: *mut c_void,
    bytes: usize,
) -> c_int {
    // SAFETY: the caller passes null or a pointer's words, and null or room of that length.
    let (object, out) = unsafe { (pointer_at(pointer), buffer_at(out, bytes)) };
    let (Some(object), Some(out)) = (object, out) else { return invalid_argument() };
    // SAFETY: the caller passes null or an open heap.
    let mut client = match unsafe { lock(heap) } {
        Ok(client) => client,
        Err(errno) => return errno,
    };
    value(client.direct_read(object, out).map(|verdict| match verdict {
        ReadVerdict::Valid => 0,
        ReadVerdict::Busy => errors::again(),
        ReadVerdict::Elsewhere => errors::stale(),
    }))
}

/// Reads the first bytes of an object by a request to the service.
///
/// # Safety
/// As for [`aquifer_heap_get`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_read(
    heap: *const CHeap,
    pointer: *mut CPointer,
    out: *mut c_void,
    bytes: usize,
) -> c_int {
    // SAFETY: the caller passes null or room of that length.
    let Some(out) = (unsafe { buffer_at(out, bytes) }) else { return invalid_argument() };
    // SAFETY: the caller fulfils the same conditions.
    unsafe { use_object(heap, pointer, |client, object| client.read(object, out).map(c_int::from)) }
}

/// Replaces the first bytes of an object.
///
/// # Safety
/// `heap` is null or open; `pointer` is null or readable and writable; `from` is null or has
/// `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_write(
    heap: *const CHeap,
    pointer: *mut CPointer,
    from: *const c_void,
    bytes: usize,
) -> c_int {
    // SAFETY: the caller passes null or readable memory of that length.
    let Some(contents) = (unsafe { bytes_at(from, bytes) }) else { return invalid_argument() };
    // SAFETY: the caller fulfils the same conditions.
    unsafe { use_object(heap, pointer, |client, object| client.write(object, contents).map(c_int::from)) }
}

/// Replaces bytes of an object from an offset on.
///
/// # Safety
/// As for [`aquifer_heap_write`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_write_at(
    heap: *const CHeap,
    pointer: *mut CPointer,
    offset: u32,
    from: *const c_void,
    bytes: usize,
) -> c_int {
    // SAFETY: the caller passes null or readable memory of that length.
    let contents = unsafe { bytes_at(from, bytes) }.filter(|_| offset.is_multiple_of(8));
    let Some(contents) = contents else { return invalid_argument() };
    let call = |client: &mut HeapClient, object: &mut Pointer| {
        client.write_at(object, offset, contents).map(c_int::from)
    };
    // SAFETY: the caller fulfils the same conditions.
    unsafe { use_object(heap, pointer, call) }
}

/// Replaces the first bytes of an object if the first word is `expected`.
///
/// # Safety
/// As for [`aquifer_heap_write`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_write_if(
    heap: *const CHeap,
    pointer: *mut CPointer,
    expected: u64,
    from: *const c_void,
    bytes: usize,
) -> c_int {
    // SAFETY: the caller passes null or readable memory of that length.
    let Some(contents) = (unsafe { bytes_at(from, bytes) }) else { return invalid_argument() };
    let call = |client: &mut HeapClient, object: &mut Pointer| {
        client.write_if(object, expected, contents).map(c_int::from)
    };
    // SAFETY: the caller fulfils the same conditions.
    unsafe { use_object(heap, pointer, call) }
}

/// Replaces an old pointer by one with the object's current address.
///
/// # Safety
/// `heap` is null or open; `pointer` is null or readable and writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_release(heap: *const CHeap, pointer: *mut CPointer) -> c_int {
    // SAFETY: the caller fulfils the same conditions.
    unsafe { use_object(heap, pointer, |client, object| client.release(object).map(|()| 0)) }
}
