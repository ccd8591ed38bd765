//! Child processes of a process that accepts connections.

use std::io::{self, Read};
use std::os::fd::{AsRawFd, RawFd};

use rustix::process::Pid;

/// The first descriptor behind those of input and output.
const FIRST_FD: u32 = 3;

/// Starts a child process that runs `run`. The child has only the descriptors in `kept`, the
/// standard output and the standard error. It has closed all others of this process when this
/// returns, so that it never does the last close of one.
///
/// Must be called in a process with one thread. `run` must not use other descriptors.
///
/// # Errors
/// If the process cannot be started.
pub fn start(kept: &[RawFd], run: impl FnOnce()) -> io::Result<Pid> {
    let (mut ready, unready) = io::pipe()?;
    // SAFETY: this process has one thread, so the child may do what its parent might. It never
    // returns from here.
    let child = unsafe { libc::fork() };
    if child == 0 {
        close_all_but(kept.iter().copied().chain([unready.as_raw_fd()]));
        drop(unready);
        run();
        std::process::exit(0);
    }
    let process = Pid::from_raw(child).filter(|_| child > 0).ok_or_else(io::Error::last_os_error)?;
    drop(unready);
    let _end_of_file = ready.read_exact(&mut [0]);
    Ok(process)
}

/// Closes all descriptors of this process except `kept` and those of output. Input is empty then.
fn close_all_but(kept: impl Iterator<Item = RawFd>) {
    let mut kept: Vec<_> = kept.map(RawFd::unsigned_abs).collect();
    kept.sort_unstable();
    let mut next = FIRST_FD;
    for fd in kept.into_iter().chain([u32::MAX]).filter(|fd| *fd >= FIRST_FD) {
        if fd > next {
            // SAFETY: the caller uses none of these descriptors, and never drops their owners.
            unsafe { libc::syscall(libc::SYS_close_range, next, fd - 1, 0) };
        }
        next = fd.saturating_add(1);
    }
    // Input is the gateway's connection to the daemon, and output is the null device.
    // SAFETY: replaces a descriptor that nothing owns.
    unsafe { libc::dup2(libc::STDOUT_FILENO, libc::STDIN_FILENO) };
}
