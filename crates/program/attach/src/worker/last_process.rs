//! Ends the worker when no other process has the memory.
//!
//! No descriptor and no signal reports that a program has executed another one. But the kernel
//! clears a word of each thread that leaves memory which others still use, and wakes a waiter on
//! it. The worker waits on the word of the thread that started it. Then it checks whether another
//! process has the memory: it calls `unshare(CLONE_VM)`, which has no effect, and which the kernel
//! refuses if there is one.

use core::ptr::null;
use core::sync::atomic::{AtomicU32, Ordering};

use aquifer_ipc::WorkerControl;
use aquifer_ipc::control::WORKER_IS_LAST;

use super::{Worker, exit, wake};
use crate::raw::syscall;

const FUTEX_WAIT: usize = 0;
/// `FUTEX2_SIZE_U32` for a word that processes share, the only kind of waiter that the kernel wakes
/// when it clears the word of a thread.
const SHARED_U32: u32 = 2;
/// Number of checks without a pause, since a process that ends releases its memory within
/// microseconds.
const CHECKS_WITHOUT_PAUSE: u32 = 64;
const NS_PER_S: u64 = 1_000_000_000;
const PAUSE_MIN_NS: u64 = 100_000;
const PAUSE_MAX_NS: u64 = NS_PER_S;
/// Maximum wait for the thread's word in seconds. The kernel wakes only one waiter, which can be a
/// thread of the program that joins the thread.
const THREAD_WORD_WAIT_MAX_S: i64 = 2;

/// `struct futex_waitv`.
#[repr(C)]
struct FutexWaiter {
    value: u64,
    address: u64,
    flags: u32,
    reserved: u32,
}

/// The processes that have the memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MemoryUse {
    OnlyWorker,
    Shared,
    /// A sandbox of the program forbids the check.
    Unknown,
}

/// Waits for commands and for the end of the other processes that have the memory.
pub struct LastProcessWatch<'a> {
    worker: &'a Worker,
    control: &'a WorkerControl,
    /// The word of the thread that started the worker, and the thread's number, which it holds
    /// until it is cleared.
    thread_word: Option<(&'a AtomicU32, u32)>,
    /// Whether the kernel can wait for the word and for a command in one call.
    can_wait_for_both: bool,
    /// Checks since the word was cleared, or since the agent reported the end of the process.
    checks: u32,
    pause_ns: u64,
    /// Whether the worker has reported to the agent that only the worker has the memory. The
    /// program can overwrite the report in the control memory.
    has_reported: bool,
}

impl<'a> LastProcessWatch<'a> {
    pub fn new(worker: &'a Worker) -> Self {
        // SAFETY: the word is in the control block of a thread, and the control memory is never
        // unmapped. Both hold only atomics.
        let (word, control) = unsafe { (worker.thread_word.as_ref(), &*worker.control) };
        let word = word.map(|word| (word, word.load(Ordering::Relaxed)));
        Self {
            worker,
            control,
            thread_word: word.filter(|(_, thread)| *thread != 0),
            can_wait_for_both: true,
            checks: 0,
            pause_ns: PAUSE_MIN_NS,
            has_reported: false,
        }
    }

    /// Waits until there may be a command after number `last`. Ends the worker if no other process
    /// has the memory.
    pub fn wait_for_command(&mut self, last: u32) {
        if self.may_be_last() {
            return self.check_use(last);
        }
        match self.thread_word {
            Some((word, thread)) if self.can_wait_for_both => {
                self.can_wait_for_both = self.wait_for_both(last, word, thread);
                if word.load(Ordering::Acquire) != thread {
                    // The kernel has woken only the worker. A thread that joins the thread may wait
                    // for the word, too.
                    wake(word, i32::MAX as usize);
                }
            }
            _ => self.pause(last, PAUSE_MAX_NS),
        }
        // The kernel may have cleared another word for the program, and the agent stores nothing
        // for a worker that it has detached.
        if self.control.command.load(Ordering::Acquire) == last && self.is_detached() {
            self.check_use(last);
        }
    }

    /// Whether the thread that started the worker has left the memory, or the process has ended.
    fn may_be_last(&self) -> bool {
        let has_left = self.thread_word.is_none_or(|(word, thread)| word.load(Ordering::Acquire) != thread);
        has_left || self.has_process_ended()
    }

    /// Whether the program's process has ended, or the worker has found that it is the last one.
    fn has_process_ended(&self) -> bool {
        self.control.process_ended.load(Ordering::Acquire) != 0
    }

