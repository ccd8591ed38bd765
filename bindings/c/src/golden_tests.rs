//! Golden ABI: the C compiler's layout of `aquifer.h`, Rust's layout and the golden file agree.
//! A changed golden file needs a line in CHANGELOG, because programs must be compiled again.

use std::ffi::{c_char, c_int, c_void};
use std::process::Command;

use aquifer_client::{Error, MAX_EXTENT_BYTES, NoAgent};
use aquifer_containers::HeapFault;
use aquifer_objects::class::OBJECT_BYTES_MAX;
use aquifer_objects::client::ClientError;
use aquifer_objects::wire::Refused;
use aquifer_tests_support::{golden, golden_layout};

use crate::errors::{containers_errno, heap_errno, return_value};
use crate::heap::{CGetJob, CPointer};
use crate::segments::{self, CEvent, CStatus};
use crate::{CExtent, CReadJob, CStatistics, CWriteJob};

/// The C program that prints the lines of the golden file. Does not compile if a function has
/// another type.
const PROGRAM: &str = r#"
#include <stdio.h>
#include "aquifer.h"
#include "aquifer_heap.h"
#include "aquifer_segments.h"

aquifer_process *aquifer_process_open(const char *, const char *);
int aquifer_process_close(aquifer_process *);
int aquifer_segment_allocate(aquifer_process *, uint64_t, uint64_t, aquifer_segment **);
int aquifer_segment_receive(aquifer_process *, int, uint64_t, aquifer_segment **);
uint64_t aquifer_segment_id(const aquifer_segment *);
void *aquifer_segment_address(const aquifer_segment *);
size_t aquifer_segment_bytes(const aquifer_segment *);
int aquifer_segment_connect(aquifer_segment *, const char *);
int aquifer_segment_abort(aquifer_segment *);
int aquifer_segment_transfer(aquifer_segment *);
int aquifer_segment_pull(aquifer_segment *, uint64_t, uint64_t);
int aquifer_segment_close(aquifer_segment *);
int aquifer_segment_deallocate(aquifer_segment *);
int aquifer_segment_sync(aquifer_segment *, unsigned);
int aquifer_segment_revert(aquifer_segment *);
int aquifer_segment_give_up(aquifer_segment *);
int aquifer_segment_sync_and_transfer(aquifer_segment *, unsigned);
int aquifer_segment_restore(aquifer_process *, uint64_t, uint64_t, aquifer_segment **);
int aquifer_process_next_event(aquifer_process *, int, uint64_t, aquifer_event *);
int aquifer_segment_list(aquifer_process *, aquifer_segment_status *, size_t);
aquifer_heap *aquifer_heap_open(const char *, uint16_t);
void aquifer_heap_close(aquifer_heap *);
int aquifer_heap_root(aquifer_heap *, uint32_t, aquifer_pointer *);
int aquifer_heap_allocate(aquifer_heap *, uint32_t, aquifer_pointer *);
int aquifer_heap_create(aquifer_heap *, const void *, size_t, aquifer_pointer *);
int aquifer_heap_free(aquifer_heap *, const aquifer_pointer *);
int aquifer_heap_get(aquifer_heap *, aquifer_pointer *, void *, size_t);
int aquifer_heap_get_many(aquifer_heap *, aquifer_get_job *, size_t);
int aquifer_heap_direct_read(aquifer_heap *, const aquifer_pointer *, void *, size_t);
int aquifer_heap_read(aquifer_heap *, aquifer_pointer *, void *, size_t);
int aquifer_heap_write(aquifer_heap *, aquifer_pointer *, const void *, size_t);
int aquifer_heap_write_at(aquifer_heap *, aquifer_pointer *, uint32_t, const void *, size_t);
int aquifer_heap_write_if(aquifer_heap *, aquifer_pointer *, uint64_t, const void *, size_t);
int aquifer_heap_release(aquifer_heap *, aquifer_pointer *);
aquifer_session *aquifer_open(const char *);
void aquifer_close(aquifer_session *);
int aquifer_allocate(aquifer_session *, uint64_t, aquifer_extent *);
int aquifer_allocate_many(aquifer_session *, uint64_t, size_t, aquifer_extent *);
int aquifer_free(aquifer_session *, const aquifer_extent *);
int aquifer_free_many(aquifer_session *, const aquifer_extent *, size_t);
int aquifer_read(aquifer_session *, const aquifer_extent *, uint64_t, void *, size_t);
int aquifer_write(aquifer_session *, const aquifer_extent *, uint64_t, const void *, size_t);
int aquifer_read_many(aquifer_session *, const aquifer_read_job *, size_t);
int aquifer_write_many(aquifer_session *, const aquifer_write_job *, size_t);
int aquifer_get_statistics(aquifer_session *, aquifer_statistics *);
const char *aquifer_error(void);

