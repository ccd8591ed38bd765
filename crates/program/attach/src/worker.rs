//! The worker: a process that shares the program's memory and moves pages out of it at the agent's
//! command.
//!
//! The worker is a process and not a thread, so that the program has the threads, signals, children
//! and limits that it would have without Aquifer, and so that a stopped program can still be paged
//! (`docs/decisions/0018-worker-is-a-process.md`). The worker needs none of the program's pageable
//! memory: it makes raw system calls, and has its own stack, its own descriptors and no
//! thread-local storage. While there is no agent, it waits for a command.
//!
//! The program can write to the worker's memory and stack. So the worker confines itself to the
//! system calls that it makes (`confine`), and has no right that the program does not have.

mod confine;
mod cores;
pub mod last_process;
pub mod start;

use core::sync::atomic::{AtomicU32, Ordering};

use aquifer_ipc::control::{BatchRecord, STATUS_MOVED};
use aquifer_ipc::{BATCH_PAGES_MAX, STAGING_BUFFERS, WorkerControl};

use crate::batch::{PageBatch, PageMover, move_batch};
use crate::processes::WORKER_NAME;
use crate::raw::syscall;
use crate::uffd;
use cores::CoreAffinity;
use last_process::LastProcessWatch;

const PAGE: usize = 4096;
/// Size of the worker's stack, with the [`Worker`] at its lower end.
pub const STACK_BYTES: usize = 16 * PAGE;
const NICENESS: isize = -15;
const FUTEX_WAKE: usize = 1;
/// `FUTEX_WAKE_OP | FUTEX_PRIVATE_FLAG`: changes the word at a second address, too.
const FUTEX_WAKE_OP: usize = 5 | 128;
/// `FUTEX_OP(FUTEX_OP_OR, 0, FUTEX_OP_CMP_EQ, -2048)`: sets no bit, and wakes a thread that waits
/// there if the word is the smallest number that can be given.
const SET_NO_BIT: usize = 2 << 28 | 0x800;

/// The data by which the worker executes commands, at the lower end of its stack.
#[repr(C)]
pub struct Worker {
    /// [`start::STARTING`], [`start::READY`], or a negative errno if the worker could not confine
    /// itself.
    state: AtomicU32,
    /// Pidfd of the worker, in the process that starts it.
    pidfd: i32,
    /// Result of the intermediate process for the process that starts the worker: the worker's
    /// process number, or a negative errno.
    spawn_result: isize,
    /// The word that the kernel clears when the thread that is attached ends or executes another
    /// program; null if there is none.
    thread_word: *const AtomicU32,
    /// The socket to the agent. The worker keeps it open so that the agent notices the worker's
    /// end.
    socket: i32,
    /// The program's userfaultfd. Moves by it fail while an event is unread.
    program_uffd: i32,
    /// The userfaultfd of the staging buffers, which has no events.
    staging_uffd: i32,
    /// Address of the bounce buffer: [`aquifer_ipc::ProgramHello::bounce_buffer`].
    bounce_buffer: usize,
    /// Address of the staging buffers: [`aquifer_ipc::ProgramHello::staging`].
    staging: usize,
    /// The memory that is shared with the agent.
    control: *const WorkerControl,
}

impl Worker {
    pub fn new(
        socket: i32,
        program_uffd: i32,
        staging_uffd: i32,
        bounce_buffer: usize,
        staging: usize,
        control: *const WorkerControl,
        thread_word: *const AtomicU32,
    ) -> Self {
        Self {
            state: AtomicU32::new(start::STARTING),
            pidfd: -1,
            spawn_result: 0,
            thread_word,
            socket,
            program_uffd,
            staging_uffd,
            bounce_buffer,
            staging,
            control,
        }
    }
}

/// Entry of the worker's process.
extern "C" fn main(argument: usize) -> ! {
    // SAFETY: `start` has written a `Worker` there, and only reads `state` and `pidfd` afterwards.
    let worker = unsafe { &*(argument as *const Worker) };
    separate_from_program(worker);
    let mut affinity = CoreAffinity::of_this_process();
    // SAFETY: only returns a number.
    let pid = unsafe { syscall(libc::SYS_getpid, [0; 6]) };
    let confined = confine::confine();
    if confined < 0 {
        worker.state.store(confined as u32, Ordering::Release);
        exit();
    }
    // SAFETY: the control memory is never unmapped, and holds only atomics.
    let control = unsafe { &*worker.control };
    control.worker.store(pid as u32, Ordering::Release);
    worker.state.store(start::READY, Ordering::Release);
    let mut watch = LastProcessWatch::new(worker);
    let mut last = 0;
    loop {
        let command = control.command.load(Ordering::Acquire);
        if command == last {
            watch.wait_for_command(last);
            continue;
        }
        last = command;
        affinity.move_to(control.core.load(Ordering::Relaxed));
        execute_command(worker, control);
        control.done.store(command, Ordering::Release);
        wake(&control.done, 1);
    }
}

