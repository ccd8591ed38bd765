//! Hides workers from the program: `wait` does not return them, `kill` of all processes excludes
//! them, and folders of `/proc` do not list them.
//!
//! The kernel cannot hide a worker from the program's PID namespace, nor from a process that adopts
//! orphans (`docs/decisions/0025-hide-workers.md`). Interposes the functions of libc by which a
//! program sees processes that it does not know. System calls in the program's own code see
//! workers.

use core::ffi::{c_int, c_uint, c_void};
use core::mem::{transmute, zeroed};
use core::ptr::null_mut;

use crate::attach;
use crate::next::{NextSymbol, fail_with_errno};
use crate::processes::{self, Processes};
use crate::raw::syscall;
use crate::worker::start::is_reaper;

type LibcWait4 = unsafe extern "C" fn(c_int, *mut c_int, c_int, *mut libc::rusage) -> c_int;
type LibcWaitpid = unsafe extern "C" fn(c_int, *mut c_int, c_int) -> c_int;
type LibcWaitid = unsafe extern "C" fn(c_uint, c_uint, *mut libc::siginfo_t, c_int) -> c_int;
type LibcReaddir = unsafe extern "C" fn(*mut libc::DIR) -> *mut libc::dirent64;

static NEXT_WAIT4: NextSymbol = NextSymbol::new(c"wait4");
static NEXT_WAITPID: NextSymbol = NextSymbol::new(c"waitpid");
static NEXT_WAITID: NextSymbol = NextSymbol::new(c"waitid");
static NEXT_READDIR: NextSymbol = NextSymbol::new(c"readdir64");

/// Any child, for `wait4` and as a process number of `kill`.
const ANY: c_int = -1;
const NO_CHILD: isize = -(libc::ECHILD as isize);
const NO_PROCESS: isize = -(libc::ESRCH as isize);
const NOT_PERMITTED: isize = -(libc::EPERM as isize);
/// `f_type` of `/proc`.
const PROC_SUPER_MAGIC: i64 = 0x9fa0;

/// Looks up libc's functions in advance, because a signal handler may be the first to call them.
pub fn look_up_next_symbols() {
    for symbol in [&NEXT_WAIT4, &NEXT_WAITPID, &NEXT_WAITID, &NEXT_READDIR] {
        symbol.address();
    }
}

// ---- wait ---------------------------------------------------------------------------------------

/// Whether a wait for this child can return a worker: the wait is for any child, and the process
/// may have adopted workers whose parents have ended.
fn may_return_worker(child: c_int) -> bool {
    child == ANY && attach::is_attached() && is_reaper()
}

/// `waitid` of libc, in which a thread can be cancelled. Returns 0 or a negative errno.
unsafe fn waitid_of_libc(kind: u32, id: u32, info: *mut libc::siginfo_t, options: c_int) -> isize {
    let next = NEXT_WAITID.address();
    if next.is_null() {
        // SAFETY: as of the caller.
        return unsafe { raw_waitid(kind, id, info, options, 0) };
    }
    // SAFETY: the next definition of this name is libc's, which has the type `LibcWaitid`.
    unsafe {
        let result = transmute::<*mut c_void, LibcWaitid>(next)(kind, id, info, options);
        if result < 0 { -(*libc::__errno_location() as isize) } else { 0 }
    }
}

/// `waitid` as a system call. `usage` is the address of the kernel's fifth argument.
unsafe fn raw_waitid(kind: u32, id: u32, info: *mut libc::siginfo_t, options: c_int, usage: usize) -> isize {
    // SAFETY: as of the caller.
    unsafe {
        syscall(libc::SYS_waitid, [kind as usize, id as usize, info as usize, options as usize, usage, 0])
    }
}

/// The result of [`peek`].
enum Waitable {
    /// The number of the process, and the state that the kernel reports.
    Child(u32, libc::siginfo_t),
    /// No child has a status, and the caller does not want to wait.
    Nothing,
}

/// Waits for any child but workers, and leaves it waitable. Reaps workers that have ended.
///
/// `waitid` is the call that waits.
///
/// # Errors
/// A negative errno.
fn peek(
    options: c_int,
    waitid: unsafe fn(u32, u32, *mut libc::siginfo_t, c_int) -> isize,
) -> Result<Waitable, isize> {
    loop {
        // SAFETY: the kernel fills the struct, for which all bits zero are valid. The number is a
        // field of each of its variants that `waitid` returns.
        let (result, info, pid) = unsafe {
            let mut info: libc::siginfo_t = zeroed();
            let result = waitid(libc::P_ALL, 0, &raw mut info, options | libc::WNOWAIT);
            (result, info, info.si_pid() as u32)
        };
        if result < 0 {
            return Err(result);
        }
        if pid == 0 {
            return Ok(Waitable::Nothing);
        }
        if !processes::is_ended_worker(pid) {
            return Ok(Waitable::Child(pid, info));
        }
        let how = libc::WEXITED | libc::WNOHANG | libc::__WALL;
        // SAFETY: the child has ended, and the call only releases its number.
        unsafe { raw_waitid(libc::P_PID, pid, null_mut(), how, 0) };
    }
}

