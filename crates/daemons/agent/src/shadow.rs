//! The agent's shadow: a process that shares the agent's table of open files until the agent ends.
//!
//! The kernel creates the userfaultfd of a forked child when the agent reads the fork event, and
//! the child runs from then on. If the agent is killed before it has passed that descriptor to the
//! keeper, and its table of open files closes, the child reads zeros. The shadow keeps the table
//! open, and passes every userfaultfd in it to the keeper when the agent has ended.

use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use aquifer_channel::exiting::is_exiting;
use aquifer_channel::socket::wait_readable;
use aquifer_channel::{connect, receive_frame, send_frame};
use aquifer_ipc::{Frame, HeldItem, HeldKind};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, getpid, kill_process, pidfd_open, waitpid};

/// Interval between checks whether the agent was killed and cannot end. The end itself is observed
/// at once.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// The shadow of this agent.
#[derive(Debug)]
pub struct Shadow {
    process: Pid,
}

impl Shadow {
    /// Ends the shadow. Must be called when the agent has ended its programs, so that no
    /// userfaultfd must stay open.
    pub fn dismiss(self) {
        let ended = kill_process(self.process, Signal::KILL)
            .and_then(|()| waitpid(Some(self.process), WaitOptions::empty()));
        if let Err(error) = ended {
            tracing::warn!(%error, "the agent's shadow had ended before the agent");
        }
    }
}

/// Starts the shadow. Must be called while this process has one thread.
///
/// # Errors
/// If the process cannot be created.
pub fn start(keeper: &Path) -> io::Result<Shadow> {
    let agent = getpid();
    // SAFETY: like fork, but both processes share one table of open files. There is one thread, so
    // the child may do what its parent might, and it never returns from here.
    let child = unsafe { libc::syscall(libc::SYS_clone, libc::CLONE_FILES | libc::SIGCHLD, 0, 0, 0, 0) };
    if child == 0 {
        let code = i32::from(run(agent, keeper).is_err());
        // SAFETY: ends this process without the exit handlers of the agent.
        unsafe { libc::_exit(code) }
    }
    let process = i32::try_from(child).ok().filter(|child| *child > 0).and_then(Pid::from_raw);
    process.map(|process| Shadow { process }).ok_or_else(io::Error::last_os_error)
}

/// Waits for the agent's end, and passes its userfaultfds to the keeper.
fn run(agent: Pid, keeper: &Path) -> io::Result<()> {
    block_signals();
    // In a session of its own it does not get the signals of the agent's terminal or group.
    let _leader = rustix::process::setsid();
    let number = agent.as_raw_nonzero().get().unsigned_abs();
    let mut was_exiting = false;
    if let Ok(pidfd) = pidfd_open(agent, PidfdFlags::empty()) {
        while !wait_readable(&[&pidfd], CHECK_INTERVAL)? {
            // A hostile program can make the kernel wait in a thread of the agent for ever.
            if std::mem::replace(&mut was_exiting, is_exiting(number)) && was_exiting {
                break;
            }
        }
    }
    let userfaultfds = userfaultfds()?;
    if userfaultfds.is_empty() {
        return Ok(());
    }
    let socket = connect(keeper)?;
    for fd in userfaultfds {
        let descriptor = u64::try_from(fd).map_err(io::Error::other)?;
        let item = HeldItem {
            kind: HeldKind::Orphan,
            id: u64::from(number) << 32 | descriptor,
            pid: 0,
            uid: 0,
            record: String::new(),
        };
        // SAFETY: the descriptor was just listed, and no other process is left that could close it.
        send_frame(&socket, &Frame::Hold(item), &[unsafe { BorrowedFd::borrow_raw(fd) }])?;
    }
    // The keeper answers after it has stored all of them.
    send_frame(&socket, &Frame::Sync, &[])?;
    receive_frame(&socket).map(drop).map_err(io::Error::other)
}

/// Blocks all signals, so that only SIGKILL ends this process.
fn block_signals() {
    // SAFETY: an all-zero sigset_t is a valid object, which sigfillset then initialises. Only the
    // signal mask of this process changes.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
    }
}

/// The userfaultfds in the table of open files.
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