/// Leaves the program's process group and folder, closes the program's descriptors, and sets the
/// name and the priority of the worker.
fn separate_from_program(worker: &Worker) {
    const PRIO_PROCESS: usize = 0;
    // SAFETY: changes this process only, and passes constant strings.
    unsafe {
        // A signal to the program's process group or from its terminal must not stop the worker. A
        // new session would be another scheduling group (autogroup), in which the priority below
        // would have no effect on the program.
        syscall(libc::SYS_setpgid, [0; 6]);
        // The worker must not prevent an unmount of the file system that has the program's folder.
        syscall(libc::SYS_chdir, [c"/".as_ptr() as usize, 0, 0, 0, 0, 0]);
        let name = WORKER_NAME.as_ptr() as usize;
        syscall(libc::SYS_prctl, [libc::PR_SET_NAME as usize, name, 0, 0, 0, 0]);
        // Faults wait for this process, so it should run first. The kernel refuses that to most
        // users.
        syscall(libc::SYS_setpriority, [PRIO_PROCESS, 0, NICENESS as usize, 0, 0, 0]);
    }
    close_other_descriptors(worker);
}

/// Closes all descriptors except those that the worker uses.
fn close_other_descriptors(worker: &Worker) {
    let mut kept = [worker.socket, worker.program_uffd, worker.staging_uffd];
    for at in 0..kept.len() {
        for other in at + 1..kept.len() {
            if kept[other] < kept[at] {
                kept.swap(at, other);
            }
        }
    }
    // SAFETY: this process has its own descriptor table, so no descriptor of the program is closed.
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
    // SAFETY: the kernel only uses the address.
    unsafe {
        syscall(libc::SYS_futex, [word.as_ptr() as usize, FUTEX_WAKE, count, 0, 0, 0]);
    }
}

/// Writes to a page without changing it. Returns 0, or a negative errno if there is no page that
/// can be written, or if the write would be a fault that waits.
///
/// `unused_word`: a word at which no thread waits.
fn write_without_waiting(unused_word: &AtomicU32, address: usize) -> isize {
    // SAFETY: sets no bit of a word of the page, by one atomic instruction. It may wake a thread
    // that waits at this word, which each futex allows.
    unsafe {
        syscall(libc::SYS_futex, [unused_word.as_ptr() as usize, FUTEX_WAKE_OP, 0, 0, address, SET_NO_BIT])
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

/// Moves the pages of the current command into its staging buffer. Ends the worker if that cannot
/// be completed.
fn execute_command(worker: &Worker, control: &WorkerControl) {
    let buffer = control.buffer.load(Ordering::Relaxed) as usize % STAGING_BUFFERS;
    let record = &control.batches[buffer];
    let count = (record.count.load(Ordering::Relaxed) as usize).min(BATCH_PAGES_MAX);
    let staging_buffer = worker.staging + buffer * BATCH_PAGES_MAX * PAGE;
    if move_batch(&mut WorkerMemory { worker, staging_buffer }, &CommandBatch { record, count }).is_err() {
        // A page is in the bounce buffer and cannot be moved. The agent notices that the worker has
        // ended, and ends the program, which could otherwise read zeros.
        exit();
    }
}

/// The batch of a command, as the agent has written it into the control memory.
struct CommandBatch<'a> {
    record: &'a BatchRecord,
    count: usize,
}

impl PageBatch for CommandBatch<'_> {
    fn count(&self) -> usize {
        self.count
    }

    fn address(&self, index: usize) -> usize {
        self.record.addresses[index].load(Ordering::Relaxed) as usize
    }

    fn set_status(&self, index: usize, status: u32) {
        self.record.statuses[index].store(status, Ordering::Relaxed);
    }

    fn is_moved(&self, index: usize) -> bool {
        self.record.statuses[index].load(Ordering::Relaxed) == STATUS_MOVED
    }
}

/// The program's memory, the bounce buffer, and one of the staging buffers.
struct WorkerMemory<'a> {
    worker: &'a Worker,
    /// Address of the staging buffer.
    staging_buffer: usize,
}

