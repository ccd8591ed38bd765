//! libaquifer: the client library for C. `aquifer.h`, `aquifer_heap.h` and
//! `aquifer_segments.h` document the functions.
//!
//! Pointers from C are checked for null. The caller must fulfil the header's other requirements.

mod containers;
mod errors;
#[cfg(test)]
mod golden_tests;
pub mod heap;
pub mod queue;
pub mod segments;

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use aquifer_client::{Error, Extent, ReadJob, Session, Statistics, WriteJob};
use errors::{invalid_argument, return_value, store_text};
use parking_lot::{Mutex, MutexGuard};

/// `aquifer_session`.
#[derive(Debug)]
pub struct CSession {
    /// The process that opened the session. It is compared before the lock is taken, because
    /// another thread may have held the lock when a child was forked.
    owner: u32,
    session: Mutex<Session>,
}

/// `aquifer_extent`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CExtent {
    addr: u64,
    bytes: u64,
    key: u32,
    node: u16,
    zero: u16,
}

impl From<Extent> for CExtent {
    fn from(extent: Extent) -> Self {
        Self { addr: extent.addr(), bytes: extent.bytes(), key: extent.key(), node: extent.node(), zero: 0 }
    }
}

impl CExtent {
    fn extent(self) -> Result<Extent, Error> {
        Extent::from_parts(self.node, self.addr, self.key, self.bytes)
    }
}

/// Opens a session; `socket` null: with the default agent. Returns null on failure.
///
/// # Safety
/// `socket` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_open(socket: *const c_char) -> *mut CSession {
    let opened = if socket.is_null() {
        Session::open()
    } else {
        // SAFETY: the caller passes a C string.
        let path = unsafe { CStr::from_ptr(socket) };
        Session::open_at(Path::new(OsStr::from_bytes(path.to_bytes())))
    };
    match opened {
        Ok(session) => {
            Box::into_raw(Box::new(CSession { owner: std::process::id(), session: Mutex::new(session) }))
        }
        Err(error) => {
            store_text(&error);
            std::ptr::null_mut()
        }
    }
}

/// Frees all extents of a session and ends it. Ignores null.
///
/// # Safety
/// `session` is null, or was returned by [`aquifer_open`] and is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_close(session: *mut CSession) {
    if !session.is_null() {
        // SAFETY: the pointer is from `Box::into_raw`, and the caller does not use it any more.
        drop(unsafe { Box::from_raw(session) });
    }
}

/// Allocates an extent.
///
/// # Safety
/// `session` is null or open; `extent` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_allocate(
    session: *const CSession,
    bytes: u64,
    extent: *mut CExtent,
) -> c_int {
    // SAFETY: the caller fulfils the same conditions.
    unsafe { aquifer_allocate_many(session, bytes, 1, extent) }
}

/// Allocates `count` extents, or none.
///
/// # Safety
/// `session` is null or open; `extents` is null or has room for `count` extents.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_allocate_many(
    session: *const CSession,
    bytes: u64,
    count: usize,
    extents: *mut CExtent,
) -> c_int {
    if extents.is_null() {
        return invalid_argument();
    }
    // SAFETY: the caller passes null or an open session.
    let mut session = match unsafe { lock(session) } {
        Ok(session) => session,
        Err(errno) => return errno,
    };
    let allocated = session.allocate_many(bytes, count);
    return_value(allocated.map(|allocated| {
        for (at, extent) in allocated.into_iter().enumerate() {
            // SAFETY: the caller has room for `count` extents, and no more were allocated.
            unsafe { extents.add(at).write(extent.into()) };
        }
    }))
}

/// Frees an extent.
///
/// # Safety
/// `session` is null or open; `extent` is null or points to an extent.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_free(session: *const CSession, extent: *const CExtent) -> c_int {
    // SAFETY: the caller fulfils the same conditions.
    unsafe { aquifer_free_many(session, extent, 1) }
}

/// Frees `count` extents.
///
/// # Safety
/// `session` is null or open; `extents` is null or points to `count` extents.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_free_many(
    session: *const CSession,
    extents: *const CExtent,
    count: usize,
) -> c_int {
    if extents.is_null() {
        return invalid_argument();
    }
    // SAFETY: the caller passes null or an open session.
    let mut session = match unsafe { lock(session) } {
        Ok(session) => session,
        Err(errno) => return errno,
    };
    // SAFETY: the caller passes `count` extents.
    let extents: Result<Vec<Extent>, Error> =
        (0..count).map(|at| unsafe { extents.add(at).read() }.extent()).collect();
    return_value(extents.and_then(|extents| session.free_many(&extents)))
}

/// Reads `bytes` bytes at `offset` of an extent into `out`.
///
/// # Safety
/// `session` is null or open; `extent` is null or points to an extent; `out` is null or has room
/// for `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_read(
    session: *const CSession,
    extent: *const CExtent,
    offset: u64,
    out: *mut c_void,
    bytes: usize,
) -> c_int {
    if extent.is_null() || out.is_null() || bytes > isize::MAX.unsigned_abs() {
        return invalid_argument();
    }
    // SAFETY: the caller passes null or an open session.
    let mut session = match unsafe { lock(session) } {
        Ok(session) => session,
        Err(errno) => return errno,
    };
    // SAFETY: the caller passes an extent.
    let extent = unsafe { extent.read() }.extent();
    // SAFETY: the caller has room for `bytes` bytes and does not use them during the call. They are
    // written before they are read.
    let out = unsafe { std::slice::from_raw_parts_mut(out.cast::<u8>(), bytes) };
    return_value(extent.and_then(|extent| session.read(&extent, offset, out)))
}

