//! Commands to a program's worker, through memory that both map. The agent trusts nothing that the
//! program could have written there.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

use aquifer_ipc::control::{BatchRecord, CONTROL_BYTES, PROCESS_ENDED, STATUS_PENDING, WORKER_IS_LAST};
use aquifer_ipc::{BATCH_PAGES_MAX, WorkerControl};
use aquifer_pager::{PAGE_BYTES, PAGES_MAX, PageNumber};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::thread::futex;

use crate::areas::{Area, Areas};
use crate::kernel::MoveOutcome;
use crate::mutation::Mutation;

/// Timeout of one wait for a worker, after which the caller does other work.
const WAIT_TIMEOUT: Duration = Duration::from_millis(50);

/// The agent's mapping of a control memory.
#[derive(Debug)]
pub struct ControlMemory(*mut WorkerControl);

// SAFETY: the mapping belongs to this value alone and holds atomics only.
unsafe impl Send for ControlMemory {}
// SAFETY: for the reason given for `Send`.
unsafe impl Sync for ControlMemory {}

impl ControlMemory {
    fn map(fd: &OwnedFd) -> io::Result<Self> {
        if rustix::fs::fstat(fd)?.st_size < i64::try_from(CONTROL_BYTES).expect("a few pages") {
            return Err(io::Error::other("the control memory is too small"));
        }
        // SAFETY: a new shared mapping at an address of the kernel's choice, of a sealed file of
        // that length.
        let control = unsafe {
            mmap(
                std::ptr::null_mut(),
                CONTROL_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                0,
            )?
        };
        Ok(Self(control.cast()))
    }

    fn control(&self) -> &WorkerControl {
        // SAFETY: mapped until `drop`, zeroed at first; all fields are atomics, so whatever the
        // program writes is valid.
        unsafe { &*self.0 }
    }

    /// The process id that the worker reports, in its own PID namespace. 0 before it runs, and
    /// after it has ended by itself.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.control().worker.load(Acquire)
    }

    /// The pages that the program has pinned so far, sorted. An entry that is not stored yet is 0.
    #[must_use]
    pub fn pins(&self) -> Vec<PageNumber> {
        let pins = &self.control().pins;
        let known = (self.control().pin_count.load(Acquire) as usize).min(pins.len());
        let pages = pins[..known].iter().map(|pin| pin.load(Acquire));
        // The program writes the entries, so they may be invalid.
        let mut pins: Vec<PageNumber> = pages.filter(|page| *page < PAGES_MAX).collect();
        pins.sort_unstable();
        pins
    }
}

impl Drop for ControlMemory {
    fn drop(&mut self) {
        // SAFETY: nothing refers to the mapping any more.
        if let Err(error) = unsafe { munmap(self.0.cast(), CONTROL_BYTES) } {
            tracing::error!(%error, "control memory cannot be unmapped");
        }
    }
}

/// The agent's end of a control memory.
#[derive(Debug)]
pub struct WorkerPort {
    memory: Arc<ControlMemory>,
    fd: Arc<OwnedFd>,
    command: u32,
    pins: Vec<PageNumber>,
    pins_seen: u32,
}

