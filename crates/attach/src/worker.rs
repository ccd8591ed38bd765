//! The worker: a thread inside the program that takes pages out of it at the agent's command.
//!
//! It depends on none of the program's memory: raw system calls, its own stack, its own table of open files, no
//! thread-local storage. When the agent is gone it waits for ever and harms nothing.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, Ordering};

use aquifer_ipc::control::{BatchRecord, STATUS_MOVED};
use aquifer_ipc::{BATCH_PAGES_MAX, STAGING_BUFFERS, WorkerControl};

use crate::batch::{self, Batch, Pages};
use crate::credentials::Credentials;
use crate::raw::syscall;
use crate::uffd;

const PAGE: usize = 4096;
const NICENESS: isize = -15;
const FUTEX_WAIT: usize = 0;
const FUTEX_WAKE: usize = 1;
const MADV_POPULATE_WRITE: usize = 23;

/// What the worker knows. It lies at the bottom of the worker's own stack.
#[repr(C)]
pub struct Worker {
    /// Raised when the worker has its own descriptors and the starter may close its copies.
    pub ready: AtomicU32,
    /// The socket to the agent, held open so that the agent notices the program's end.
    pub socket: i32,
    /// The program's userfaultfd: moves on it fail while the agent has an event unread.
    pub paged: i32,
    /// The event-free userfaultfd of the staging area.
    pub staged: i32,
    /// See [`aquifer_ipc::ProgramHello::bounce_buffer`].
    pub antechamber: usize,
    /// See [`aquifer_ipc::ProgramHello::staging`].
    pub staging: usize,
    /// The memory shared with the agent.
    pub control: *const WorkerControl,
    /// Who the worker is to be. Here, and not in the program's memory: that may have left, and would not come back while the agent waits
    /// for the worker.
    pub assumed: UnsafeCell<Credentials>,
    /// 1 while a thread waits until the worker is that.
    pub assuming: AtomicU32,
}

impl Worker {
    /// Have the worker assume credentials, and wait until it has. Called by one of the program's threads at a time.
    pub fn have_assume(&self, credentials: Credentials) {
        // SAFETY: the worker looks at it only while `assuming` is 1, which the thread that was here before waited for the end of.
        unsafe { *self.assumed.get() = credentials };
        self.assuming.store(1, Ordering::Release);
        // SAFETY: the control memory is mapped for the life of the process.
        let command = unsafe { &(*self.control).command };
        while self.assuming.load(Ordering::Acquire) == 1 {
            // Again and again: the worker may be just about to sleep.
            futex(command, FUTEX_WAKE, 1);
            // SAFETY: only lets others run.
            unsafe { syscall(libc::SYS_sched_yield, [0; 6]) };
        }
    }

    fn assume(&self) {
        if self.assuming.load(Ordering::Acquire) == 1 {
            // SAFETY: whoever has written it waits until it is taken back.
            if !unsafe { &*self.assumed.get() }.assume() {
                give_up();
            }
            self.assuming.store(0, Ordering::Release);
        }
    }
}

/// The thread's entry.
pub extern "C" fn main(argument: usize) -> ! {
    // SAFETY: the starter placed a `Worker` there and never touches it again but for `ready`.
    let worker = unsafe { &*(argument as *const Worker) };
    own_descriptors(worker);
    // SAFETY: the control memory is mapped for the life of the process and holds atomics only; gettid touches nothing.
    let (control, thread) = unsafe { (&*worker.control, syscall(libc::SYS_gettid, [0; 6])) };
    hurry();
    control.worker.store(thread as u32, Ordering::Release);
    worker.ready.store(1, Ordering::Release);
    let mut last = 0;
    let mut cores = Cores::of_this_thread();
    loop {
        worker.assume();
        let command = control.command.load(Ordering::Acquire);
        if command == last {
            futex(&control.command, FUTEX_WAIT, last);
            continue;
        }
        last = command;
        cores.follow(control.core.load(Ordering::Relaxed));
        obey(worker, control);
        control.done.store(command, Ordering::Release);
        futex(&control.done, FUTEX_WAKE, 1);
    }
}

/// Leave the program's table of files, so that a program that closes all its descriptors does not close ours, and keep
/// nothing of the program's open.
fn own_descriptors(worker: &Worker) {
    let mut kept = [worker.socket, worker.paged, worker.staged];
    for at in 0..kept.len() {
        for other in at + 1..kept.len() {
            if kept[other] < kept[at] {
                kept.swap(at, other);
            }
        }
    }
    // SAFETY: unshare gives this thread its own table; closing is then seen by no other thread.
    unsafe {
        syscall(libc::SYS_unshare, [libc::CLONE_FILES as usize, 0, 0, 0, 0, 0]);
        let mut next = 0;
        for fd in kept {
            if fd > next {
                syscall(libc::SYS_close_range, [next as usize, fd as usize - 1, 0, 0, 0, 0]);
            }
            next = fd + 1;
        }
        syscall(libc::SYS_close_range, [next as usize, u32::MAX as usize, 0, 0, 0, 0]);
    }
}

/// Faults wait for this thread: let it run first, if the user may ask for that.
fn hurry() {
    const PRIO_PROCESS: usize = 0;
    // SAFETY: changes the scheduling of this thread only.
    unsafe {
        syscall(libc::SYS_setpriority, [PRIO_PROCESS, 0, NICENESS as usize, 0, 0, 0]);
    }
}

/// Bytes of a set of cores: the kernel's are no larger.
const CORE_SET_BYTES: usize = 1024;