impl WorkerMemory<'_> {
    /// Address of a page of the bounce buffer.
    fn bounce_page(&self, index: usize) -> usize {
        self.worker.bounce_buffer + index * PAGE
    }
}

impl PageMover for WorkerMemory<'_> {
    fn find_occupied(&mut self, occupied: &mut [bool]) {
        let mut present = [0u8; BATCH_PAGES_MAX];
        // SAFETY: the kernel writes a byte for each page of the bounce buffer.
        unsafe {
            let bytes = BATCH_PAGES_MAX * PAGE;
            syscall(libc::SYS_mincore, [self.bounce_page(0), bytes, (&raw mut present) as usize, 0, 0, 0]);
        }
        occupied.iter_mut().zip(present).for_each(|(is_occupied, present)| *is_occupied = present & 1 == 1);
    }

    /// Moves the pages before the one with the word that the worker reads. That page stays, whether
    /// it is pinned or not: the program can overwrite its pins, and the agent would wait for a
    /// worker that waits for the agent.
    fn move_out(&mut self, address: usize, index: usize, pages: usize) -> (usize, isize) {
        let pages = match (self.worker.thread_word as usize & !(PAGE - 1)).checked_sub(address) {
            Some(offset) if offset < pages * PAGE => offset / PAGE,
            _ => pages,
        };
        if pages == 0 {
            return (0, -(libc::EBUSY as isize));
        }
        uffd::move_pages(self.worker.program_uffd, self.bounce_page(index), address, pages)
    }

    /// Makes the kernel copy the page, by a write that changes nothing.
    ///
    /// The worker must not fault, because the agent waits for it and resolves no fault. But another
    /// thread can put a missing or protected page there meanwhile. So the futex request writes: the
    /// kernel refuses it where it would be a fault that waits, also within the kernel.
    fn make_private(&mut self, address: usize) -> isize {
        // A write to a protected page would be a fault. While an event is unread the kernel does
        // not remove the protection.
        if uffd::unprotect(self.worker.program_uffd, address, PAGE) == -(libc::EAGAIN as isize) {
            return -(libc::EBUSY as isize);
        }
        write_without_waiting(&self.worker.state, address);
        // The next move reports the result.
        0
    }

    fn stage(&mut self, index: usize, pages: usize) -> (usize, isize) {
        let to = self.staging_buffer + index * PAGE;
        uffd::move_pages(self.worker.staging_uffd, to, self.bounce_page(index), pages)
    }

    fn empty_staging(&mut self) -> bool {
        let bytes = BATCH_PAGES_MAX * PAGE;
        // SAFETY: only this library uses the ranges, and the agent has copied the pages that are
        // dropped.
        unsafe {
            let drop_pages = || {
                let advice = libc::MADV_DONTNEED as usize;
                syscall(libc::SYS_madvise, [self.staging_buffer, bytes, advice, 0, 0, 0])
            };
            if drop_pages() == 0 {
                return true;
            }
            // `mlockall` has locked both buffers. While they are, the kernel drops no page, and
            // moves locked pages of the program.
            let staging_bytes = STAGING_BUFFERS * bytes;
            syscall(libc::SYS_munlock, [self.worker.staging, staging_bytes, 0, 0, 0, 0]);
            syscall(libc::SYS_munlock, [self.worker.bounce_buffer, bytes, 0, 0, 0, 0]);
            drop_pages() == 0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map_page() -> usize {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, which is never unmapped.
        let at = unsafe {
            libc::mmap(core::ptr::null_mut(), PAGE, rights, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        assert_ne!(at, libc::MAP_FAILED);
        at as usize
    }

    #[test]
    fn a_write_where_a_fault_would_wait_is_refused() {
        let unused_word = AtomicU32::new(0);
        let (present, missing) = (map_page(), map_page());
        // SAFETY: the page is mapped and aligned.
        let word = unsafe { AtomicU32::from_ptr(present as *mut u32) };
        word.store(0xffff_f800, Ordering::Relaxed);
        assert!(write_without_waiting(&unused_word, present) >= 0);
        assert_eq!(word.load(Ordering::Relaxed), 0xffff_f800);
        let fd = uffd::create();
        if fd < 0 {
            return aquifer_tests_support::skip("userfaultfd is not permitted");
        }
        assert_eq!(uffd::enable(fd, 0), 0);
        assert_eq!(uffd::register(fd, missing, PAGE), 0);
        assert_eq!(write_without_waiting(&unused_word, missing), -(libc::EFAULT as isize));
        assert!(write_without_waiting(&unused_word, present) >= 0);
    }
}