#define HEAD(type) printf(#type ": %zu bytes, aligned to %zu, fields at", sizeof(type), _Alignof(type))
#define FIELD(type, field) printf(" %zu", offsetof(type, field))
#define JOB(type, buffer) \
    HEAD(type), FIELD(type, extent), FIELD(type, offset), FIELD(type, buffer), FIELD(type, bytes), puts("")

int main(void) {
    HEAD(aquifer_extent);
    FIELD(aquifer_extent, addr), FIELD(aquifer_extent, bytes), FIELD(aquifer_extent, key);
    FIELD(aquifer_extent, node), FIELD(aquifer_extent, zero), puts("");
    JOB(aquifer_read_job, out);
    JOB(aquifer_write_job, from);
    HEAD(aquifer_statistics);
    FIELD(aquifer_statistics, bytes), FIELD(aquifer_statistics, allocated), FIELD(aquifer_statistics, freed);
    FIELD(aquifer_statistics, read_bytes), FIELD(aquifer_statistics, written_bytes);
    FIELD(aquifer_statistics, requests), FIELD(aquifer_statistics, sleeps), puts("");
    HEAD(aquifer_pointer), FIELD(aquifer_pointer, words), puts("");
    HEAD(aquifer_get_job), FIELD(aquifer_get_job, pointer), FIELD(aquifer_get_job, out);
    FIELD(aquifer_get_job, bytes), puts("");
    HEAD(aquifer_segment_status), FIELD(aquifer_segment_status, id), FIELD(aquifer_segment_status, address);
    FIELD(aquifer_segment_status, bytes), FIELD(aquifer_segment_status, missing_bytes);
    FIELD(aquifer_segment_status, process), puts("");
    HEAD(aquifer_event), FIELD(aquifer_event, segment), FIELD(aquifer_event, id);
    FIELD(aquifer_event, process), puts("");
    printf("AQUIFER_EXTENT_BYTES_MAX: %llu\n", AQUIFER_EXTENT_BYTES_MAX);
    printf("AQUIFER_OBJECT_BYTES_MAX: %u\n", AQUIFER_OBJECT_BYTES_MAX);
}
"#;

#[test]
fn golden_types_in_c_and_in_rust() {
    let mut ours = golden!("abi");
    golden_layout!(ours, "aquifer_extent", CExtent { addr, bytes, key, node, zero });
    golden_layout!(ours, "aquifer_read_job", CReadJob { extent, offset, out, bytes });
    golden_layout!(ours, "aquifer_write_job", CWriteJob { extent, offset, from, bytes });
    golden_layout!(
        ours,
        "aquifer_statistics",
        CStatistics { bytes, allocated, freed, read_bytes, written_bytes, requests, sleeps }
    );
    golden_layout!(ours, "aquifer_pointer", CPointer { words });
    golden_layout!(ours, "aquifer_get_job", CGetJob { pointer, out, bytes });
    golden_layout!(ours, "aquifer_segment_status", CStatus { id, address, bytes, missing_bytes, process });
    golden_layout!(ours, "aquifer_event", CEvent { segment, id, process });
    ours.text("AQUIFER_EXTENT_BYTES_MAX", &MAX_EXTENT_BYTES.to_string());
    ours.text("AQUIFER_OBJECT_BYTES_MAX", &OBJECT_BYTES_MAX.to_string());
    ours.check();

    let folder = tempfile::tempdir().expect("there is room for a folder");
    let (source, program) = (folder.path().join("abi.c"), folder.path().join("abi"));
    std::fs::write(&source, PROGRAM).expect("there is room");
    let include = concat!("-I", env!("CARGO_MANIFEST_DIR"));
    let built = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", include, "-o"])
        .args([&program, &source])
        .status();
    assert!(built.expect("there is a C compiler").success());
    let output = Command::new(program).output().expect("the program was just built");
    let mut theirs = golden!("abi");
    theirs.lines(std::str::from_utf8(&output.stdout).expect("the program prints ASCII"));
    theirs.check();
}