/// Writes `bytes` bytes of `from` at `offset` of an extent.
///
/// # Safety
/// `session` is null or open; `extent` is null or points to an extent; `from` is null or points to
/// `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_write(
    session: *const CSession,
    extent: *const CExtent,
    offset: u64,
    from: *const c_void,
    bytes: usize,
) -> c_int {
    if extent.is_null() || from.is_null() || bytes > isize::MAX.unsigned_abs() {
        return invalid_argument();
    }
    // SAFETY: the caller passes null or an open session.
    let mut session = match unsafe { lock(session) } {
        Ok(session) => session,
        Err(errno) => return errno,
    };
    // SAFETY: the caller passes an extent.
    let extent = unsafe { extent.read() }.extent();
    // SAFETY: the caller passes `bytes` bytes and does not change them during the call.
    let from = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) };
    return_value(extent.and_then(|extent| session.write(&extent, offset, from)))
}

/// `aquifer_read_job`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CReadJob {
    extent: CExtent,
    offset: u64,
    out: *mut c_void,
    bytes: usize,
}

/// `aquifer_write_job`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CWriteJob {
    extent: CExtent,
    offset: u64,
    from: *const c_void,
    bytes: usize,
}

/// Carries out `count` reads.
///
/// # Safety
/// `session` is null or open; `jobs` is null or points to `count` jobs, each with room for its
/// bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_read_many(
    session: *const CSession,
    jobs: *const CReadJob,
    count: usize,
) -> c_int {
    if jobs.is_null() {
        return invalid_argument();
    }
    // SAFETY: the caller passes `count` jobs.
    let jobs = (0..count).map(|at| unsafe { jobs.add(at).read() });
    if jobs.clone().any(|job| job.out.is_null() || job.bytes > isize::MAX.unsigned_abs()) {
        return invalid_argument();
    }
    // SAFETY: the caller passes null or an open session.
    let mut session = match unsafe { lock(session) } {
        Ok(session) => session,
        Err(errno) => return errno,
    };
    let jobs: Result<Vec<ReadJob<'_>>, Error> = jobs
        .map(|CReadJob { extent, offset, out, bytes }| {
            // SAFETY: the caller has room for `bytes` bytes and does not use them during the call.
            // They are written before they are read.
            let out = unsafe { std::slice::from_raw_parts_mut(out.cast::<u8>(), bytes) };
            Ok(ReadJob { extent: extent.extent()?, offset, out })
        })
        .collect();
    return_value(jobs.and_then(|mut jobs| session.read_many(&mut jobs)))
}

/// Carries out `count` writes.
///
/// # Safety
/// `session` is null or open; `jobs` is null or points to `count` jobs, each with its bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_write_many(
    session: *const CSession,
    jobs: *const CWriteJob,
    count: usize,
) -> c_int {
    if jobs.is_null() {
        return invalid_argument();
    }
    // SAFETY: the caller passes `count` jobs.
    let jobs = (0..count).map(|at| unsafe { jobs.add(at).read() });
    if jobs.clone().any(|job| job.from.is_null() || job.bytes > isize::MAX.unsigned_abs()) {
        return invalid_argument();
    }
    // SAFETY: the caller passes null or an open session.
    let mut session = match unsafe { lock(session) } {
        Ok(session) => session,
        Err(errno) => return errno,
    };
    let jobs: Result<Vec<WriteJob<'_>>, Error> = jobs
        .map(|CWriteJob { extent, offset, from, bytes }| {
            // SAFETY: the caller passes `bytes` bytes and does not change them during the call.
            let bytes = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) };
            Ok(WriteJob { extent: extent.extent()?, offset, bytes })
        })
        .collect();
    return_value(jobs.and_then(|jobs| session.write_many(&jobs)))
}

/// `aquifer_statistics`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CStatistics {
    bytes: u64,
    allocated: u64,
    freed: u64,
    read_bytes: u64,
    written_bytes: u64,
    requests: u64,
    sleeps: u64,
}

/// Stores the statistics of a session.
///
/// # Safety
/// `session` is null or open; `statistics` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_get_statistics(
    session: *const CSession,
    statistics: *mut CStatistics,
) -> c_int {
    if statistics.is_null() {
        return invalid_argument();
    }
    // SAFETY: the caller passes null or an open session.
    let session = match unsafe { lock(session) } {
        Ok(session) => session,
        Err(errno) => return errno,
    };
    let Statistics { bytes, allocated, freed, read_bytes, written_bytes, requests, sleeps } =
        session.statistics();
    let c_statistics = CStatistics { bytes, allocated, freed, read_bytes, written_bytes, requests, sleeps };
    // SAFETY: the caller passes writable memory for it.
    unsafe { statistics.write(c_statistics) };
    0
}

/// Returns the text of this thread's last error, cut to 1,023 bytes. The text changes at the next
/// error; the memory is valid until the thread ends.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_error() -> *const c_char {
    errors::last_text()
}

/// Locks a session for this thread. Returns the error number if the session is null or belongs to
/// another process.
///
/// # Safety
/// `session` is null or open.
unsafe fn lock<'a>(session: *const CSession) -> Result<MutexGuard<'a, Session>, c_int> {
    // SAFETY: the caller passes null or an open session.
    let session = unsafe { session.as_ref() }.ok_or_else(invalid_argument)?;
    if session.owner != std::process::id() {
        return Err(return_value(Err(Error::Forked)));
    }
    Ok(session.session.lock())
}