    /// Waits for a command or for a change of the thread's word. Returns false if the kernel cannot
    /// do that, or a sandbox forbids it.
    fn wait_for_both(&self, last: u32, word: &AtomicU32, thread: u32) -> bool {
        let waiter = |word: &AtomicU32, value: u32| FutexWaiter {
            value: value.into(),
            address: word.as_ptr() as u64,
            flags: SHARED_U32,
            reserved: 0,
        };
        let waiters = [waiter(&self.control.command, last), waiter(word, thread)];
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let clock = libc::CLOCK_MONOTONIC as usize;
        // SAFETY: the kernel writes the time.
        unsafe {
            syscall(libc::SYS_clock_gettime, [clock, (&raw mut now) as usize, 0, 0, 0, 0]);
        }
        let until = libc::timespec { tv_sec: now.tv_sec + THREAD_WORD_WAIT_MAX_S, ..now };
        // SAFETY: the kernel reads the time, the two entries, and the words at their addresses.
        let result = unsafe {
            let (waiters_at, until_at) = (waiters.as_ptr() as usize, (&raw const until) as usize);
            syscall(libc::SYS_futex_waitv, [waiters_at, waiters.len(), 0, until_at, clock, 0])
        };
        result != -(libc::ENOSYS as isize) && result != -(libc::EPERM as isize)
    }

    /// Ends the worker if no other process has the memory. Otherwise waits for a command, up to a
    /// growing time.
    fn check_use(&mut self, last: u32) {
        let memory_use = self.memory_use();
        if memory_use != MemoryUse::Shared && self.is_unneeded() {
            // The 0 distinguishes this end from that of a killed worker.
            self.control.worker.store(0, Ordering::Release);
            exit();
        }
        if memory_use == MemoryUse::OnlyWorker {
            self.report_last();
        }
        if self.checks < CHECKS_WITHOUT_PAUSE {
            self.checks += 1;
            // SAFETY: only lets other threads run.
            unsafe { syscall(libc::SYS_sched_yield, [0; 6]) };
            return;
        }
        self.pause(last, self.pause_ns);
        self.pause_ns = (self.pause_ns * 2).min(PAUSE_MAX_NS);
    }

    /// Waits for a command after number `last`, for at most `pause_ns`.
    fn pause(&self, last: u32, pause_ns: u64) {
        let pause =
            libc::timespec { tv_sec: (pause_ns / NS_PER_S) as i64, tv_nsec: (pause_ns % NS_PER_S) as i64 };
        let command = self.control.command.as_ptr() as usize;
        // SAFETY: the kernel reads the time, and the word at the address.
        unsafe {
            syscall(libc::SYS_futex, [command, FUTEX_WAIT, last as usize, (&raw const pause) as usize, 0, 0]);
        }
    }

    fn memory_use(&self) -> MemoryUse {
        // SAFETY: fails, or has no effect.
        let result = unsafe { syscall(libc::SYS_unshare, [libc::CLONE_VM as usize, 0, 0, 0, 0, 0]) };
        match result {
            0 => MemoryUse::OnlyWorker,
            _ if result == -(libc::EINVAL as isize) => MemoryUse::Shared,
            _ => MemoryUse::Unknown,
        }
    }

    /// Reports to the agent, once, that only the worker has the memory. The agent then copies the
    /// pages that are still in the staging buffers.
    fn report_last(&mut self) {
        self.control.process_ended.store(WORKER_IS_LAST, Ordering::Release);
        if !core::mem::replace(&mut self.has_reported, true) {
            let byte = 0u8;
            let flags = (libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) as usize;
            let packet = [self.worker.socket as usize, (&raw const byte) as usize, 1, flags, 0, 0];
            // SAFETY: the kernel reads the byte.
            unsafe {
                syscall(libc::SYS_sendto, packet);
            }
        }
    }

    /// Whether the staging buffers have no page that a forked child may need: the agent has copied
    /// all pages, or does not serve the program any longer.
    fn is_unneeded(&self) -> bool {
        let is_empty = |count: &AtomicU32| count.load(Ordering::Acquire) == 0;
        self.control.batches.iter().all(|batch| is_empty(&batch.count)) || self.is_detached()
    }

    /// Whether the agent no longer serves the program, or the agent and the keeper have ended.
    fn is_detached(&self) -> bool {
        let mut agent = libc::pollfd { fd: self.worker.socket, events: 0, revents: 0 };
        // SAFETY: the kernel writes to the one entry.
        unsafe { syscall(libc::SYS_poll, [(&raw mut agent) as usize, 1, 0, 0, 0, 0]) == 1 }
    }
}

/// Returns the word that the kernel clears when the calling thread leaves the memory, or null if
/// there is none.
pub fn thread_word() -> *const AtomicU32 {
    const PR_GET_TID_ADDRESS: usize = 40;
    let mut address: *const AtomicU32 = null();
    // SAFETY: the kernel writes an address.
    let result =
        unsafe { syscall(libc::SYS_prctl, [PR_GET_TID_ADDRESS, (&raw mut address) as usize, 0, 0, 0, 0]) };
    if result == 0 { address } else { null() }
}