/// The functions by their symbol names.
mod symbols {
    use super::{CExtent, CGetJob, CPointer, CReadJob, CStatistics, CWriteJob, c_char, c_int, c_void};
    unsafe extern "C" {
        pub fn aquifer_open(socket: *const c_char) -> *mut c_void;
        pub fn aquifer_close(session: *mut c_void);
        pub fn aquifer_allocate(session: *const c_void, bytes: u64, extent: *mut CExtent) -> c_int;
        pub fn aquifer_allocate_many(s: *const c_void, bytes: u64, count: usize, e: *mut CExtent) -> c_int;
        pub fn aquifer_free(session: *const c_void, extent: *const CExtent) -> c_int;
        pub fn aquifer_free_many(session: *const c_void, e: *const CExtent, count: usize) -> c_int;
        pub fn aquifer_read(
            s: *const c_void,
            e: *const CExtent,
            offset: u64,
            out: *mut c_void,
            bytes: usize,
        ) -> c_int;
        pub fn aquifer_write(
            s: *const c_void,
            e: *const CExtent,
            offset: u64,
            from: *const c_void,
            bytes: usize,
        ) -> c_int;
        pub fn aquifer_read_many(session: *const c_void, jobs: *const CReadJob, count: usize) -> c_int;
        pub fn aquifer_write_many(session: *const c_void, jobs: *const CWriteJob, count: usize) -> c_int;
        pub fn aquifer_get_statistics(session: *const c_void, statistics: *mut CStatistics) -> c_int;
        pub fn aquifer_error() -> *const c_char;
        pub fn aquifer_heap_open(socket: *const c_char, node: u16) -> *mut c_void;
        pub fn aquifer_heap_close(heap: *mut c_void);
        pub fn aquifer_heap_root(heap: *const c_void, bytes: u32, p: *mut CPointer) -> c_int;
        pub fn aquifer_heap_allocate(heap: *const c_void, bytes: u32, p: *mut CPointer) -> c_int;
        pub fn aquifer_heap_create(
            heap: *const c_void,
            from: *const c_void,
            bytes: usize,
            p: *mut CPointer,
        ) -> c_int;
        pub fn aquifer_heap_free(heap: *const c_void, p: *const CPointer) -> c_int;
        pub fn aquifer_heap_get(h: *const c_void, p: *mut CPointer, out: *mut c_void, bytes: usize) -> c_int;
        pub fn aquifer_heap_get_many(heap: *const c_void, jobs: *mut CGetJob, count: usize) -> c_int;
        pub fn aquifer_heap_direct_read(
            heap: *const c_void,
            p: *const CPointer,
            out: *mut c_void,
            bytes: usize,
        ) -> c_int;
        pub fn aquifer_heap_read(h: *const c_void, p: *mut CPointer, out: *mut c_void, bytes: usize)
        -> c_int;
        pub fn aquifer_heap_write(
            heap: *const c_void,
            p: *mut CPointer,
            from: *const c_void,
            bytes: usize,
        ) -> c_int;
        pub fn aquifer_heap_write_at(
            heap: *const c_void,
            p: *mut CPointer,
            offset: u32,
            from: *const c_void,
            bytes: usize,
        ) -> c_int;
        pub fn aquifer_heap_write_if(
            heap: *const c_void,
            p: *mut CPointer,
            expected: u64,
            from: *const c_void,
            bytes: usize,
        ) -> c_int;
        pub fn aquifer_heap_release(heap: *const c_void, p: *mut CPointer) -> c_int;
    }
}

#[test]
fn functions_of_segments_accept_null() {
    use std::ptr::null_mut as null;
    let einval = -22;
    // SAFETY: each function accepts null pointers.
    unsafe {
        assert!(segments::aquifer_process_open(null(), null()).is_null());
        assert!(segments::aquifer_process_open(c"/nowhere/agent.sock".as_ptr(), c"p".as_ptr()).is_null());
        assert_eq!(segments::aquifer_process_close(null()), 0);
        assert_eq!(segments::aquifer_segment_allocate(null(), 1, 4096, null()), einval);
        assert_eq!(segments::aquifer_segment_receive(null(), 0, 0, null()), einval);
        assert_eq!(segments::aquifer_segment_id(null()), 0);
        assert!(segments::aquifer_segment_address(null()).is_null());
        assert_eq!(segments::aquifer_segment_bytes(null()), 0);
        assert_eq!(segments::aquifer_segment_connect(null(), null()), einval);
        assert_eq!(segments::aquifer_segment_connect(null(), c"p".as_ptr()), einval);
        assert_eq!(segments::aquifer_segment_abort(null()), einval);
        assert_eq!(segments::aquifer_segment_transfer(null()), einval);
        assert_eq!(segments::aquifer_segment_pull(null(), 0, 0), einval);
        assert_eq!(segments::aquifer_segment_close(null()), einval);
        assert_eq!(segments::aquifer_segment_deallocate(null()), einval);
        assert_eq!(segments::aquifer_segment_list(null(), null(), 0), einval);
    }
}

