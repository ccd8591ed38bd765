//! When the worker ends: when it is the last process that has the memory.
//!
//! No descriptor and no signal reports that a program has executed another one. But the kernel
//! clears a word of each thread that leaves memory which others still use, and wakes waiters on it.
//! The worker waits on the word of the thread that started it. Then it asks the kernel whether it
//! is alone: it unshares its memory, which does nothing and is refused unless that is so.

use core::ptr::null;
use core::sync::atomic::{AtomicU32, Ordering};

use aquifer_ipc::WorkerControl;
use aquifer_ipc::control::WORKER_IS_LAST;

use super::{Worker, exit, wake};
use crate::raw::syscall;

const FUTEX_WAIT: usize = 0;
/// `FUTEX2_SIZE_U32` for a word that is not private to a process: the kernel wakes such waiters.
const SHARED_U32: u32 = 2;
/// Looks that are made without a pause, because a process that ends does so within microseconds.
const YIELDS: u32 = 64;
const PAUSE_NS_MIN: u64 = 100_000;
const PAUSE_NS_MAX: u64 = 1_000_000_000;

/// `struct futex_waitv`.
#[repr(C)]
struct WaitedWord {
    value: u64,
    address: u64,
    flags: u32,
    reserved: u32,
}

/// What the worker waits for besides commands.
pub struct Watch<'a> {
    worker: &'a Worker,
    control: &'a WorkerControl,
    /// The word of the thread, and its number there, until it is cleared.
    word: Option<(&'a AtomicU32, u32)>,
    /// Looks since the word was cleared, or the agent has reported the end of the process.
    looks: u32,
    pause_ns: u64,
}

impl<'a> Watch<'a> {
    pub fn new(worker: &'a Worker) -> Self {
        // SAFETY: both are mapped as long as the memory exists: the one is in the control block of a
        // thread, and the other is never unmapped. Both are atomics.
        let (word, control) = unsafe { (worker.thread_word.as_ref(), &*worker.control) };
        let word = word.map(|word| (word, word.load(Ordering::Relaxed)));
        Self {
            worker,
            control,
            word: word.filter(|(_, thread)| *thread != 0),
            looks: 0,
            pause_ns: PAUSE_NS_MIN,
        }
    }

    /// Waits until there may be a new command. Ends the process if it is the last one.
    pub fn wait_for_command(&mut self, last: u32) {
        match self.word {
            Some((word, thread)) if !self.has_process_ended() => {
                if !self.wait_for_both(last, word, thread) {
                    self.word = None;
                    // The word may be waited for by a thread that joins this one.
                    wake(word, i32::MAX as usize);
                }
            }
            _ => self.look(last),
        }
    }

    fn has_process_ended(&self) -> bool {
        self.control.process_ended.load(Ordering::Acquire) != 0
    }

    /// Waits for a command or for the word; returns false if the word has changed, or cannot be
    /// waited for.
    fn wait_for_both(&self, last: u32, word: &AtomicU32, thread: u32) -> bool {
        let on = |word: &AtomicU32, value: u32| WaitedWord {
            value: value.into(),
            address: word.as_ptr() as u64,
            flags: SHARED_U32,
            reserved: 0,
        };
        let words = [on(&self.control.command, last), on(word, thread)];
        // SAFETY: the kernel reads the two entries, and looks the addresses up.
        let result =
            unsafe { syscall(libc::SYS_futex_waitv, [words.as_ptr() as usize, words.len(), 0, 0, 0, 0]) };
        let is_waiting =
            result == 0 || result == -(libc::EAGAIN as isize) || result == -(libc::EINTR as isize);
        is_waiting && word.load(Ordering::Acquire) == thread
    }

    /// Ends the process if it is the last one; otherwise waits for a command for a while.
    fn look(&mut self, last: u32) {
        if self.is_last() {
            if self.is_unneeded() {
                // The agent tells this end from that of a worker that was killed.
                self.control.worker.store(0, Ordering::Release);
                exit();
            }
            self.report_last();
        }
        if self.looks < YIELDS {
            self.looks += 1;
            // SAFETY: only lets others run.
            unsafe { syscall(libc::SYS_sched_yield, [0; 6]) };
            return;
        }
        let pause = libc::timespec {
            tv_sec: (self.pause_ns / PAUSE_NS_MAX) as i64,
            tv_nsec: (self.pause_ns % PAUSE_NS_MAX) as i64,
        };
        self.pause_ns = (self.pause_ns * 2).min(PAUSE_NS_MAX);
        let command = self.control.command.as_ptr() as usize;
        // SAFETY: the kernel reads the time, and looks the address up.
        unsafe {
            syscall(libc::SYS_futex, [command, FUTEX_WAIT, last as usize, (&raw const pause) as usize, 0, 0]);
        }
    }

    /// Whether no other process has this memory.
    ///
    /// A sandbox may refuse the question. Then the thread's word and the agent decide.
    fn is_last(&self) -> bool {
        // SAFETY: has no effect.
        let result = unsafe { syscall(libc::SYS_unshare, [libc::CLONE_VM as usize, 0, 0, 0, 0, 0]) };
        let is_refused = result == -(libc::EPERM as isize) || result == -(libc::ENOSYS as isize);
        result == 0 || is_refused && (!self.worker.thread_word.is_null() || self.has_process_ended())
    }

    /// Reports to the agent that the program has ended, although the staging buffers are in use.
    fn report_last(&self) {
        if self.control.process_ended.swap(WORKER_IS_LAST, Ordering::AcqRel) != WORKER_IS_LAST {
            let byte = 0u8;
            let flags = (libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) as usize;
            let packet = [self.worker.socket as usize, (&raw const byte) as usize, 1, flags, 0, 0];
            // SAFETY: the kernel reads the byte.
            unsafe {
                syscall(libc::SYS_sendto, packet);
            }
        }
    }

    /// Whether nothing in the staging buffers is needed by forked children: the agent has copied all
    /// pages, or is gone together with the keeper.
    fn is_unneeded(&self) -> bool {
        let mut agent = libc::pollfd { fd: self.worker.socket, events: 0, revents: 0 };
        let is_empty = |count: &AtomicU32| count.load(Ordering::Acquire) == 0;
        self.control.batches.iter().all(|batch| is_empty(&batch.count))
            // SAFETY: the kernel writes to the one entry.
            || unsafe { syscall(libc::SYS_poll, [(&raw mut agent) as usize, 1, 0, 0, 0, 0]) } == 1
    }
}

/// The word that the kernel clears when the calling thread leaves the memory; null if there is none.
pub fn thread_word() -> *const AtomicU32 {
    const PR_GET_TID_ADDRESS: usize = 40;
    let mut address: *const AtomicU32 = null();
    // SAFETY: the kernel writes an address.
    let result =
        unsafe { syscall(libc::SYS_prctl, [PR_GET_TID_ADDRESS, (&raw mut address) as usize, 0, 0, 0, 0]) };
    if result == 0 { address } else { null() }
}