/// `wait4` for any child but workers. Returns a process number, 0, or a negative errno.
unsafe fn wait4_any(
    status: usize,
    options: c_int,
    usage: usize,
    waitid: unsafe fn(u32, u32, *mut libc::siginfo_t, c_int) -> isize,
) -> isize {
    loop {
        let pid = match peek(options | libc::WEXITED, waitid) {
            Ok(Waitable::Child(pid, _)) => pid,
            Ok(Waitable::Nothing) => return 0,
            Err(error) => return error,
        };
        let how = (options | libc::WNOHANG) as usize;
        // SAFETY: as of the caller.
        let result = unsafe { syscall(libc::SYS_wait4, [pid as usize, status, how, usage, 0, 0]) };
        // Another thread may have reaped the child.
        if result != 0 && result != NO_CHILD {
            return result;
        }
    }
}

/// `waitid` for any child but workers. Returns 0 or a negative errno.
unsafe fn waitid_any(
    info: *mut libc::siginfo_t,
    options: c_int,
    usage: usize,
    waitid: unsafe fn(u32, u32, *mut libc::siginfo_t, c_int) -> isize,
) -> isize {
    loop {
        let (pid, found) = match peek(options, waitid) {
            Ok(Waitable::Child(pid, found)) => (pid, found),
            // SAFETY: the kernel's struct for no child is all zeros.
            Ok(Waitable::Nothing) => (0, unsafe { zeroed() }),
            Err(error) => return error,
        };
        if pid != 0 && options & libc::WNOWAIT == 0 {
            // SAFETY: as of the caller, for the pointer `usage`.
            let (result, taken) = unsafe {
                let mut taken: libc::siginfo_t = zeroed();
                let how = options | libc::WNOHANG;
                (raw_waitid(libc::P_PID, pid, &raw mut taken, how, usage), taken.si_pid())
            };
            if result == NO_CHILD || result == 0 && taken == 0 {
                // Another thread has reaped the child.
                continue;
            }
            if result < 0 {
                return result;
            }
        }
        if !info.is_null() {
            // SAFETY: the caller has passed a pointer to such a struct.
            unsafe { info.write(found) };
        }
        return 0;
    }
}

/// The system call `wait4`, which does not return workers. Returns the kernel's result.
///
/// # Safety
/// As of the system call.
pub unsafe fn raw_wait4_without_workers(child: c_int, status: usize, options: c_int, usage: usize) -> isize {
    // SAFETY: as of the caller.
    unsafe {
        if may_return_worker(child) {
            wait4_any(status, options, usage, |kind, id, info, options| {
                raw_waitid(kind, id, info, options, 0)
            })
        } else {
            syscall(libc::SYS_wait4, [child as usize, status, options as usize, usage, 0, 0])
        }
    }
}

/// The system call `waitid`, which does not return workers. Returns the kernel's result.
///
/// # Safety
/// As of the system call.
pub unsafe fn raw_waitid_without_workers(
    kind: u32,
    id: u32,
    info: *mut libc::siginfo_t,
    options: c_int,
    usage: usize,
) -> isize {
    // SAFETY: as of the caller.
    unsafe {
        if kind == libc::P_ALL && options & libc::WEXITED != 0 && may_return_worker(ANY) {
            waitid_any(info, options, usage, |kind, id, info, options| raw_waitid(kind, id, info, options, 0))
        } else {
            raw_waitid(kind, id, info, options, usage)
        }
    }
}

/// Result of a function of libc, from a result of the kernel.
fn result_of(result: isize) -> c_int {
    if result < 0 { fail_with_errno(-result as c_int) } else { result as c_int }
}

/// Interposes libc's function of this name.
///
/// # Safety
/// As of libc's `wait4`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wait4(
    child: c_int,
    status: *mut c_int,
    options: c_int,
    usage: *mut libc::rusage,
) -> c_int {
    let next = NEXT_WAIT4.address();
    // SAFETY: the caller is responsible for the call. The next definition of this name is libc's,
    // which has the type `LibcWait4`.
    unsafe {
        if may_return_worker(child) || next.is_null() {
            if child == ANY {
                return result_of(wait4_any(status as usize, options, usage as usize, waitid_of_libc));
            }
            return result_of(raw_wait4_without_workers(child, status as usize, options, usage as usize));
        }
        transmute::<*mut c_void, LibcWait4>(next)(child, status, options, usage)
    }
}

/// Interposes libc's function of this name.
///
/// # Safety
/// As of libc's `waitpid`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waitpid(child: c_int, status: *mut c_int, options: c_int) -> c_int {
    let next = NEXT_WAITPID.address();
    // SAFETY: the caller is responsible for the call. The next definition of this name is libc's,
    // which has the type `LibcWaitpid`.
    unsafe {
        if may_return_worker(child) || next.is_null() {
            return wait4(child, status, options, null_mut());
        }
        transmute::<*mut c_void, LibcWaitpid>(next)(child, status, options)
    }
}

