//! Segments for C. `aquifer_segments.h` documents the functions.

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use aquifer_client::segments::{Error, Event, Process, Pulling, Segment, TransferFailure};

use crate::errors::{self, invalid_argument, segment_errno, store_text};

/// `aquifer_process`.
#[derive(Debug)]
pub struct CProcess {
    /// The process that has opened the name: see [`crate::CSession`].
    owner: u32,
    process: Process,
    /// Number of segments that were not consumed.
    segments: AtomicUsize,
}

/// `aquifer_segment`.
#[derive(Debug)]
pub struct CSegment {
    process: &'static CProcess,
    pub(crate) segment: Segment<'static>,
}

/// `aquifer_segment_status`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CStatus {
    pub(crate) id: u64,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) missing_bytes: u64,
    pub(crate) process: [c_char; 72],
}

/// `aquifer_event`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CEvent {
    pub(crate) segment: *mut CSegment,
    pub(crate) id: u64,
    pub(crate) process: [c_char; 72],
}

/// Returns a name as a zero-terminated array, cut to 71 bytes.
fn name_of(name: &str) -> [c_char; 72] {
    let mut chars: [c_char; 72] = [0; 72];
    for (to, from) in chars.iter_mut().zip(name.bytes().take(71)) {
        *to = from.cast_signed();
    }
    chars
}

/// The return value of a call: a number that is not negative, or a negative errno.
fn value(outcome: Result<c_int, Error>) -> c_int {
    outcome.unwrap_or_else(|error| {
        store_text(&error);
        -segment_errno(&error)
    })
}

/// Returns a C string as a text; `None` if it is null, or not UTF-8.
///
/// # Safety
/// `text` is null or a C string.
pub(crate) unsafe fn text<'a>(text: *const c_char) -> Option<&'a str> {
    // SAFETY: the caller passes a C string.
    if text.is_null() { None } else { unsafe { CStr::from_ptr(text) }.to_str().ok() }
}

/// Opens this process under a name. Returns null on failure.
///
/// # Safety
/// `socket` and `name` are null or C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_process_open(socket: *const c_char, name: *const c_char) -> *mut CProcess {
    // SAFETY: the caller passes null or a C string.
    let Some(name) = (unsafe { text(name) }) else {
        invalid_argument();
        return std::ptr::null_mut();
    };
    let opened = if socket.is_null() {
        Process::open(name)
    } else {
        // SAFETY: the caller passes a C string.
        let path = unsafe { CStr::from_ptr(socket) };
        Process::open_at(Path::new(OsStr::from_bytes(path.to_bytes())), name)
    };
    match opened {
        Ok(process) => {
            let owner = std::process::id();
            Box::into_raw(Box::new(CProcess { owner, process, segments: AtomicUsize::new(0) }))
        }
        Err(error) => {
            store_text(&error);
            std::ptr::null_mut()
        }
    }
}

/// Closes a process: frees its name. Fails if it has segments.
///
/// # Safety
/// `process` is null, or was returned by [`aquifer_process_open`] and is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_process_close(process: *mut CProcess) -> c_int {
    // SAFETY: the caller passes null or an open process.
    let Some(open) = (unsafe { process.as_ref() }) else { return 0 };
    if open.owner != std::process::id() {
        return errors::forked();
    }
    if open.segments.load(Ordering::SeqCst) > 0 {
        return errors::busy();
    }
    // SAFETY: the pointer is from `Box::into_raw`, no segment refers to it, and the caller does not
    // use it any more.
    drop(unsafe { Box::from_raw(process) });
    0
}

/// Returns the process at an address. Returns the negative errno if the process or the other
/// arguments are not valid.
///
/// # Safety
/// `process` is null or open.
unsafe fn open_process(process: *const CProcess, are_valid: bool) -> Result<&'static CProcess, c_int> {
    // SAFETY: the process is not freed before it is closed, which fails while a segment refers to
    // it.
    let process = unsafe { process.as_ref() }.filter(|_| are_valid).ok_or_else(invalid_argument)?;
    if process.owner == std::process::id() { Ok(process) } else { Err(errors::forked()) }
}

/// Returns the segment at an address. Returns the negative errno if it is not valid.
///
/// # Safety
/// `segment` is null, or was not consumed.
pub(crate) unsafe fn open_segment<'a>(segment: *const CSegment) -> Result<&'a CSegment, c_int> {
    // SAFETY: the caller passes null or a segment.
    let segment = unsafe { segment.as_ref() }.ok_or_else(invalid_argument)?;
    if segment.process.owner == std::process::id() { Ok(segment) } else { Err(errors::forked()) }
}

