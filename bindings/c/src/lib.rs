//! libaquifer: the client for C. `aquifer.h` is its documentation.
//!
//! All unsafe code is here: what C hands over is checked for null and otherwise trusted to be what the header asks for.

mod errors;
#[cfg(test)]
mod golden_tests;

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use aquifer_client::{Error, Extent, ReadJob, Session, Statistics, WriteJob};
use errors::{explain, result};

/// `aquifer_session`.
#[derive(Debug)]
pub struct CSession {
    /// The process that opened it. Looked at before the lock, which another thread may have held when a child was forked.
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
        Extent::named(self.node, self.addr, self.key, self.bytes)
    }
}

/// See the header.
///
/// # Safety
/// `socket` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_open(socket: *const c_char) -> *mut CSession {
    let opened = if socket.is_null() {
        Session::open()
    } else {
        // SAFETY: the caller hands over a C string.
        let path = unsafe { CStr::from_ptr(socket) };
        Session::open_at(Path::new(OsStr::from_bytes(path.to_bytes())))
    };
    match opened {
        Ok(session) => {
            Box::into_raw(Box::new(CSession { owner: std::process::id(), session: Mutex::new(session) }))
        }
        Err(error) => {
            explain(&error);
            std::ptr::null_mut()
        }
    }
}

/// See the header.
///
/// # Safety
/// `session` is null, or of [`aquifer_open`] and not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_close(session: *mut CSession) {
    if !session.is_null() {
        // SAFETY: it came from `Box::into_raw`, and the caller does not use it any more.
        drop(unsafe { Box::from_raw(session) });
    }
}

/// See the header.
///
/// # Safety
/// `session` is null or open; `extent` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_allocate(
    session: *const CSession,
    bytes: u64,
    extent: *mut CExtent,
) -> c_int {
    // SAFETY: as this function's.
    unsafe { aquifer_allocate_many(session, bytes, 1, extent) }
}

/// See the header.
///
/// # Safety
/// `session` is null or open; `extents` is null or has room for `count`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_allocate_many(
    session: *const CSession,
    bytes: u64,
    count: usize,
    extents: *mut CExtent,
) -> c_int {
    if extents.is_null() {
        return errors::null();
    }
    // SAFETY: the caller's session is open.
    let mut session = match unsafe { lock(session) } {
        Ok(session) => session,
        Err(refused) => return refused,
    };
    let taken = session.allocate_many(bytes, count);
    result(taken.map(|taken| {
        for (at, extent) in taken.into_iter().enumerate() {
            // SAFETY: the caller has room for `count`, and so many were taken.
            unsafe { extents.add(at).write(extent.into()) };
        }
    }))
}

/// See the header.
///
/// # Safety
/// `session` is null or open; `extent` is null or an extent.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_free(session: *const CSession, extent: *const CExtent) -> c_int {
    // SAFETY: as this function's.
    unsafe { aquifer_free_many(session, extent, 1) }
}

/// See the header.
///
/// # Safety
/// `session` is null or open; `extents` is null or has `count` extents.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_free_many(
    session: *const CSession,
    extents: *const CExtent,
    count: usize,
) -> c_int {
    if extents.is_null() {
        return errors::null();
    }
    // SAFETY: the caller's session is open.
    let mut session = match unsafe { lock(session) } {
        Ok(session) => session,
        Err(refused) => return refused,
    };
    // SAFETY: the caller has so many there.
    let extents: Result<Vec<Extent>, Error> =
        (0..count).map(|at| unsafe { extents.add(at).read() }.extent()).collect();
    result(extents.and_then(|extents| session.free_many(&extents)))
}

/// See the header.
///
/// # Safety
/// `session` is null or open; `extent` is null or an extent; `out` is null or has room for `bytes`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_read(
    session: *const CSession,
    extent: *const CExtent,
    offset: u64,
    out: *mut c_void,
    bytes: usize,
) -> c_int {
    if extent.is_null() || out.is_null() || bytes > isize::MAX.unsigned_abs() {
        return errors::null();
    }
    // SAFETY: the caller's session is open.
    let mut session = match unsafe { lock(session) } {
        Ok(session) => session,
        Err(refused) => return refused,
    };
    // SAFETY: the caller has an extent there.
    let extent = unsafe { extent.read() }.extent();
    // SAFETY: the caller has room for so many, which nobody else uses meanwhile; they are written before they are read.
    let out = unsafe { std::slice::from_raw_parts_mut(out.cast::<u8>(), bytes) };
    result(extent.and_then(|extent| session.read(&extent, offset, out)))
}

