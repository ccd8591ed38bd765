//! Forwarding of signals from `aquifer run` to the program.
//!
//! Signals that a process sends to `aquifer run` are forwarded. Signals of the kernel are not: the
//! program gets those of the shared terminal itself, and others are caused by this process.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::SeqCst};

use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Process number of the program; 0 before its start and after its end.
static CHILD: AtomicI32 = AtomicI32::new(0);
/// The program, from its start on.
static PROGRAM: OnceLock<OwnedFd> = OnceLock::new();
/// Signals that were received before the program was started, a bit for each.
static EARLY: AtomicU64 = AtomicU64::new(0);
/// Signals that were ignored when this process was started: the program ignores them, too.
static IGNORED: AtomicU64 = AtomicU64::new(0);

/// Signals that the kernel sends to a process for its own fault.
const FAULTS: [i32; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];
/// Signals that stop a process.
const STOPS: [i32; 3] = [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];

/// All signals that a handler can be set for. The first two real-time signals are libc's.
fn all() -> impl Iterator<Item = i32> {
    (1..libc::SIGSYS + 1).chain(libc::SIGRTMIN()..=libc::SIGRTMAX()).filter(is_catchable)
}

fn is_catchable(signal: &i32) -> bool {
    *signal != libc::SIGKILL && *signal != libc::SIGSTOP
}

fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

extern "C" fn forward(signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo; all functions are async-signal-safe, and errno is
    // restored.
    unsafe {
        let errno = *libc::__errno_location();
        let code = (*info).si_code;
        // A signal that this process causes, such as by a write to a closed pipe, is not forwarded.
        let is_sent = code <= 0 && (*info).si_pid() != libc::getpid();
        if is_sent {
            send((code == libc::SI_QUEUE).then(|| (*info).si_value()), signal);
        } else if FAULTS.contains(&signal) {
            // The fault is repeated when the handler returns, and ends the process.
            libc::signal(signal, libc::SIG_DFL);
        }
        if STOPS.contains(&signal) && IGNORED.load(SeqCst) & bit(signal) == 0 {
            // The shell must see that the job has stopped.
            libc::raise(libc::SIGSTOP);
        }
        *libc::__errno_location() = errno;
    }
}

/// Sends a signal to the program, with its value if it has one.
///
/// # Safety
/// No conditions. All calls are permitted in a signal handler.
unsafe fn send(value: Option<libc::sigval>, signal: i32) {
    let child = CHILD.load(SeqCst);
    if child == 0 {
        EARLY.fetch_or(bit(signal), SeqCst);
        return;
    }
    // SAFETY: both only send a signal.
    unsafe {
        match value {
            Some(value) => libc::sigqueue(child, signal, value),
            None => libc::kill(child, signal),
        };
    }
}

/// Installs the handlers. The program does not inherit them.
pub(super) fn install() {
    for signal in all() {
        // SAFETY: the handler does only what a signal handler may; the structures are initialised.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let mut old: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = forward as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_NOCLDSTOP;
            libc::sigaction(signal, &raw const action, &raw mut old);
            // The standard library ignores SIGPIPE, and lets the program not inherit that.
            if old.sa_sigaction == libc::SIG_IGN && signal != libc::SIGPIPE {
                IGNORED.fetch_or(bit(signal), SeqCst);
            }
        }
    }
}

/// Makes the program ignore the signals that this process ignored at its start (`nohup`, or `&` in
/// a script). `execve` resets handlers, and keeps ignored signals.
pub(super) fn inherit(command: &mut Command) {
    let ignore = || {
        for signal in all().filter(|signal| IGNORED.load(SeqCst) & bit(*signal) != 0) {
            // SAFETY: changes the disposition of a signal.
            if unsafe { libc::signal(signal, libc::SIG_IGN) } == libc::SIG_ERR {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: the closure makes system calls only, and allocates nothing unless one fails.
    unsafe { command.pre_exec(ignore) };
}

/// Sets the process that gets the signals, 0 for none, and sends it the signals that were received
/// before. The process must not have been reaped.
pub(super) fn forward_to(child: u32) {
    let number = i32::try_from(child).ok().and_then(Pid::from_raw);
    if let Some(pidfd) = number.and_then(|number| pidfd_open(number, PidfdFlags::empty()).ok()) {
        let _is_first = PROGRAM.set(pidfd);
    }
    CHILD.store(i32::try_from(child).unwrap_or(0), SeqCst);
    let early = if child == 0 { 0 } else { EARLY.swap(0, SeqCst) };
    for signal in all().filter(|signal| early & bit(*signal) != 0) {
        // SAFETY: this is no signal handler, and may call anything.
        unsafe { send(None, signal) };
    }
}

/// Kills the program.
pub(super) fn kill_program() {
    if let Some(pidfd) = PROGRAM.get() {
        // The program may have ended.
        let _ = rustix::process::pidfd_send_signal(pidfd, rustix::process::Signal::KILL);
    }
}

/// Ends this process by a signal, without a core dump.
pub(super) fn die_by(signal: i32) {
    // SAFETY: changes this process' own limits and signal dispositions, and ends it.
    unsafe {
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}