/// Stores a segment that the process has received in `out`.
///
/// # Safety
/// `out` is writable.
unsafe fn store(process: &'static CProcess, segment: Segment<'static>, out: *mut *mut CSegment) {
    process.segments.fetch_add(1, Ordering::SeqCst);
    // SAFETY: the caller passes writable memory for a pointer.
    unsafe { out.write(Box::into_raw(Box::new(CSegment { process, segment }))) };
}

/// Allocates a segment.
///
/// # Safety
/// `process` is null or open; `segment` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_allocate(
    process: *const CProcess,
    id: u64,
    bytes: u64,
    segment: *mut *mut CSegment,
) -> c_int {
    // SAFETY: the caller passes null or an open process.
    let process = match unsafe { open_process(process, !segment.is_null()) } {
        Ok(process) => process,
        Err(errno) => return errno,
    };
    value(process.process.allocate(id, bytes).map(|allocated| {
        // SAFETY: the place is not null, so the caller has made it writable.
        unsafe { store(process, allocated, segment) };
        0
    }))
}

/// Waits for a segment.
///
/// # Safety
/// `process` is null or open; `segment` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_receive(
    process: *const CProcess,
    pulling: c_int,
    timeout_ms: u64,
    segment: *mut *mut CSegment,
) -> c_int {
    // SAFETY: the caller passes null or an open process.
    let process = match unsafe { open_process(process, !segment.is_null()) } {
        Ok(process) => process,
        Err(errno) => return errno,
    };
    let Some(pulling) = pulling_of(pulling) else { return invalid_argument() };
    value(process.process.receive(pulling, Duration::from_millis(timeout_ms)).map(
        |received| match received {
            None => 0,
            Some(received) => {
                // SAFETY: the place is not null, so the caller has made it writable.
                unsafe { store(process, received, segment) };
                1
            }
        },
    ))
}

/// Converts the value of an `AQUIFER_PULL_` constant.
fn pulling_of(number: c_int) -> Option<Pulling> {
    match number {
        0 => Some(Pulling::Ahead),
        1 => Some(Pulling::Explicit),
        2 => Some(Pulling::OnTouch),
        _ => None,
    }
}

/// Waits for a segment, or for a request to hand one over.
///
/// # Safety
/// `process` is null or open; `event` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_process_next_event(
    process: *const CProcess,
    pulling: c_int,
    timeout_ms: u64,
    event: *mut CEvent,
) -> c_int {
    // SAFETY: the caller passes null or an open process.
    let process = match unsafe { open_process(process, !event.is_null()) } {
        Ok(process) => process,
        Err(errno) => return errno,
    };
    let Some(pulling) = pulling_of(pulling) else { return invalid_argument() };
    value(process.process.next_event(pulling, Duration::from_millis(timeout_ms)).map(|found| {
        let (id, name) = match &found {
            None => return 0,
            Some(Event::Arrived(segment)) => (segment.id(), String::new()),
            Some(Event::Asked { id, process }) => (*id, process.clone()),
        };
        // SAFETY: the place is not null, so the caller has made it writable, with a field for the
        // segment.
        unsafe {
            event.write(CEvent { segment: std::ptr::null_mut(), id, process: name_of(&name) });
            if let Some(Event::Arrived(segment)) = found {
                store(process, segment, &raw mut (*event).segment);
            }
        }
        1
    }))
}

/// Restores a segment.
///
/// # Safety
/// `process` is null or open; `segment` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_restore(
    process: *const CProcess,
    id: u64,
    timeout_ms: u64,
    segment: *mut *mut CSegment,
) -> c_int {
    // SAFETY: the caller passes null or an open process.
    let process = match unsafe { open_process(process, !segment.is_null()) } {
        Ok(process) => process,
        Err(errno) => return errno,
    };
    match process.process.restore(id, Duration::from_millis(timeout_ms)) {
        Ok(restored) => {
            // SAFETY: the place is not null, so the caller has made it writable.
            unsafe { store(process, restored, segment) };
            1
        }
        Err(Error::Owned(_)) => 0,
        Err(error) => value(Err(error)),
    }
}

/// Returns the number of a segment.
///
/// # Safety
/// `segment` was not consumed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_id(segment: *const CSegment) -> u64 {
    // SAFETY: the caller passes a segment.
    unsafe { segment.as_ref() }.map_or(0, |segment| segment.segment.id())
}