/// See the header.
///
/// # Safety
/// `session` is null or open; `extent` is null or an extent; `from` is null or has `bytes`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_write(
    session: *const CSession,
    extent: *const CExtent,
    offset: u64,
    from: *const c_void,
    bytes: usize,
) -> c_int {
    if extent.is_null() || from.is_null() || bytes > isize::MAX.unsigned_abs() {
        return errors::null();
    }
    // SAFETY: the caller's session is open.
    let mut session = match unsafe { lock(session) } {
        Ok(session) => session,
        Err(refused) => return refused,
    };
    // SAFETY: the caller has an extent there.
    let extent = unsafe { extent.read() }.extent();
    // SAFETY: the caller has so many there, which nobody changes meanwhile.
    let from = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) };
    result(extent.and_then(|extent| session.write(&extent, offset, from)))
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

/// See the header.
///
/// # Safety
/// `session` is null or open; `jobs` is null or has `count` jobs, of which each has room for its bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_read_many(
    session: *const CSession,
    jobs: *const CReadJob,
    count: usize,
) -> c_int {
    if jobs.is_null() {
        return errors::null();
    }
    // SAFETY: the caller has so many there.
    let jobs = (0..count).map(|at| unsafe { jobs.add(at).read() });
    if jobs.clone().any(|job| job.out.is_null() || job.bytes > isize::MAX.unsigned_abs()) {
        return errors::null();
    }
    // SAFETY: the caller's session is open.
    let mut session = match unsafe { lock(session) } {
        Ok(session) => session,
        Err(refused) => return refused,
    };
    let jobs: Result<Vec<ReadJob<'_>>, Error> = jobs
        .map(|CReadJob { extent, offset, out, bytes }| {
            // SAFETY: the caller has room for so many, which nobody else uses meanwhile; they are written before they are read.
            let out = unsafe { std::slice::from_raw_parts_mut(out.cast::<u8>(), bytes) };
            Ok(ReadJob { extent: extent.extent()?, offset, out })
        })
        .collect();
    result(jobs.and_then(|mut jobs| session.read_many(&mut jobs)))
}

/// See the header.
///
/// # Safety
/// `session` is null or open; `jobs` is null or has `count` jobs, of which each has its bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_write_many(
    session: *const CSession,
    jobs: *const CWriteJob,
    count: usize,
) -> c_int {
    if jobs.is_null() {
        return errors::null();
    }
    // SAFETY: the caller has so many there.
    let jobs = (0..count).map(|at| unsafe { jobs.add(at).read() });
    if jobs.clone().any(|job| job.from.is_null() || job.bytes > isize::MAX.unsigned_abs()) {
        return errors::null();
    }
    // SAFETY: the caller's session is open.
    let mut session = match unsafe { lock(session) } {
        Ok(session) => session,
        Err(refused) => return refused,
    };
    let jobs: Result<Vec<WriteJob<'_>>, Error> = jobs
        .map(|CWriteJob { extent, offset, from, bytes }| {
            // SAFETY: the caller has so many there, which nobody changes meanwhile.
            let bytes = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) };
            Ok(WriteJob { extent: extent.extent()?, offset, bytes })
        })
        .collect();
    result(jobs.and_then(|jobs| session.write_many(&jobs)))
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

/// See the header.
///
/// # Safety
/// `session` is null or open; `statistics` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_get_statistics(
    session: *const CSession,
    statistics: *mut CStatistics,
) -> c_int {
    if statistics.is_null() {
        return errors::null();
    }
    // SAFETY: the caller's session is open.
    let session = match unsafe { lock(session) } {
        Ok(session) => session,
        Err(refused) => return refused,
    };
    let Statistics { bytes, allocated, freed, read_bytes, written_bytes, requests, sleeps } =
        session.statistics();
    let found = CStatistics { bytes, allocated, freed, read_bytes, written_bytes, requests, sleeps };
    // SAFETY: the caller has room for it.
    unsafe { statistics.write(found) };
    0
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_error() -> *const c_char {
    errors::last()
}

/// The session, for this thread alone; or what the function is to return.
///
/// # Safety
/// `session` is null or open.
unsafe fn lock<'a>(session: *const CSession) -> Result<MutexGuard<'a, Session>, c_int> {
    // SAFETY: the caller says so.
    let session = unsafe { session.as_ref() }.ok_or_else(errors::null)?;
    if session.owner != std::process::id() {
        return Err(result(Err(Error::Forked)));
    }
    Ok(session.session.lock().unwrap_or_else(PoisonError::into_inner))
}
