//! Ends processes with no more rights than their user has.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// User id that no user has: the real and the saved user of the process that sends the signal, so
/// that only root can stop or kill it. Its effective user alone decides which processes it may
/// signal.
const UNUSED_UID: libc::c_long = 4_294_967_294;

/// Kills a process as user `uid` would, so that the kernel refuses what that user may not do.
///
/// A process that a user has started may have executed a set-user-ID program since, and a check
/// before the signal would be out of date when the signal is sent.
///
/// # Errors
/// `EPERM` if the user may not kill it, `ESRCH` if it has ended, `EAGAIN` or `ENOMEM` if no process
/// can be created.
pub fn kill_as(uid: u32, pidfd: BorrowedFd<'_>) -> io::Result<()> {
    kill_all(uid, &[pidfd])
}

/// Kills several processes as [`kill_as`] does. A process that has ended already is no error.
///
/// # Errors
/// The last error of [`kill_as`]; the others were killed nevertheless.
pub fn kill_all_as(uid: u32, pidfds: &[BorrowedFd<'_>]) -> io::Result<()> {
    if pidfds.is_empty() {
        return Ok(());
    }
    kill_all(uid, pidfds).or_else(|error| match error.raw_os_error() {
        Some(libc::ESRCH) => Ok(()),
        _ => Err(error),
    })
}

/// Kills processes. Fails with the last error that is not `ESRCH`, or else with `ESRCH`.
fn kill_all(uid: u32, pidfds: &[BorrowedFd<'_>]) -> io::Result<()> {
    if uid == rustix::process::geteuid().as_raw() {
        return match signal_all(pidfds) {
            0 => Ok(()),
            code => Err(io::Error::from_raw_os_error(code)),
        };
    }
    // A process of its own, because a thread that had the user's id for a moment could be killed by
    // that user.
    // SAFETY: without flags this is `fork`. The child makes only raw system calls and touches no
    // memory but this stack, so it is of no concern what other threads were doing.
    let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
    match child {
        0 => kill_and_exit(uid, pidfds),
        1.. => exit_code(child).and_then(|code| match code {
            0 => Ok(()),
            code => Err(io::Error::from_raw_os_error(code)),
        }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The child: becomes the user, sends the signals, and exits with 0 or an errno.
fn kill_and_exit(uid: u32, pidfds: &[BorrowedFd<'_>]) -> ! {
    let uid = libc::c_long::from(uid);
    // SAFETY: system calls without pointers, in a process with one thread.
    unsafe {
        let result = libc::syscall(libc::SYS_setresuid, UNUSED_UID, uid, UNUSED_UID);
        libc::_exit(if result == 0 { signal_all(pidfds) } else { *libc::__errno_location() })
    }
}

/// Sends the signals with the rights of this process; 0, or an errno: the last one that is not
/// `ESRCH`, if there is one.
fn signal_all(pidfds: &[BorrowedFd<'_>]) -> i32 {
    let mut code = 0;
    for pidfd in pidfds {
        // SAFETY: a system call without pointers; libc's errno is always there.
        let error = unsafe {
            match libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), libc::SIGKILL, 0, 0) {
                0 => continue,
                _ => *libc::__errno_location(),
            }
        };
        if code == 0 || error != libc::ESRCH {
            code = error;
        }
    }
    code
}

/// Waits for the child. A child that is killed counts as `EPERM`: only root can do that.
fn exit_code(child: libc::c_long) -> io::Result<i32> {
    let child = libc::pid_t::try_from(child).map_err(io::Error::other)?;
    let mut status = 0;
    loop {
        // SAFETY: the kernel writes the status of a child that nothing else waits for.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        match (waited, io::Error::last_os_error()) {
            (0.., _) => break,
            (_, error) if error.kind() == io::ErrorKind::Interrupted => {}
            (_, error) => return Err(error),
        }
    }
    Ok(if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { libc::EPERM })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::process::{CommandExt, ExitStatusExt};
    use std::process::{Child, Command};

    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    /// Two users that own no other process.
    const USERS: [u32; 2] = [65_534, 61_183];

    fn sleeper(uid: u32) -> (Child, std::os::fd::OwnedFd) {
        let child = Command::new("sleep").arg("1000").uid(uid).spawn().unwrap();
        let pid = Pid::from_child(&child);
        (child, pidfd_open(pid, PidfdFlags::empty()).unwrap())
    }

    #[test]
    fn a_user_can_kill_its_own_processes_only() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: only root can act as another user");
        }
        let (mut own, pidfd) = sleeper(USERS[0]);
        assert_eq!(kill_as(USERS[1], pidfd.as_fd()).unwrap_err().raw_os_error(), Some(libc::EPERM));
        assert!(own.try_wait().unwrap().is_none());
        kill_as(USERS[0], pidfd.as_fd()).unwrap();
        assert_eq!(own.wait().unwrap().signal(), Some(libc::SIGKILL));
        assert_eq!(kill_as(USERS[0], pidfd.as_fd()).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        let (mut roots, pidfd) = sleeper(0);
        assert_eq!(kill_as(USERS[0], pidfd.as_fd()).unwrap_err().raw_os_error(), Some(libc::EPERM));
        roots.kill().unwrap();
        roots.wait().unwrap();
    }
}