#[test]
fn golden_symbols() {
    use symbols as c;
    let null = std::ptr::null_mut();
    let einval = -22;
    // SAFETY: each function accepts null pointers.
    unsafe {
        assert!(c::aquifer_open(c"/nowhere/agent.sock".as_ptr()).is_null());
        c::aquifer_close(null);
        assert_eq!(c::aquifer_allocate(null, 1, null.cast()), einval);
        assert_eq!(c::aquifer_allocate_many(null, 1, 1, null.cast()), einval);
        assert_eq!(c::aquifer_free(null, null.cast()), einval);
        assert_eq!(c::aquifer_free_many(null, null.cast(), 1), einval);
        assert_eq!(c::aquifer_read(null, null.cast(), 0, null.cast(), 1), einval);
        assert_eq!(c::aquifer_write(null, null.cast(), 0, null.cast(), 1), einval);
        assert_eq!(c::aquifer_read_many(null, null.cast(), 1), einval);
        assert_eq!(c::aquifer_write_many(null, null.cast(), 1), einval);
        assert_eq!(c::aquifer_get_statistics(null, null.cast()), einval);
        let error = c::aquifer_error();
        let first = std::ffi::CStr::from_ptr(error).to_owned();
        assert!(!first.is_empty());
        assert!(c::aquifer_open(c"/nowhere/agent.sock".as_ptr()).is_null());
        assert_eq!(c::aquifer_error(), error, "the text has the same address");
        assert_ne!(std::ffi::CStr::from_ptr(error), first.as_c_str());
        assert!(c::aquifer_heap_open(c"/nowhere/agent.sock".as_ptr(), 0).is_null());
        c::aquifer_heap_close(null);
        assert_eq!(c::aquifer_heap_root(null, 1, null.cast()), einval);
        assert_eq!(c::aquifer_heap_allocate(null, 1, null.cast()), einval);
        assert_eq!(c::aquifer_heap_create(null, null, 1, null.cast()), einval);
        assert_eq!(c::aquifer_heap_free(null, null.cast()), einval);
        assert_eq!(c::aquifer_heap_get(null, null.cast(), null, 1), einval);
        assert_eq!(c::aquifer_heap_get_many(null, null.cast(), 1), einval);
        assert_eq!(c::aquifer_heap_direct_read(null, null.cast(), null, 1), einval);
        assert_eq!(c::aquifer_heap_read(null, null.cast(), null, 1), einval);
        assert_eq!(c::aquifer_heap_write(null, null.cast(), null, 1), einval);
        assert_eq!(c::aquifer_heap_write_at(null, null.cast(), 0, null, 1), einval);
        assert_eq!(c::aquifer_heap_write_if(null, null.cast(), 0, null, 1), einval);
        assert_eq!(c::aquifer_heap_release(null, null.cast()), einval);
    }
}

#[test]
fn golden_errors() {
    let mut golden = golden!("errors");
    let failed = || std::io::Error::from(std::io::ErrorKind::Other);
    let errors = [
        ("no agent", NoAgent { path: "socket".into(), source: failed() }.into()),
        ("refused", Error::Refused(String::new())),
        ("no memory", Error::Io(failed())),
        ("ended", Error::SessionEnded(String::new())),
        ("agent gone", Error::AgentGone),
        ("forked", Error::Forked),
        ("size", Error::Size { bytes: 0 }),
        ("out of range", Error::OutOfRange { offset: 0, len: 0, bytes: 0 }),
        ("pool full", Error::PoolFull),
        ("quota", Error::QuotaExceeded),
        ("too many", Error::TooManyExtents),
        ("not yours", Error::AccessDenied),
        ("too many wrong keys", Error::TooManyWrongKeys),
        ("lost", Error::DataLost),
        ("failed", Error::Failed),
    ];
    for (name, error) in errors {
        golden.text(name, &return_value(Err(error)).to_string());
    }
    let errors = [
        ("no object", ClientError::Refused(Refused::NoObject)),
        ("heap full", ClientError::Refused(Refused::Full)),
        ("too large", ClientError::Refused(Refused::TooLarge)),
        ("busy", ClientError::Refused(Refused::Busy)),
        ("changed", ClientError::Refused(Refused::Changed)),
        ("invalid", ClientError::Refused(Refused::Invalid)),
        ("closed", ClientError::Refused(Refused::Closed)),
        ("silent", ClientError::Timeout),
        ("invalid answer", ClientError::Answer),
    ];
    for (name, error) in errors {
        golden.text(name, &(-heap_errno(&error)).to_string());
    }
    let errors = [
        ("no containers", HeapFault::NoContainers),
        ("other containers", HeapFault::Mismatch { found: String::new(), expected: String::new() }),
        ("too small", HeapFault::TooSmall { bytes: 0 }),
        ("long description", HeapFault::LongDescription { bytes: 0 }),
    ];
    for (name, error) in errors {
        golden.text(name, &(-containers_errno(&error)).to_string());
    }
    golden.check();
}
