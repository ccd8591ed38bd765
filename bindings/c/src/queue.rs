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
    /// The caller's arguments of the operations whose completion was not taken, by operation.
    pending: Mutex<HashMap<u64, PendingOperation>>,
}

#[derive(Debug)]
struct PendingOperation {
    user: u64,
    /// The address and the length of the buffer for the bytes that are read.
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
        // Locked before the operation begins, so that its completion finds the entry.
        let mut pending = self.pending.lock();
        match self.queue.begin(operation) {
            Ok(id) => {
                pending.insert(id, PendingOperation { user, out });
                0
            }
            Err(_) => errors::queue_full(),
        }
    }

    /// Converts the completion of an operation for the caller, and copies the bytes that were read.
    ///
    /// # Safety
    /// The buffers of all reads whose completion was not taken are writable.
    unsafe fn finish(&self, end: OperationCompletion) -> Option<CEnd> {
        let PendingOperation { user, out: (buffer, len) } = self.pending.lock().remove(&end.id)?;
        Some(match end.result {
            Ok(done) => {
                let bytes = done.bytes.len().min(len);
                // SAFETY: the caller keeps the buffers of reads until their completion is taken.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        done.bytes.as_ptr(),
                        std::ptr::with_exposed_provenance_mut::<u8>(buffer),
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

/// Returns the queue at an address. Returns the negative errno if it is null or belongs to another
/// process.
///
/// # Safety
/// `queue` is null or open.
unsafe fn opened<'a>(queue: *const CQueue) -> Result<&'a CQueue, c_int> {
    // SAFETY: the caller passes null or an open queue.
    let queue = unsafe { queue.as_ref() }.ok_or_else(invalid_argument)?;
    if queue.owner == std::process::id() { Ok(queue) } else { Err(errors::forked()) }
}

/// Begins an operation; `None` stands for an invalid argument.
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
            let queue = CQueue { owner: std::process::id(), queue, pending: Mutex::default() };
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
            // The thread and the connection belong to the parent.
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

/// Takes the completions of operations, and waits for the first one.
///
/// # Safety
/// `queue` is null or open; `ends` is null or has room for `max` completions. The buffers of all
/// reads whose completion was not taken are writable.
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
        // SAFETY: the caller keeps the buffers of reads.
        if let Some(end) = unsafe { queue.finish(end) } {
            // SAFETY: the caller has room for `max` completions.
            unsafe { ends.add(count).write(end) };
            count += 1;
        }
    }
    c_int::try_from(count).unwrap_or(c_int::MAX)
}

/// Returns a descriptor that is readable while there are completions to take.
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
