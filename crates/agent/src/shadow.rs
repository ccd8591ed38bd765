//! The agent's shadow: a process that shares the agent's table of open files and does nothing, until the agent dies.
//!
//! The kernel makes the userfaultfd of a forked child when the agent reads of the fork, and from then on the child runs. Should the agent
//! be killed before it has given that descriptor to the keeper, its table would close, and the child would read zeros. The table is
//! the shadow's, too: it lives on until the shadow has given the keeper every userfaultfd in it.

use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use aquifer_channel::socket::wait_readable;
use aquifer_channel::{connect, receive_frame, send_frame};
use aquifer_ipc::{Frame, HeldItem, HeldKind};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, getpid, kill_process, pidfd_open, waitpid};

const LONG: Duration = Duration::from_secs(3600);

/// The shadow of an agent that lives.
#[derive(Debug)]
pub struct Shadow {
    process: Pid,
}

impl Shadow {
    /// The agent ends in good order, and nobody needs what it has open.
    pub fn dismiss(self) {
        let ended = kill_process(self.process, Signal::KILL)
            .and_then(|()| waitpid(Some(self.process), WaitOptions::empty()));
        if let Err(error) = ended {
            tracing::warn!(%error, "the agent's shadow was gone before it");
        }
    }
}

/// Start the shadow. To be called while this process has one thread.
///
/// # Errors
/// If there can be no other process.
pub fn start(keeper: &Path) -> io::Result<Shadow> {
    let agent = getpid();
    // SAFETY: as fork, but with one table of files for both. There is one thread, so that the child may do whatever its parent might, and
    // it never returns from here.
    let child = unsafe { libc::syscall(libc::SYS_clone, libc::CLONE_FILES | libc::SIGCHLD, 0, 0, 0, 0) };
    if child == 0 {
        let code = i32::from(follow(agent, keeper).is_err());
        // SAFETY: ends this process without running what the agent has registered for its end.
        unsafe { libc::_exit(code) }
    }
    let process = i32::try_from(child).ok().filter(|child| *child > 0).and_then(Pid::from_raw);
    process.map(|process| Shadow { process }).ok_or_else(io::Error::last_os_error)
}

fn follow(agent: Pid, keeper: &Path) -> io::Result<()> {
    block_signals();
    // A session of its own: what ends the agent's terminal or group is not meant for it.
    let _leader = rustix::process::setsid();
    if let Ok(pidfd) = pidfd_open(agent, PidfdFlags::empty()) {
        while !wait_readable(&[&pidfd], LONG)? {}
    }
    let own = userfaultfds()?;
    if own.is_empty() {
        return Ok(());
    }
    let socket = connect(keeper)?;
    for fd in own {
        let number = u64::try_from(fd).map_err(io::Error::other)?;
        let agent = u64::try_from(agent.as_raw_nonzero().get()).map_err(io::Error::other)?;
        let put =
            HeldItem { kind: HeldKind::Orphan, id: agent << 32 | number, pid: 0, record: String::new() };
        // SAFETY: it was listed a moment ago, and nobody is left who would close it.
        send_frame(&socket, &Frame::Hold(put), &[unsafe { BorrowedFd::borrow_raw(fd) }])?;
    }
    // When the answer is there the keeper has them all.
    send_frame(&socket, &Frame::Sync, &[])?;
    receive_frame(&socket).map(drop).map_err(io::Error::other)
}

/// Only SIGKILL ends it.
fn block_signals() {
    // SAFETY: an all-zero sigset_t is a valid object, which sigfillset then initialises; only this process' mask changes.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
    }
}

fn userfaultfds() -> io::Result<Vec<RawFd>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        let is_one = std::fs::read_link(entry.path())
            .is_ok_and(|target| target.as_os_str() == "anon_inode:[userfaultfd]");
        found.extend(
            entry.file_name().to_str().and_then(|name| name.parse::<RawFd>().ok()).filter(|_| is_one),
        );
    }
    Ok(found)
}
