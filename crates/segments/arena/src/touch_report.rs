//! The message on standard error when a program touches a segment that it does not own, or a
//! missing page. Without the message, a crash at such an address has no visible cause.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::arena::{ARENA_BYTES, ARENA_START};

static IS_REPORTED: AtomicBool = AtomicBool::new(false);
/// The previous signal actions of SIGSEGV and of SIGBUS.
static PREVIOUS_ACTIONS: OnceLock<[libc::sigaction; 2]> = OnceLock::new();

const NOT_OWN: &[u8] = b"aquifer: a touch of a segment that this process does not own (SIGSEGV): \
    it was handed over, or lost because no agent answered within the grace time. Address ";
const MISSING: &[u8] = b"aquifer: a touch of a missing page of a segment (SIGBUS): the page is lost, or \
    must be pulled first. Address ";

/// Installs signal handlers that write a message to standard error at the first invalid touch of a
/// segment. Then the previous handlers run, or the signal ends the process.
pub fn report_touches() {
    let signals = [libc::SIGSEGV, libc::SIGBUS];
    let is_first = AtomicBool::new(false);
    PREVIOUS_ACTIONS.get_or_init(|| {
        is_first.store(true, Ordering::Relaxed);
        signals.map(|signal| {
            // SAFETY: an all-zero action is valid, and is written to only.
            unsafe {
                let mut before: libc::sigaction = std::mem::zeroed();
                libc::sigaction(signal, std::ptr::null(), &raw mut before);
                before
            }
        })
    });
    if is_first.load(Ordering::Relaxed) {
        for signal in signals {
            // SAFETY: an all-zero action is valid. The handler makes only async-signal-safe calls:
            // it writes to a descriptor, and calls the previous action.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = on_fault as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                libc::sigaction(signal, &raw const action, std::ptr::null_mut());
            }
        }
    }
}

extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid info.
    let address = unsafe { (*info).si_addr() } as usize;
    let is_inside = (ARENA_START..ARENA_START + 2 * ARENA_BYTES).contains(&address);
    if is_inside && !IS_REPORTED.swap(true, Ordering::Relaxed) {
        write_line(if signal == libc::SIGSEGV { NOT_OWN } else { MISSING }, address);
    }
    let before = PREVIOUS_ACTIONS.get().map(|before| before[usize::from(signal == libc::SIGBUS)]);
    let (action, flags) = before.map_or((libc::SIG_DFL, 0), |before| (before.sa_sigaction, before.sa_flags));
    match action {
        // The instruction runs again, and then the signal has its default effect.
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: an all-zero action is the default one.
            unsafe { libc::sigaction(signal, &std::mem::zeroed(), std::ptr::null_mut()) };
        }
        handler if flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: a handler with this flag has this type.
            let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: a handler without that flag has this type.
            let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}

/// Writes a line to standard error without an allocation or a lock.
fn write_line(text: &[u8], address: usize) {
    let mut digits = *b"0x0000000000000000\n";
    for (at, digit) in digits[2..18].iter_mut().enumerate() {
        let nibble = address >> (60 - 4 * at) & 15;
        *digit = b"0123456789abcdef"[nibble];
    }
    for bytes in [text, &digits] {
        // SAFETY: the bytes are readable.
        unsafe { libc::write(2, bytes.as_ptr().cast(), bytes.len()) };
    }
}
