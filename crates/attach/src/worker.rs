//! The worker: a process that shares the program's memory and moves pages out of it at the agent's
//! command.
//!
//! It is a process and no thread, so that the program has the threads, signals, children and limits
//! that it would have without Aquifer, and so that a program that is stopped can still be paged.
//! It depends on none of the program's pageable memory: raw system calls, its own stack, its own
//! descriptors, no thread-local storage. While the agent is away it waits and harms nothing.
//!
//! The program can write to its memory, its stack included. So it confines itself to the few calls
//! that it makes (`confine`), and has nothing that the program does not have.

mod confine;
mod cores;
mod leave;
pub mod start;

use core::sync::atomic::{AtomicU32, Ordering};

use aquifer_ipc::control::{BatchRecord, STATUS_MOVED};
use aquifer_ipc::{BATCH_PAGES_MAX, STAGING_BUFFERS, WorkerControl};

use crate::batch::{self, Batch, Pages};
use crate::raw::syscall;
use crate::uffd;
use cores::Cores;
use leave::Watch;

const PAGE: usize = 4096;
/// Size of the worker's stack. The [`Worker`] is at its lower end.
pub const STACK_BYTES: usize = 16 * PAGE;
const NICENESS: isize = -15;
const FUTEX_WAKE: usize = 1;
const MADV_POPULATE_WRITE: usize = 23;

/// What the worker knows. It lies at the lower end of the worker's own stack.
#[repr(C)]
pub struct Worker {
    /// [`start::STARTING`], [`start::READY`], or a negative errno if the worker could not start.
    state: AtomicU32,
    /// The starter's descriptor of the worker's process.
    pidfd: i32,
    /// What the process in between has for the starter: the worker's number, or a negative errno.
    spawned: isize,
    /// The word that the kernel clears when the thread that started the worker ends or executes
    /// another program; null if there is none.
    thread_word: *const AtomicU32,
    /// The socket to the agent, held open so that the agent notices the worker's end.
    socket: i32,
    /// The program's userfaultfd: moves on it fail while the agent has an event unread.
    paged: i32,
    /// The event-free userfaultfd of the staging area.
    staged: i32,
    /// See [`aquifer_ipc::ProgramHello::bounce_buffer`].
    antechamber: usize,
    /// See [`aquifer_ipc::ProgramHello::staging`].
    staging: usize,
    /// The memory shared with the agent.
    control: *const WorkerControl,
}

impl Worker {
    pub fn new(
        socket: i32,
        paged: i32,
        staged: i32,
        antechamber: usize,
        staging: usize,
        control: *const WorkerControl,
    ) -> Self {
        Self {
            state: AtomicU32::new(start::STARTING),
            pidfd: -1,
            spawned: 0,
            thread_word: leave::thread_word(),
            socket,
            paged,
            staged,
            antechamber,
            staging,
            control,
        }
    }
}

/// The process's entry.
extern "C" fn main(argument: usize) -> ! {
    // SAFETY: the starter placed a `Worker` there, and afterwards only reads `state`.
    let worker = unsafe { &*(argument as *const Worker) };
    leave_program(worker);
    let mut cores = Cores::of_this_process();
    // SAFETY: returns a number.
    let number = unsafe { syscall(libc::SYS_getpid, [0; 6]) };
    let confined = confine::confine();
    if confined < 0 {
        worker.state.store(confined as u32, Ordering::Release);
        exit();
    }
    // SAFETY: the control memory is mapped as long as the memory exists, and holds atomics only.
    let control = unsafe { &*worker.control };
    control.worker.store(number as u32, Ordering::Release);
    worker.state.store(start::READY, Ordering::Release);
    let mut watch = Watch::new(worker);
    let mut last = 0;
    loop {
        let command = control.command.load(Ordering::Acquire);
        if command == last {
            watch.wait_for_command(last);
            continue;
        }
        last = command;
        cores.follow(control.core.load(Ordering::Relaxed));
        obey(worker, control);
        control.done.store(command, Ordering::Release);
        wake(&control.done, 1);
    }
}

/// Leaves everything that the program may notice: its process group, its folder and its descriptors.
fn leave_program(worker: &Worker) {
    const PRIO_PROCESS: usize = 0;
    // SAFETY: changes this process only, and passes constant strings.
    unsafe {
        // So that a signal to the program's process group or from its terminal does not stop it. A session
        // of its own would also be a scheduling group of its own, in which a niceness has no effect.
        syscall(libc::SYS_setpgid, [0; 6]);
        // So that the file system of the program's folder can be unmounted.
        syscall(libc::SYS_chdir, [c"/".as_ptr() as usize, 0, 0, 0, 0, 0]);
        let name = c"aquifer-worker".as_ptr() as usize;
        syscall(libc::SYS_prctl, [libc::PR_SET_NAME as usize, name, 0, 0, 0, 0]);
        // Faults wait for this process: let it run first, if the user may ask for that.
        syscall(libc::SYS_setpriority, [PRIO_PROCESS, 0, NICENESS as usize, 0, 0, 0]);
    }
    close_others(worker);
}

/// Closes all descriptors but the worker's own.
fn close_others(worker: &Worker) {
    let mut kept = [worker.socket, worker.paged, worker.staged];
    for at in 0..kept.len() {
        for other in at + 1..kept.len() {
            if kept[other] < kept[at] {
                kept.swap(at, other);
            }
        }
    }
    // SAFETY: closes descriptors of this process only, which has its own table.
    unsafe {
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

/// Wakes up to `count` threads or processes that wait on a word.
fn wake(word: &AtomicU32, count: usize) {
    // SAFETY: the kernel only looks the address up.
    unsafe {
        syscall(libc::SYS_futex, [word.as_ptr() as usize, FUTEX_WAKE, count, 0, 0, 0]);
    }
}

/// Ends this process.
fn exit() -> ! {
    loop {
        // SAFETY: ends this process only.
        unsafe {
            syscall(libc::SYS_exit_group, [0; 6]);
        }
    }
}

fn obey(worker: &Worker, control: &WorkerControl) {
    let buffer = control.buffer.load(Ordering::Relaxed) as usize % STAGING_BUFFERS;
    let record = &control.batches[buffer];
    let count = (record.count.load(Ordering::Relaxed) as usize).min(BATCH_PAGES_MAX);
    let room = worker.staging + buffer * BATCH_PAGES_MAX * PAGE;
    if batch::obey(&mut Memory { worker, room }, &Command { record, count }).is_err() {
        // A page can move neither on nor back. The agent notices the end and kills the program: that
        // is better than a program that reads zeros.
        exit();
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
