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
/// Longest wait for the thread's word. The kernel wakes one waiter only, which can be a thread of the
/// program that joins this one.
const WORD_PAUSE_S: i64 = 2;

/// `struct futex_waitv`.
#[repr(C)]
struct WaitedWord {
    value: u64,
    address: u64,
    flags: u32,
    reserved: u32,
}

/// Whether another process has the memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Company {
    None,
    Some,
    /// A sandbox of the program refuses the question.
    Unknown,
}

/// What the worker waits for besides commands.
pub struct Watch<'a> {
    worker: &'a Worker,
    control: &'a WorkerControl,
    /// The word of the thread, and its number there.
    word: Option<(&'a AtomicU32, u32)>,
    /// Whether the kernel can wait for the word and for a command at once.
    waits_for_both: bool,
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
            waits_for_both: true,
            looks: 0,
            pause_ns: PAUSE_NS_MIN,
        }
    }

    /// Waits until there may be a new command. Ends the process if it is the last one.
    pub fn wait_for_command(&mut self, last: u32) {
        if self.may_be_last() {
            return self.look(last);
        }
        match self.word {
            Some((word, thread)) if self.waits_for_both => {
                self.waits_for_both = self.wait_for_both(last, word, thread);
                if word.load(Ordering::Acquire) != thread {
                    // A thread that joins this one may wait for the word, too.
                    wake(word, i32::MAX as usize);
                }
            }
            _ => self.pause(last, PAUSE_NS_MAX),
        }
    }

    /// Whether the thread that started the worker has left the memory, or the process has ended.
    fn may_be_last(&self) -> bool {
        let has_left = self.word.is_none_or(|(word, thread)| word.load(Ordering::Acquire) != thread);
        has_left || self.has_process_ended()
    }

    fn has_process_ended(&self) -> bool {
        self.control.process_ended.load(Ordering::Acquire) != 0
    }

    /// Waits for a command or for the word; returns false if the kernel cannot.
    fn wait_for_both(&self, last: u32, word: &AtomicU32, thread: u32) -> bool {
        let on = |word: &AtomicU32, value: u32| WaitedWord {
            value: value.into(),
            address: word.as_ptr() as u64,
            flags: SHARED_U32,
            reserved: 0,
        };
        let words = [on(&self.control.command, last), on(word, thread)];
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let clock = libc::CLOCK_MONOTONIC as usize;
        // SAFETY: the kernel writes the time.
        unsafe {
            syscall(libc::SYS_clock_gettime, [clock, (&raw mut now) as usize, 0, 0, 0, 0]);
        }
        let until = libc::timespec { tv_sec: now.tv_sec + WORD_PAUSE_S, ..now };
        // SAFETY: the kernel reads the time and the two entries, and looks the addresses up.
        let result = unsafe {
            let (words_at, until_at) = (words.as_ptr() as usize, (&raw const until) as usize);
            syscall(libc::SYS_futex_waitv, [words_at, words.len(), 0, until_at, clock, 0])
        };
        result != -(libc::ENOSYS as isize) && result != -(libc::EPERM as isize)
    }

    /// Ends the process if it is the last one; otherwise waits for a command for a while.
    fn look(&mut self, last: u32) {
        let company = self.company();
        if company != Company::Some && self.is_unneeded() {
            // The agent tells this end from that of a worker that was killed.
            self.control.worker.store(0, Ordering::Release);
            exit();
        }
        if company == Company::None {
            self.report_last();
        }
        if self.looks < YIELDS {
            self.looks += 1;
            // SAFETY: only lets others run.
            unsafe { syscall(libc::SYS_sched_yield, [0; 6]) };
            return;
        }
        self.pause(last, self.pause_ns);
        self.pause_ns = (self.pause_ns * 2).min(PAUSE_NS_MAX);
    }

    /// Waits for a command for a time.
    fn pause(&self, last: u32, pause_ns: u64) {
        let pause = libc::timespec {
            tv_sec: (pause_ns / PAUSE_NS_MAX) as i64,
            tv_nsec: (pause_ns % PAUSE_NS_MAX) as i64,
        };
        let command = self.control.command.as_ptr() as usize;
        // SAFETY: the kernel reads the time, and looks the address up.
        unsafe {
            syscall(libc::SYS_futex, [command, FUTEX_WAIT, last as usize, (&raw const pause) as usize, 0, 0]);
        }
    }

    fn company(&self) -> Company {
        // SAFETY: has no effect.
        let result = unsafe { syscall(libc::SYS_unshare, [libc::CLONE_VM as usize, 0, 0, 0, 0, 0]) };
        match result {
            0 => Company::None,
            _ if result == -(libc::EINVAL as isize) => Company::Some,
            _ => Company::Unknown,
        }
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
