//! Interruption of a thread that a hostile program has made wait.
//!
//! The kernel has no read of a forked child's userfaultfd that never waits: a program can clear the
//! flag of its descriptor just before. A signal ends such a read.

use std::sync::Once;

/// The signal that interrupts a read. Its handler does nothing, and the read is not restarted.
fn signal() -> libc::c_int {
    libc::SIGRTMIN() + 1
}

extern "C" fn ignore(_signal: libc::c_int) {}

/// Returns the number of the calling thread, for [`interrupt`]. Installs the signal handler.
pub(super) fn this_thread() -> i32 {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: the struct is valid when it is zeroed, and the handler does nothing.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = ignore as extern "C" fn(libc::c_int) as usize;
            libc::sigaction(signal(), &raw const action, std::ptr::null_mut());
        }
    });
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// Interrupts a thread of this process that may wait in a read.
pub(super) fn interrupt(thread: i32) {
    let process = rustix::process::getpid().as_raw_nonzero().get();
    // SAFETY: signals a thread of this process. If it has ended, the number is unused, or belongs
    // to another thread, which tolerates the signal.
    unsafe {
        libc::syscall(libc::SYS_tgkill, process, thread, signal());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_read_that_waits_is_interrupted() {
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        let (send, receive) = mpsc::channel();
        let (send_outcome, outcomes) = mpsc::channel();
        std::thread::spawn(move || {
            send.send(this_thread()).unwrap();
            send_outcome.send(rustix::io::read(&reader, &mut [0; 1])).unwrap();
        });
        let thread = receive.recv().unwrap();
        // Repeated, because the thread may not wait yet, with a pause in which it can leave the
        // handler.
        let outcome = loop {
            interrupt(thread);
            if let Ok(outcome) = outcomes.recv_timeout(Duration::from_millis(1)) {
                break outcome;
            }
        };
        assert_eq!(outcome, Err(rustix::io::Errno::INTR));
    }
}
