//! Forwarding of signals from `aquifer run` to the program.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Process number of the program; 0 before its start and after its end.
static CHILD: AtomicU32 = AtomicU32::new(0);

/// Signals that are forwarded: those that a user or a service manager sends.
///
/// The terminal sends INT, QUIT and TSTP to the program as well, so those from it are not
/// forwarded.
const FORWARDED: [i32; 7] =
    [libc::SIGTERM, libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2, libc::SIGALRM];

extern "C" fn forward(signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    let child = CHILD.load(Relaxed);
    // SAFETY: the kernel passes a valid siginfo; kill is async-signal-safe.
    unsafe {
        let is_from_terminal = (*info).si_code == libc::SI_KERNEL;
        if child != 0 && !is_from_terminal {
            libc::kill(libc::pid_t::try_from(child).unwrap_or(0), signal);
        }
    }
}

/// Installs the handlers. A signal that is already ignored (`nohup`) stays ignored.
///
/// The program does not inherit handlers.
pub(super) fn install() {
    for signal in FORWARDED {
        // SAFETY: the handler does only what a signal handler may; the structures are initialised.
        unsafe {
            let mut old: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &raw mut old);
            if old.sa_sigaction == libc::SIG_IGN {
                continue;
            }
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = forward as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
}

/// Sets the process that gets the signals; 0 for none.
pub(super) fn forward_to(child: u32) {
    CHILD.store(child, Relaxed);
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
