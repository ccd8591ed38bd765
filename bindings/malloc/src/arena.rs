//! The range of addresses from which all is handed out.

use core::ffi::CStr;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering::Relaxed};

use libmimalloc_sys::{
    mi_manage_os_memory_ex, mi_option_get, mi_option_limit_os_alloc, mi_option_set, mi_option_t,
};

/// Addresses cost nothing. Where memory is not overcommitted, less must do.
const RANGES_BYTES: [usize; 6] = [1 << 40, 1 << 38, 1 << 36, 1 << 34, 1 << 32, 1 << 30];
/// mimalloc's segments are aligned to 32 MiB.
const ALIGN_BYTES: usize = 32 << 20;
/// Nothing that others map must become one area with the range.
const GUARD_BYTES: usize = 4096;
/// [`aquifer_ipc::LOCAL_VARIABLE`], for libc.
const VARIABLE: &CStr = c"AQUIFER_LOCAL";
/// How much memory mimalloc reserves ahead, in KiB: an option that its crate does not name.
const ARENA_RESERVE: mi_option_t = 23;

static IS_PREPARED: AtomicBool = AtomicBool::new(false);
static START: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);
/// What that option was, before it was set.
static RESERVE_KIB: AtomicI64 = AtomicI64::new(i64::MIN);

/// Called before anything is handed out: the first caller decides where all comes from. That may be
/// before the dynamic linker has come to this library's own start.
#[inline]
pub fn prepare() {
    if !IS_PREPARED.load(Relaxed) {
        decide();
    }
}

/// The range, if the environment asks for one; `None` if it could not be had.
pub fn range() -> Option<(usize, usize)> {
    prepare();
    let (start, end) = (START.load(Relaxed), END.load(Relaxed));
    (start < end).then_some((start, end))
}

/// Whether the environment asks for paged memory. A program that changes its user when it starts
/// does not listen to whoever started it.
pub fn is_wanted() -> bool {
    // SAFETY: reads what the kernel has told the process, and the environment, which does not
    // change while there is one thread.
    unsafe { libc::getauxval(libc::AT_SECURE) == 0 && !libc::getenv(VARIABLE.as_ptr()).is_null() }
}

/// There is no second thread yet. Nothing here may allocate.
#[cold]
fn decide() {
    // SAFETY: numbers of options that there are; libc's own variable.
    unsafe {
        if libc::environ.is_null() {
            // Too early to know. No large piece of ordinary memory is to be reserved, from which
            // all later requests would be served, too.
            if RESERVE_KIB.load(Relaxed) == i64::MIN {
                RESERVE_KIB.store(mi_option_get(ARENA_RESERVE), Relaxed);
            }
            mi_option_set(ARENA_RESERVE, 0);
            return;
        }
        IS_PREPARED.store(true, Relaxed);
        if is_wanted() {
            reserve();
        } else if RESERVE_KIB.load(Relaxed) != i64::MIN {
            mi_option_set(ARENA_RESERVE, RESERVE_KIB.load(Relaxed));
        }
    }
}

/// From now on all comes from a fresh range.
fn reserve() {
    let found = RANGES_BYTES.into_iter().find_map(|bytes| map(bytes).map(|start| (start, bytes)));
    let Some((start, bytes)) = found else { return };
    let mut id = 0;
    // SAFETY: the range is our own fresh memory, zero, aligned as wanted, and stays mapped. Then
    // the number of an option that there is.
    let is_taken = unsafe {
        mi_option_set(mi_option_limit_os_alloc, 1);
        // Else a full range would be followed by ordinary memory.
        mi_option_set(ARENA_RESERVE, 0);
        mi_manage_os_memory_ex(start as *const _, bytes, true, false, true, -1, false, &raw mut id)
    };
    if is_taken {
        START.store(start, Relaxed);
        END.store(start + bytes, Relaxed);
    }
}

/// Map so many bytes, with inaccessible memory on both sides.
fn map(bytes: usize) -> Option<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let all = bytes + ALIGN_BYTES + GUARD_BYTES;
    // SAFETY: a fresh mapping at an address of the kernel's choice; its inner part is made
    // accessible, or all is unmapped again.
    unsafe {
        let address = libc::mmap(null_mut(), all, libc::PROT_NONE, flags, -1, 0);
        if address == libc::MAP_FAILED {
            return None;
        }
        let start = (address as usize + GUARD_BYTES).next_multiple_of(ALIGN_BYTES);
        if libc::mprotect(start as *mut _, bytes, libc::PROT_READ | libc::PROT_WRITE) == 0 {
            return Some(start);
        }
        libc::munmap(address, all);
    }
    None
}