/// Returns the first address of a segment.
///
/// # Safety
/// `segment` was not consumed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_address(segment: *const CSegment) -> *mut c_void {
    // SAFETY: the caller passes a segment.
    let address = unsafe { segment.as_ref() }.map_or(0, |segment| segment.segment.address());
    std::ptr::with_exposed_provenance_mut(address)
}

/// Returns the length of a segment in bytes.
///
/// # Safety
/// `segment` was not consumed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_bytes(segment: *const CSegment) -> usize {
    // SAFETY: the caller passes a segment.
    unsafe { segment.as_ref() }.map_or(0, |segment| segment.segment.bytes())
}

/// Calls a function of a segment, and converts its result.
///
/// # Safety
/// `segment` is null, or was not consumed.
unsafe fn call(segment: *const CSegment, call: impl FnOnce(&Segment<'static>) -> Result<(), Error>) -> c_int {
    // SAFETY: the caller passes null or a segment.
    match unsafe { open_segment(segment) } {
        Ok(segment) => value(call(&segment.segment).map(|()| 0)),
        Err(errno) => errno,
    }
}

/// Prepares a hand-over.
///
/// # Safety
/// `segment` is null, or was not consumed; `process` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_connect(segment: *const CSegment, process: *const c_char) -> c_int {
    // SAFETY: the caller passes null or a C string.
    let Some(process) = (unsafe { text(process) }) else { return invalid_argument() };
    // SAFETY: the caller passes null or a segment.
    unsafe { call(segment, |segment| segment.connect(process)) }
}

/// Cancels [`aquifer_segment_connect`].
///
/// # Safety
/// `segment` is null, or was not consumed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_abort(segment: *const CSegment) -> c_int {
    // SAFETY: the caller passes null or a segment.
    unsafe { call(segment, Segment::abort) }
}

/// Pulls the missing pages of a range.
///
/// # Safety
/// `segment` is null, or was not consumed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_pull(segment: *const CSegment, offset: u64, bytes: u64) -> c_int {
    // SAFETY: the caller passes null or a segment.
    unsafe { call(segment, |segment| segment.pull(offset, bytes)) }
}

/// Waits until all pages are present.
///
/// # Safety
/// `segment` is null, or was not consumed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_close(segment: *const CSegment) -> c_int {
    // SAFETY: the caller passes null or a segment.
    unsafe { call(segment, Segment::close) }
}

/// Discards all missing pages.
///
/// # Safety
/// `segment` is null, or was not consumed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_discard(segment: *const CSegment) -> c_int {
    // SAFETY: the caller passes null or a segment.
    unsafe { call(segment, Segment::discard) }
}

/// Moves out a segment that a call consumes.
///
/// # Safety
/// `segment` is null, or was not consumed.
unsafe fn move_out(segment: *mut CSegment) -> Result<(&'static CProcess, Segment<'static>), c_int> {
    // SAFETY: the caller passes null or a segment.
    unsafe { open_segment(segment) }?;
    // SAFETY: the pointer is from `Box::into_raw`. The fields are moved out once, and the memory
    // is freed by the caller of this function, or used for them again.
    let CSegment { process, segment } = unsafe { segment.read() };
    Ok((process, segment))
}

/// Frees the memory of a segment whose fields were moved out.
///
/// # Safety
/// [`move_out`] has moved the fields out.
unsafe fn free(segment: *mut CSegment, process: &CProcess) {
    // SAFETY: the pointer is from `Box::into_raw`, and `ManuallyDrop` has the same layout and drops
    // nothing.
    drop(unsafe { Box::from_raw(segment.cast::<ManuallyDrop<CSegment>>()) });
    process.segments.fetch_sub(1, Ordering::SeqCst);
}

/// Hands a segment over.
///
/// # Safety
/// `segment` is null, or was not consumed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_transfer(segment: *mut CSegment) -> c_int {
    // SAFETY: the caller passes null or a segment.
    unsafe { transfer_by(segment, Segment::transfer) }
}

/// Syncs a segment and hands it over.
///
/// # Safety
/// `segment` is null, or was not consumed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_sync_and_transfer(segment: *mut CSegment, copies: c_uint) -> c_int {
    // SAFETY: the caller passes null or a segment.
    unsafe { transfer_by(segment, |owned| owned.sync_and_transfer(copies_of(copies)).map(drop)) }
}