/// Where this thread runs. The agent asks for that, and does not do it: it has rights that the program does not have.
struct Cores {
    /// The cores that it may run on, a bit for each; empty if they are not known.
    allowed: [u8; CORE_SET_BYTES],
    /// The last one asked for, plus 1; 0 for any.
    current: u32,
}

impl Cores {
    fn of_this_thread() -> Self {
        let mut allowed = [0; CORE_SET_BYTES];
        // SAFETY: the kernel writes at most as many bytes.
        unsafe {
            syscall(libc::SYS_sched_getaffinity, [0, CORE_SET_BYTES, allowed.as_mut_ptr() as usize, 0, 0, 0]);
        }
        Self { allowed, current: 0 }
    }

    /// Move to the core `wanted` - 1; to any if `wanted` is 0.
    fn follow(&mut self, wanted: u32) {
        if wanted == self.current {
            return;
        }
        self.current = wanted;
        let mut set = self.allowed;
        if let Some(core) = wanted.checked_sub(1) {
            set = [0; CORE_SET_BYTES];
            if let Some(byte) = set.get_mut(core as usize / 8) {
                *byte = 1 << (core % 8);
            }
        }
        // SAFETY: the kernel reads the set. An empty one it refuses, and a core that is not allowed it leaves out.
        unsafe {
            syscall(libc::SYS_sched_setaffinity, [0, CORE_SET_BYTES, set.as_ptr() as usize, 0, 0, 0]);
        }
    }
}

fn futex(word: &AtomicU32, operation: usize, value: u32) {
    // SAFETY: the word lives as long as the process.
    unsafe {
        syscall(libc::SYS_futex, [word.as_ptr() as usize, operation, value as usize, 0, 0, 0]);
    }
}

fn obey(worker: &Worker, control: &WorkerControl) {
    let buffer = control.buffer.load(Ordering::Relaxed) as usize % STAGING_BUFFERS;
    let record = &control.batches[buffer];
    let count = (record.count.load(Ordering::Relaxed) as usize).min(BATCH_PAGES_MAX);
    let room = worker.staging + buffer * BATCH_PAGES_MAX * PAGE;
    if batch::obey(&mut Memory { worker, room }, &Command { record, count }).is_err() {
        give_up();
    }
}

/// A command, as the agent wrote it.
struct Command<'a> {
    record: &'a BatchRecord,
    count: usize,
}

impl Batch for Command<'_> {
    fn count(&self) -> usize {
        self.count
    }

    fn address(&self, place: usize) -> usize {
        self.record.addresses[place].load(Ordering::Relaxed) as usize
    }

    fn set(&self, place: usize, status: u32) {
        self.record.statuses[place].store(status, Ordering::Relaxed);
    }

    fn is_moved(&self, place: usize) -> bool {
        self.record.statuses[place].load(Ordering::Relaxed) == STATUS_MOVED
    }
}

/// The program's memory, and a buffer of staging at `room`.
struct Memory<'a> {
    worker: &'a Worker,
    room: usize,
}

impl Memory<'_> {
    fn antechamber(&self, place: usize) -> usize {
        self.worker.antechamber + place * PAGE
    }
}

impl Pages for Memory<'_> {
    fn occupied(&mut self, places: &mut [bool]) {
        let mut present = [0u8; BATCH_PAGES_MAX];
        // SAFETY: the kernel writes a byte for each page of the antechamber.
        unsafe {
            let bytes = BATCH_PAGES_MAX * PAGE;
            syscall(libc::SYS_mincore, [self.antechamber(0), bytes, (&raw mut present) as usize, 0, 0, 0]);
        }
        places.iter_mut().zip(present).for_each(|(place, present)| *place = present & 1 == 1);
    }

    fn take(&mut self, address: usize, place: usize, pages: usize) -> (usize, isize) {
        uffd::move_pages(self.worker.paged, self.antechamber(place), address, pages)
    }

    /// A page shared since a fork cannot be moved until it is written: have the kernel make the program its own copy. The page is
    /// there (a missing one would not be busy), and cannot go before the agent has read the event, which it does
    /// not while it waits for us; so this never faults.
    fn make_own(&mut self, address: usize) -> isize {
        // Whoever writes a protected page waits until the agent allows it, and the agent waits for us. While it has an event unread the
        // kernel does not lift that.
        if uffd::unprotect(self.worker.paged, address, PAGE) == -(libc::EAGAIN as isize) {
            return -(libc::EBUSY as isize);
        }
        // SAFETY: populating for write changes no byte of the page.
        unsafe {
            syscall(libc::SYS_madvise, [address, PAGE, MADV_POPULATE_WRITE, 0, 0, 0]);
        }
        0
    }

    fn stage(&mut self, place: usize, pages: usize) -> (usize, isize) {
        uffd::move_pages(self.worker.staged, self.room + place * PAGE, self.antechamber(place), pages)
    }

    fn empty_staging(&mut self) {
        // SAFETY: the range is the worker's own buffer, and the agent has copied what was there.
        unsafe {
            let bytes = BATCH_PAGES_MAX * PAGE;
            syscall(libc::SYS_madvise, [self.room, bytes, libc::MADV_DONTNEED as usize, 0, 0, 0]);
        }
    }
}

/// A taken page can neither go on nor back, or rights cannot be given up: it is better that the program ends than that it reads zeros, or
/// keeps a thread that may do what it may not.
fn give_up() -> ! {
    loop {
        // SAFETY: ends the process.
        unsafe {
            let pid = syscall(libc::SYS_getpid, [0; 6]);
            syscall(libc::SYS_kill, [pid as usize, libc::SIGABRT as usize, 0, 0, 0, 0]);
            syscall(libc::SYS_exit_group, [134, 0, 0, 0, 0, 0]);
        }
    }
}
