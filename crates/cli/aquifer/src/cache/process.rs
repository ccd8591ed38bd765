//! Process attributes of a daemon: identity, limits, background.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::process::{Resource, Rlimit};

use super::CacheArguments;

/// Descriptors of each partition: one for its memory, and two more while a keeper holds it.
const PARTITION_DESCRIPTORS: u64 = 3;
/// Longest wait for the last close of descriptors that a user has sent, in microseconds.
const LINGER_US_MAX: i64 = 10_000;
/// Descriptors for other purposes than connections and partitions.
const OTHER_DESCRIPTORS: u64 = 64;

/// Raises the limit of open files to what all connections and partitions need.
///
/// # Errors
/// If the hard limit of open files is too low.
pub fn raise_descriptor_limit(arguments: &CacheArguments) -> Result<(), String> {
    let needed = u64::from(arguments.conn_limit)
        + PARTITION_DESCRIPTORS * arguments.partitions() as u64
        + 2 * u64::from(arguments.threads)
        + OTHER_DESCRIPTORS;
    let limit = rustix::process::getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= needed) {
        return Ok(());
    }
    let maximum = limit.maximum.map(|maximum| maximum.max(needed));
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: Some(needed), maximum }).map_err(|error| {
        format!(
            "{} connections need a limit of {needed} open files, which is not permitted: {error}; raise the \
                limit (ulimit -n, LimitNOFILE=), or set fewer connections with -c",
            arguments.conn_limit
        )
    })
}

/// Raises the limit of core dumps to the hard limit.
///
/// # Errors
/// If the system refuses.
pub fn raise_core_limit() -> io::Result<()> {
    let maximum = rustix::process::getrlimit(Resource::Core).maximum;
    Ok(rustix::process::setrlimit(Resource::Core, Rlimit { current: maximum, maximum })?)
}

/// Continues in the background, in a session of its own. Must be called before the first thread.
///
/// # Errors
/// If the system refuses.
pub fn become_daemon(keeps_output: bool) -> io::Result<()> {
    // SAFETY: there is one thread, so the child has a whole process.
    if unsafe { libc::daemon(1, i32::from(keeps_output)) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Forks this process. Returns true in the child. Must be called before the first thread.
///
/// # Errors
/// If the system refuses.
pub fn fork() -> io::Result<bool> {
    // SAFETY: there is one thread, so the child has a whole process.
    match unsafe { libc::fork() } {
        0 => Ok(true),
        1.. => Ok(false),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets the signal dispositions of a relay process. Signals that stop a daemon are ignored, since
/// the process ends with its parent. Ended children leave no zombies, and SIGALRM interrupts system
/// calls.
pub fn ignore_stop_signals() {
    extern "C" fn nothing(_signal: libc::c_int) {}
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1, libc::SIGCHLD] {
        // SAFETY: no handler is installed.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    // SAFETY: an all-zero sigaction is a valid object; the handler does nothing, so it may run at
    // any moment. Without SA_RESTART a system call that waits ends.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
        libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut());
    }
}

/// Installs a handler that writes why this process ends when a page of the file of `-e` does not
/// exist. The kernel then sends SIGBUS, at any access.
pub fn report_missing_pages() {
    extern "C" fn report(signal: libc::c_int) {
        const MESSAGE: &[u8] =
            b"aquifer cache: ending, because the file of -e was shortened or its file system is full\n";
        // SAFETY: both calls may be made in a handler. The access is repeated when it returns, and
        // ends the process then.
        unsafe {
            libc::write(libc::STDERR_FILENO, MESSAGE.as_ptr().cast(), MESSAGE.len());
            libc::signal(signal, libc::SIG_DFL);
        }
    }
    let handler = report as extern "C" fn(libc::c_int);
    // SAFETY: the handler is a function that lives as long as the process, and does what a handler
    // may do.
    unsafe { libc::signal(libc::SIGBUS, handler as libc::sighandler_t) };
}

/// Closes a descriptor, with the descriptors that may be in the queue of its socket. If the close
/// waits, SIGALRM interrupts it: the kernel does not let a socket linger then.
pub fn close_without_lingering(descriptor: OwnedFd) {
    let set_alarm = |interval_us: i64| {
        let interval = libc::timeval { tv_sec: 0, tv_usec: interval_us };
        let timer = libc::itimerval { it_interval: interval, it_value: interval };
        // SAFETY: the kernel reads the struct. It fails for no interval that is used here.
        unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) };
    };
    set_alarm(LINGER_US_MAX);
    drop(descriptor);
    set_alarm(0);
}

/// Locks the memory of the process, page by page as it is used.
///
/// # Errors
/// If it is not permitted.
pub fn lock_memory() -> Result<(), String> {
    // SAFETY: the call takes no pointers.
    let locked = unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) };
    if locked == 0 {
        return Ok(());
    }
    Err(format!("memory cannot be locked: {}; raise the limit (ulimit -l)", io::Error::last_os_error()))
}

/// Changes this process's identity to a user's, if it is root's.
///
/// # Errors
/// If there is no such user, or if the system refuses.
pub fn become_user(name: &str) -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let unknown = || format!("there is no user \"{name}\"");
    let c_name = CString::new(name).map_err(|_| unknown())?;
    // SAFETY: the name is a valid string. There is one thread, so the entry stays valid until the
    // next call.
    let (uid, gid) = unsafe {
        let entry = libc::getpwnam(c_name.as_ptr());
        if entry.is_null() {
            return Err(unknown());
        }
        ((*entry).pw_uid, (*entry).pw_gid)
    };
    // SAFETY: the name is a valid string, and there is one thread, whose identity is the process's.
    let changed = unsafe {
        libc::initgroups(c_name.as_ptr(), gid) == 0 && libc::setgid(gid) == 0 && libc::setuid(uid) == 0
    };
    if changed {
        return Ok(());
    }
    Err(format!("cannot take the identity of user \"{name}\": {}", io::Error::last_os_error()))
}

/// A file with the process's number, which is deleted when the process ends.
#[derive(Debug)]
pub struct PidFile(PathBuf);

impl PidFile {
    /// Writes the file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(path: &Path) -> Result<Self, String> {
        // Root may write into a folder of another user, where a link must not lead to another file.
        let flags = i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or(0);
        let mut options = File::options();
        options.write(true).create(true).truncate(true).custom_flags(flags);
        let write = || writeln!(options.open(path)?, "{}", std::process::id());
        write().map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        Ok(Self(path.to_owned()))
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        // The user may not be permitted to delete what root has written.
        let _left = std::fs::remove_file(&self.0);
    }
}
