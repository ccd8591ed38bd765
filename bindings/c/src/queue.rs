//! Queues of operations on heaps for C. `aquifer_heap.h` documents the functions.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use aquifer_objects::client::queue::{HeapQueue, Operation, OperationCompletion};
use parking_lot::Mutex;

use crate::errors::{self, heap_errno, invalid_argument, store_text};
use crate::heap::{CPointer, bytes_at, open_client, pointer_at};

/// `aquifer_heap_queue`.
#[derive(Debug)]
pub struct CQueue {
    /// The process that opened the queue: see [`crate::CSession`].
    owner: u32,
    queue: HeapQueue,
    /// What the caller has given with the operations that have not ended.
    begun: Mutex<HashMap<u64, Begun>>,
}

#[derive(Debug)]
struct Begun {
    user: u64,
    /// The address of the room for what is read, and its length.
    out: (usize, usize),
}

/// `aquifer_heap_end`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CEnd {
    user: u64,
    pointer: CPointer,
    value: c_int,
}

impl CQueue {
    fn begin(&self, user: u64, operation: Operation, out: (usize, usize)) -> c_int {
        // Locked before, so that its end is not taken before it is known.
        let mut begun = self.begun.lock();
        match self.queue.begin(operation) {
            Ok(id) => {
                begun.insert(id, Begun { user, out });
                0
            }
            Err(_) => errors::queue_full(),
        }
    }

    /// The end of an operation for the caller. Copies what was read.
    ///
    /// # Safety
    /// The room of all reads that have not ended is writable.
    unsafe fn finish(&self, end: OperationCompletion) -> Option<CEnd> {
        let Begun { user, out: (room, len) } = self.begun.lock().remove(&end.id)?;
        Some(match end.result {
            Ok(done) => {
                let bytes = done.bytes.len().min(len);
                // SAFETY: the caller keeps the room of reads until their end is taken.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        done.bytes.as_ptr(),
                        std::ptr::with_exposed_provenance_mut::<u8>(room),
                        bytes,
                    );
                }
                let pointer = CPointer { words: done.pointer.words() };
                CEnd { user, pointer, value: c_int::from(done.is_old) }
            }
            Err(error) => {
                store_text(&error);
                CEnd { user, pointer: CPointer { words: [0; 2] }, value: -heap_errno(&error) }
            }
        })
    }
}

/// The queue; `Err` with the error number if it is null or belongs to another process.
///
/// # Safety
/// `queue` is null or open.
unsafe fn opened<'a>(queue: *const CQueue) -> Result<&'a CQueue, c_int> {
    // SAFETY: the caller passes null or an open queue.
    let queue = unsafe { queue.as_ref() }.ok_or_else(invalid_argument)?;
    if queue.owner == std::process::id() { Ok(queue) } else { Err(errors::forked()) }
}

/// Begins an operation; `None` is an invalid argument.
///
/// # Safety
/// `queue` is null or open.
unsafe fn begin(queue: *const CQueue, user: u64, operation: Option<Operation>) -> c_int {
    // SAFETY: the caller passes null or an open queue.
    match (unsafe { opened(queue) }, operation) {
        (Ok(queue), Some(operation)) => queue.begin(user, operation, (0, 0)),
        (Ok(_), None) => invalid_argument(),
        (Err(errno), _) => errno,
    }
}

/// Opens a heap for operations with completions. Returns null on failure.
///
/// # Safety
/// `socket` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_queue_open(socket: *const c_char, node: u16) -> *mut CQueue {
    // SAFETY: the caller passes null or a C string.
    let Some(client) = (unsafe { open_client(socket, node) }) else { return std::ptr::null_mut() };
    match HeapQueue::new(client) {
        Ok(queue) => {
            let queue = CQueue { owner: std::process::id(), queue, begun: Mutex::default() };
            Box::into_raw(Box::new(queue))
        }
        Err(error) => {
            store_text(&error);
            std::ptr::null_mut()
        }
    }
}

/// Closes a queue. Ignores null.
///
/// # Safety
/// `queue` is null, or was returned by [`aquifer_heap_queue_open`] and is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_queue_close(queue: *mut CQueue) {
    if !queue.is_null() {
        // SAFETY: the pointer is from `Box::into_raw`, and the caller does not use it any more.
        let queue = unsafe { Box::from_raw(queue) };
        if queue.owner != std::process::id() {
            // The thread and the connection are the parent's.
            std::mem::forget(queue);
        }
    }
}