impl WorkerPort {
    /// Creates a control memory, which the caller sends to the program.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn new() -> io::Result<Self> {
        let fd = memfd_create("aquifer-control", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, CONTROL_BYTES as u64)?;
        // The program has the descriptor, too. Without the seals it could truncate the file, and an
        // access of the agent would raise SIGBUS.
        rustix::fs::fcntl_add_seals(
            &fd,
            rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW | rustix::fs::SealFlags::SEAL,
        )?;
        let port = Self::map(fd)?;
        port.control().initialise();
        Ok(port)
    }

    /// Opens a control memory that an earlier agent has created.
    ///
    /// # Errors
    /// If the file is not a control memory of this version.
    pub fn recover(fd: OwnedFd) -> io::Result<Self> {
        let mut port = Self::map(fd)?;
        if !port.control().is_valid() {
            return Err(io::Error::other("it was made by another version of the agent"));
        }
        port.command = port.control().command.load(Acquire);
        Ok(port)
    }

    fn map(fd: OwnedFd) -> io::Result<Self> {
        let memory = Arc::new(ControlMemory::map(&fd)?);
        Ok(Self { memory, fd: Arc::new(fd), command: 0, pins: Vec::new(), pins_seen: 0 })
    }

    /// The descriptor of the control memory.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The descriptor of the control memory, for another owner.
    #[must_use]
    pub fn shared_fd(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.fd)
    }

    /// The memory itself. The worker of the simulator works in it.
    #[must_use]
    pub fn control(&self) -> &WorkerControl {
        self.memory.control()
    }

    /// Shares the mapping with a thread that only reads it.
    #[must_use]
    pub fn memory(&self) -> Arc<ControlMemory> {
        Arc::clone(&self.memory)
    }

    /// The process id that the worker reports, in its own PID namespace. 0 before it runs, and
    /// after it has ended by itself.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.memory.process()
    }

    /// Whether the program may have memory that its forked children do not inherit, or inherit
    /// empty (`MADV_DONTFORK`, `MADV_WIPEONFORK`).
    #[must_use]
    pub fn has_fork_advice(&self) -> bool {
        self.control().has_fork_advice.load(Acquire) != 0
    }

    /// Whether the worker is the last process that has the memory.
    #[must_use]
    pub fn is_last(&self) -> bool {
        self.control().process_ended.load(Acquire) == WORKER_IS_LAST
    }

    /// Releases all staging buffers, whose contents are not needed any more.
    pub fn release_all(&self) {
        self.control().batches.iter().for_each(|batch| batch.count.store(0, Release));
    }

    /// Reports a page of a finished batch as kept.
    pub fn forget_move(&self, buffer: usize, position: usize) {
        self.control().batches[buffer].statuses[position].store(libc::EBUSY.cast_unsigned(), Release);
    }

    /// Commands the worker to check whether another process has the memory, and to end otherwise.
    pub fn report_process_end(&self) {
        self.control().process_ended.fetch_max(PROCESS_ENDED, Release);
        self.wake();
    }

    /// Sets the core on which the worker runs from the next command on; `None` for any core.
    pub fn set_core(&self, core: Option<usize>) {
        let number = core.and_then(|core| u32::try_from(core + 1).ok()).unwrap_or(0);
        self.control().core.store(number, Relaxed);
    }

    /// Reads which pages the program has pinned. Pages that it pins later count after
    /// [`Self::unlock_pins`].
    pub fn lock_pins(&mut self) {
        self.control().lock_pins();
        self.refresh_pins();
    }

    /// Ends [`Self::lock_pins`], after the moves that depend on the pins.
    pub fn unlock_pins(&self) {
        self.control().unlock_pins();
    }

    /// Removes the pinned pages from areas.
    pub fn remove_pinned(&self, areas: &mut Areas) {
        self.pins.iter().for_each(|page| areas.remove(Area { start: *page, end: page + 1 }));
    }

    fn refresh_pins(&mut self) {
        let count = self.control().pin_count.load(Acquire);
        if count == self.pins_seen {
            return;
        }
        self.pins = self.memory.pins();
        // The program raises the count before it stores the entry, so an entry of 0 is read again.
        self.pins_seen = if self.pins.contains(&0) { 0 } else { count };
    }

    /// Whether the program asked that a page stay.
    #[must_use]
    pub fn is_pinned(&self, page: PageNumber) -> bool {
        self.pins.binary_search(&page).is_ok()
    }

    /// Sends a command to move pages into staging buffer `buffer`.
    ///
    /// # Panics
    /// If there are more than [`BATCH_PAGES_MAX`] pages.
    pub fn begin_batch(&mut self, buffer: usize, pages: &[PageNumber]) {
        assert!(pages.len() <= BATCH_PAGES_MAX);
        let control = self.control();
        let batch = &control.batches[buffer];
        // An agent that takes over must not read the outcomes of an older command as those of this
        // one.
        batch.count.store(0, Release);
        for ((status, place), page) in batch.statuses.iter().zip(&batch.addresses).zip(pages) {
            status.store(STATUS_PENDING, Relaxed);
            place.store(page * PAGE_BYTES as u64, Relaxed);
        }
        batch.count.store(u32::try_from(pages.len()).expect("at most 64"), Release);
        control.buffer.store(u32::try_from(buffer).expect("a few buffers"), Relaxed);
        let command = self.command.wrapping_add(1);
        control.command.store(command, Release);
        self.command = command;
        self.wake();
    }

    /// Waits for the last command for a bounded time. Returns whether it is done; then the outcomes
    /// of its pages are appended to `out`.
    pub fn finish_batch(&self, buffer: usize, pages: usize, out: &mut Vec<MoveOutcome>) -> bool {
        let is_done = self.wait_for_command();
        if is_done {
            let statuses = &self.control().batches[buffer].statuses[..pages];
            out.extend(statuses.iter().map(|status| outcome(status.load(Relaxed))));
        }
        is_done
    }

    /// Whether the program has overwritten the number of the command, which only the agent stores.
    /// Then the worker may never complete it.
    #[must_use]
    pub fn is_command_overwritten(&self) -> bool {
        self.control().command.load(Acquire) != self.command
    }

    fn wake(&self) {
        if let Err(error) = futex::wake(&self.control().command, futex::Flags::empty(), 1) {
            tracing::warn!(%error, "cannot wake a worker");
        }
    }

    /// Waits for the last command, at most [`WAIT_TIMEOUT`]. Returns whether it is done.
    fn wait_for_command(&self) -> bool {
        let control = self.control();
        let done = control.done.load(Acquire);
        if done == self.command {
            return true;
        }
        let timeout = rustix::fs::Timespec { tv_sec: 0, tv_nsec: i64::from(WAIT_TIMEOUT.subsec_nanos()) };
        // The result does not matter, because the word is read again.
        let _ = futex::wait(&control.done, futex::Flags::empty(), done, Some(&timeout));
        control.done.load(Acquire) == self.command
    }

    /// Releases a staging buffer, whose pages have been copied.
    pub fn release_buffer(&self, buffer: usize) {
        self.control().batches[buffer].count.store(0, Release);
    }

    /// Returns, per staging buffer, the pages of another agent's last command that were not copied
    /// yet, and the outcome of each so far.
    #[must_use]
    pub fn unfinished_batches(&self) -> Vec<Vec<(PageNumber, MoveOutcome)>> {
        let pages = |batch: &BatchRecord| {
            let most = if Mutation::TrustBatchCount.is_active() { usize::MAX } else { BATCH_PAGES_MAX };
            let count = (batch.count.load(Acquire) as usize).min(most);
            let pages = batch.addresses[..count].iter().zip(&batch.statuses).map(|(address, status)| {
                let page = address.load(Relaxed) / PAGE_BYTES as u64;
                // The program can write the lists. An invalid page was not moved.
                let outcome =
                    if page < PAGES_MAX { outcome(status.load(Relaxed)) } else { MoveOutcome::Kept };
                (page, outcome)
            });
            pages.collect()
        };
        self.control().batches.iter().map(pages).collect()
    }

    /// Waits until the worker has completed the last command, and returns
    /// [`Self::unfinished_batches`]. Returns `None` if the program ends before that.
    pub fn batches(&self, mut is_alive: impl FnMut() -> bool) -> Option<Vec<Vec<(PageNumber, MoveOutcome)>>> {
        while !self.wait_for_command() {
            if !is_alive() {
                return None;
            }
        }
        self.unlock_pins();
        Some(self.unfinished_batches())
    }
}

/// The outcome of a page from the worker's errno. Only `ENOENT`, with which the kernel reports a
/// missing page, counts as absent.
fn outcome(status: u32) -> MoveOutcome {
    match i32::try_from(status) {
        Ok(0) => MoveOutcome::Moved,
        Ok(libc::ENOENT) => MoveOutcome::Absent,
        _ => MoveOutcome::Kept,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_that_are_no_pages_are_ignored() {
        let mut port = WorkerPort::new().unwrap();
        [u64::MAX, 7, PAGES_MAX].iter().for_each(|page| port.control().pin(*page));
        assert_eq!(port.memory().pins(), [7]);
        port.lock_pins();
        assert!(port.is_pinned(7) && !port.is_pinned(u64::MAX));
        let mut areas = Areas::default();
        areas.insert(Area { start: 6, end: 9 });
        port.remove_pinned(&mut areas);
        assert_eq!(areas.iter().map(|area| (area.start, area.end)).collect::<Vec<_>>(), [(6, 7), (8, 9)]);
    }
}
