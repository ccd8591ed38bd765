//! The arena: the range of addresses from which all memory is allocated.

use core::ffi::CStr;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering::Relaxed};

use libmimalloc_sys::{
    mi_manage_os_memory_ex, mi_option_get, mi_option_limit_os_alloc, mi_option_set, mi_option_t,
};

/// Sizes of the arena in bytes, which are tried in turn. Reserved addresses use no memory, but
/// systems without overcommit refuse large ranges.
const RANGES_BYTES: [usize; 6] = [1 << 40, 1 << 38, 1 << 36, 1 << 34, 1 << 32, 1 << 30];
/// Alignment of mimalloc's segments in bytes.
const ALIGN_BYTES: usize = 32 << 20;
/// Length in bytes of the inaccessible memory on both sides of the arena, which prevents that the
/// kernel merges the arena with other mappings.
const GUARD_BYTES: usize = 4096;
/// [`aquifer_ipc::LOCAL_VARIABLE`], for libc.
const VARIABLE: &CStr = c"AQUIFER_LOCAL";
/// The option of mimalloc for the memory in KiB that it reserves ahead. The crate has no constant
/// for it.
const ARENA_RESERVE: mi_option_t = 23;

static IS_PREPARED: AtomicBool = AtomicBool::new(false);
static START: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);
/// Value of the option [`ARENA_RESERVE`] before it was changed; `i64::MIN` if it was not.
static RESERVE_KIB: AtomicI64 = AtomicI64::new(i64::MIN);

/// Must be called before each allocation: the first call decides whether memory comes from the
/// arena.
///
/// The first call may happen before the dynamic linker calls this library's `start`.
#[inline]
pub fn prepare() {
    if !IS_PREPARED.load(Relaxed) {
        decide();
    }
}

/// Start and end of the arena; `None` if paging is not requested, or the arena could not be
/// reserved.
pub fn range() -> Option<(usize, usize)> {
    prepare();
    let (start, end) = (START.load(Relaxed), END.load(Relaxed));
    (start < end).then_some((start, end))
}

/// Whether the environment requests paging. A set-user-ID or set-group-ID program ignores the
/// variable.
pub fn is_wanted() -> bool {
    // SAFETY: reads the auxiliary vector, and the environment, which does not change while there is
    // one thread.
    unsafe { libc::getauxval(libc::AT_SECURE) == 0 && !libc::getenv(VARIABLE.as_ptr()).is_null() }
}

/// Reserves the arena if paging is requested.
///
/// Must be called while there is one thread. Must not allocate.
#[cold]
fn decide() {
    // SAFETY: the numbers of existing options; a variable of libc.
    unsafe {
        if libc::environ.is_null() {
            // libc has not set the environment yet. Until then mimalloc must not reserve a large
            // piece of ordinary memory, from which it would serve later requests.
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

/// Reserves the arena and makes mimalloc allocate from it only.
fn reserve() {
    let found = RANGES_BYTES.into_iter().find_map(|bytes| map(bytes).map(|start| (start, bytes)));
    let Some((start, bytes)) = found else { return };
    let mut id = 0;
    // SAFETY: the range is newly mapped, zero, aligned as mimalloc requires, and stays mapped. The
    // numbers are those of existing options.
    let is_managed = unsafe {
        mi_option_set(mi_option_limit_os_alloc, 1);
        // Otherwise mimalloc would allocate ordinary memory when the arena is full.
        mi_option_set(ARENA_RESERVE, 0);
        mi_manage_os_memory_ex(start as *const _, bytes, true, false, true, -1, false, &raw mut id)
    };
    if is_managed {
        START.store(start, Relaxed);
        END.store(start + bytes, Relaxed);
    }
}

/// Maps aligned memory with inaccessible memory on both sides; returns its address.
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