/// Begins to allocate an object, all zeros.
///
/// # Safety
/// `queue` is null or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_begin_allocate(queue: *const CQueue, bytes: u32, user: u64) -> c_int {
    // SAFETY: the caller passes null or an open queue.
    unsafe { begin(queue, user, Some(Operation::Allocate(bytes))) }
}

/// Begins to allocate an object with these bytes.
///
/// # Safety
/// `queue` is null or open; `from` is null or has `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_begin_create(
    queue: *const CQueue,
    from: *const c_void,
    bytes: usize,
    user: u64,
) -> c_int {
    // SAFETY: the caller passes null or readable memory of that length, and null or an open queue.
    unsafe { begin(queue, user, bytes_at(from, bytes).map(|bytes| Operation::Create(bytes.to_vec()))) }
}

/// Begins to free an object.
///
/// # Safety
/// `queue` is null or open; `pointer` is null or readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_begin_free(
    queue: *const CQueue,
    pointer: *const CPointer,
    user: u64,
) -> c_int {
    // SAFETY: the caller passes null or a pointer's words, and null or an open queue.
    unsafe { begin(queue, user, pointer_at(pointer).map(Operation::Free)) }
}

/// Begins to read the first bytes of an object.
///
/// # Safety
/// `queue` is null or open; `pointer` is null or readable; `out` is null or has room for `bytes`
/// bytes until the operation has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_begin_get(
    queue: *const CQueue,
    pointer: *const CPointer,
    out: *mut c_void,
    bytes: usize,
    user: u64,
) -> c_int {
    // SAFETY: the caller passes null or a pointer's words, and null or an open queue.
    let (queue, pointer) = unsafe { (opened(queue), pointer_at(pointer)) };
    let is_possible = (bytes == 0 || !out.is_null()) && isize::try_from(bytes).is_ok();
    match (queue, pointer.filter(|_| is_possible)) {
        (Ok(queue), Some(pointer)) => {
            queue.begin(user, Operation::Get(pointer, bytes), (out.expose_provenance(), bytes))
        }
        (Ok(_), None) => invalid_argument(),
        (Err(errno), _) => errno,
    }
}

/// Begins to replace the first bytes of an object.
///
/// # Safety
/// `queue` is null or open; `pointer` is null or readable; `from` is null or has `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_begin_write(
    queue: *const CQueue,
    pointer: *const CPointer,
    from: *const c_void,
    bytes: usize,
    user: u64,
) -> c_int {
    // SAFETY: the caller passes null or a pointer's words, null or readable memory of that length,
    // and null or an open queue.
    unsafe {
        let operation = pointer_at(pointer).zip(bytes_at(from, bytes));
        begin(queue, user, operation.map(|(pointer, bytes)| Operation::Write(pointer, bytes.to_vec())))
    }
}

/// Begins to replace an old pointer.
///
/// # Safety
/// `queue` is null or open; `pointer` is null or readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_begin_release(
    queue: *const CQueue,
    pointer: *const CPointer,
    user: u64,
) -> c_int {
    // SAFETY: the caller passes null or a pointer's words, and null or an open queue.
    unsafe { begin(queue, user, pointer_at(pointer).map(Operation::Release)) }
}

/// Takes the ends of operations, and waits for the first.
///
/// # Safety
/// `queue` is null or open; `ends` is null or has room for `max` ends. The room of all reads that
/// have not ended is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_wait(
    queue: *const CQueue,
    ends: *mut CEnd,
    max: usize,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller passes null or an open queue.
    let queue = match unsafe { opened(queue) } {
        Ok(_) if ends.is_null() && max > 0 => return invalid_argument(),
        Ok(queue) => queue,
        Err(errno) => return errno,
    };
    let timeout = u64::try_from(timeout_ms).map_or(Duration::MAX, Duration::from_millis);
    let mut count = 0;
    while count < max.min(c_int::MAX as usize) {
        let end = if count == 0 { queue.queue.wait(timeout) } else { queue.queue.poll() };
        let Some(end) = end else { break };
        // SAFETY: the caller keeps the room of reads.
        if let Some(end) = unsafe { queue.finish(end) } {
            // SAFETY: the caller has room for `max` ends.
            unsafe { ends.add(count).write(end) };
            count += 1;
        }
    }
    c_int::try_from(count).unwrap_or(c_int::MAX)
}

/// A descriptor that is readable while there are ends to take.
///
/// # Safety
/// `queue` is null or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_heap_queue_fd(queue: *const CQueue) -> c_int {
    // SAFETY: the caller passes null or an open queue.
    match unsafe { opened(queue) } {
        Ok(queue) => queue.queue.as_fd().as_raw_fd(),
        Err(errno) => errno,
    }
}