fn copies_of(copies: c_uint) -> usize {
    usize::try_from(copies).unwrap_or(usize::MAX)
}

/// Calls a function of a segment that changes its bytes, or reads all of them.
///
/// # Safety
/// `segment` is null, or was not consumed, and no other call uses it.
unsafe fn call_alone(
    segment: *mut CSegment,
    call: impl FnOnce(&mut Segment<'static>) -> Result<(), Error>,
) -> c_int {
    // SAFETY: the caller passes null or a segment.
    if let Err(errno) = unsafe { open_segment(segment) } {
        return errno;
    }
    // SAFETY: the segment is valid, and the caller guarantees that nothing else refers to it.
    value(call(unsafe { &mut (*segment).segment }).map(|()| 0))
}

/// Writes the changed bytes of a segment to its copies.
///
/// # Safety
/// `segment` is null, or was not consumed, and no other call uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_sync(segment: *mut CSegment, copies: c_uint) -> c_int {
    // SAFETY: the caller fulfils the same conditions.
    unsafe { call_alone(segment, |segment| segment.sync(copies_of(copies)).map(drop)) }
}

/// Restores the bytes of the last sync.
///
/// # Safety
/// `segment` is null, or was not consumed, and no other call uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_revert(segment: *mut CSegment) -> c_int {
    // SAFETY: the caller fulfils the same conditions.
    unsafe { call_alone(segment, Segment::revert) }
}

/// Hands a segment over by a function that consumes it.
///
/// # Safety
/// `segment` is null, or was not consumed.
unsafe fn transfer_by(
    segment: *mut CSegment,
    transfer: impl FnOnce(Segment<'static>) -> Result<(), TransferFailure<'static>>,
) -> c_int {
    // SAFETY: the caller passes null or a segment.
    let (process, owned) = match unsafe { move_out(segment) } {
        Ok(moved) => moved,
        Err(errno) => return errno,
    };
    match transfer(owned) {
        Err(TransferFailure { segment: Some(kept), error }) => {
            // SAFETY: the memory is still this segment's, and its fields were moved out.
            unsafe { segment.write(CSegment { process, segment: kept }) };
            store_text(&error);
            errors::still_owned()
        }
        outcome => {
            // SAFETY: the fields were moved out.
            unsafe { free(segment, process) };
            value(outcome.map(|()| 0).map_err(|failure| failure.error))
        }
    }
}

/// Calls a function of a segment that consumes it, also if the function fails.
///
/// # Safety
/// `segment` is null, or was not consumed.
unsafe fn consume_by(
    segment: *mut CSegment,
    call: impl FnOnce(Segment<'static>) -> Result<(), Error>,
) -> c_int {
    // SAFETY: the caller passes null or a segment.
    let (process, owned) = match unsafe { move_out(segment) } {
        Ok(moved) => moved,
        Err(errno) => return errno,
    };
    let outcome = call(owned);
    // SAFETY: the fields were moved out.
    unsafe { free(segment, process) };
    value(outcome.map(|()| 0))
}

/// Frees a segment.
///
/// # Safety
/// `segment` is null, or was not consumed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_deallocate(segment: *mut CSegment) -> c_int {
    // SAFETY: the caller passes null or a segment.
    unsafe { consume_by(segment, Segment::deallocate) }
}

/// Releases a segment, and keeps its copies.
///
/// # Safety
/// `segment` is null, or was not consumed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_give_up(segment: *mut CSegment) -> c_int {
    // SAFETY: the caller passes null or a segment.
    unsafe { consume_by(segment, Segment::give_up) }
}

/// Lists the user's segments on this host.
///
/// # Safety
/// `process` is null or open; `list` is null or has room for `count`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_segment_list(
    process: *const CProcess,
    list: *mut CStatus,
    count: usize,
) -> c_int {
    // SAFETY: the caller passes null or an open process.
    let process = match unsafe { open_process(process, !list.is_null() || count == 0) } {
        Ok(process) => process,
        Err(errno) => return errno,
    };
    value(process.process.list().map(|found| {
        for (at, status) in found.iter().take(count).enumerate() {
            let (id, address, bytes) = (status.id, status.address, status.bytes);
            let process = name_of(&status.process);
            let status = CStatus { id, address, bytes, missing_bytes: status.missing_bytes, process };
            // SAFETY: the caller has room for `count`, and `at` is less.
            unsafe { list.add(at).write(status) };
        }
        c_int::try_from(found.len()).unwrap_or(c_int::MAX)
    }))
}