/// Interposes libc's function of this name.
///
/// # Safety
/// As of libc's `wait`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wait(status: *mut c_int) -> c_int {
    // SAFETY: as of the caller.
    unsafe { waitpid(ANY, status, 0) }
}

/// Interposes libc's function of this name.
///
/// # Safety
/// As of libc's `wait3`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wait3(status: *mut c_int, options: c_int, usage: *mut libc::rusage) -> c_int {
    // SAFETY: as of the caller.
    unsafe { wait4(ANY, status, options, usage) }
}

/// Interposes libc's function of this name.
///
/// # Safety
/// As of libc's `waitid`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn waitid(
    kind: c_uint,
    id: c_uint,
    info: *mut libc::siginfo_t,
    options: c_int,
) -> c_int {
    // SAFETY: the caller is responsible for the call.
    unsafe {
        if kind == libc::P_ALL && options & libc::WEXITED != 0 && may_return_worker(ANY) {
            return result_of(waitid_any(info, options, 0, waitid_of_libc));
        }
        result_of(waitid_of_libc(kind, id, info, options))
    }
}

// ---- kill ---------------------------------------------------------------------------------------

/// The system call `kill`, which excludes workers if it is for all processes. Returns the kernel's
/// result.
pub fn raw_kill_without_workers(pid: c_int, signal: c_int) -> isize {
    // SAFETY: sends a signal, and accesses no memory.
    let kill = |pid: c_int| unsafe { syscall(libc::SYS_kill, [pid as usize, signal as usize, 0, 0, 0, 0]) };
    if pid != ANY || !attach::is_attached() {
        return kill(pid);
    }
    // SAFETY: only returns a number.
    let own = unsafe { syscall(libc::SYS_getpid, [0; 6]) } as u32;
    let mut result = NO_PROCESS;
    Processes::open().for_each(attach::worker_pid(), |process| {
        // As the kernel: not the first process of the namespace, and not the caller.
        if process != 1 && process != own {
            match kill(process as c_int) {
                NO_PROCESS => {}
                // A process that may not get the signal makes no difference, unless there is no
                // other one.
                NOT_PERMITTED if result != NO_PROCESS => {}
                NOT_PERMITTED => result = 0,
                other => result = other,
            }
        }
        // Signal 0 only checks whether there is a process.
        signal != 0 || result != 0
    });
    result
}

/// Interposes libc's function of this name. Makes the system call itself, because libc's function
/// does nothing else.
///
/// # Safety
/// As of libc's `kill`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kill(pid: c_int, signal: c_int) -> c_int {
    result_of(raw_kill_without_workers(pid, signal))
}

// ---- folders of processes -----------------------------------------------------------------------

/// Whether an entry of a folder is of a worker's process.
unsafe fn is_worker_entry(folder: *mut libc::DIR, entry: *const libc::dirent64) -> bool {
    // SAFETY: libc has returned the entry, whose name ends with a zero.
    unsafe {
        let name = (&raw const (*entry).d_name).cast::<u8>();
        if (*entry).d_type != libc::DT_DIR || !(*name).is_ascii_digit() || !attach::is_attached() {
            return false;
        }
        let fd = libc::dirfd(folder);
        let mut about: libc::statfs = zeroed();
        let arguments = [fd as usize, (&raw mut about) as usize, 0, 0, 0, 0];
        if syscall(libc::SYS_fstatfs, arguments) < 0 || about.f_type != PROC_SUPER_MAGIC {
            return false;
        }
        processes::is_worker_in(fd, core::ffi::CStr::from_ptr(name.cast()).to_bytes())
    }
}

unsafe fn next_entry(folder: *mut libc::DIR) -> *mut libc::dirent64 {
    let next = NEXT_READDIR.address();
    if next.is_null() {
        fail_with_errno(libc::ENOSYS);
        return null_mut();
    }
    // SAFETY: the next definition of this name is libc's, which has the type `LibcReaddir`.
    unsafe {
        let readdir = transmute::<*mut c_void, LibcReaddir>(next);
        loop {
            let entry = readdir(folder);
            if entry.is_null() || !is_worker_entry(folder, entry) {
                return entry;
            }
        }
    }
}

/// Interposes libc's function of this name.
///
/// # Safety
/// As of libc's `readdir`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn readdir(folder: *mut libc::DIR) -> *mut libc::dirent64 {
    // SAFETY: as of the caller.
    unsafe { next_entry(folder) }
}

/// Interposes libc's function of this name, which is the same as `readdir`.
///
/// # Safety
/// As of libc's `readdir64`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn readdir64(folder: *mut libc::DIR) -> *mut libc::dirent64 {
    // SAFETY: as of the caller.
    unsafe { next_entry(folder) }
}
