//! Commands to a program's worker, through the memory that both map. Nothing that the program writes there is believed.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

use aquifer_ipc::control::CONTROL_BYTES;
use aquifer_ipc::{Control, TAKE_PAGES_MAX};
use aquifer_pager::{PAGE_BYTES, PageNumber};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::thread::futex;

use crate::kernel::Taken;

/// How long to wait for a worker before looking whether its program still lives.
const PATIENCE: Duration = Duration::from_millis(50);

/// The agent's end of a control memory.
#[derive(Debug)]
pub struct WorkerPort {
    control: *mut Control,
    fd: std::os::fd::OwnedFd,
    command: u32,
    pins: Vec<PageNumber>,
    pins_seen: u32,
}

// SAFETY: the mapping belongs to this value alone and holds atomics only; it may be used from any one thread.
unsafe impl Send for WorkerPort {}

impl WorkerPort {
    /// Fresh control memory, to be sent to the program.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn new() -> io::Result<Self> {
        let fd = memfd_create("aquifer-control", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, CONTROL_BYTES as u64)?;
        // The program holds this too: without the seals it could cut the file and have us die on a missing page.
        rustix::fs::fcntl_add_seals(
            &fd,
            rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW | rustix::fs::SealFlags::SEAL,
        )?;
        // SAFETY: a fresh shared mapping at an address of the kernel's choice, of a sealed file of that length.
        let control = unsafe {
            mmap(
                std::ptr::null_mut(),
                CONTROL_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &fd,
                0,
            )?
        };
        let port = Self { control: control.cast(), fd, command: 0, pins: Vec::new(), pins_seen: 0 };
        port.control().initialise();
        Ok(port)
    }

    /// The memory's descriptor.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn control(&self) -> &Control {
        // SAFETY: mapped until `drop`, zeroed at first; all fields are atomics, so whatever the program writes is valid.
        unsafe { &*self.control }
    }

    /// The worker's thread, as the program says; 0 before it runs.
    #[must_use]
    pub fn thread(&self) -> u32 {
        self.control().worker.load(Acquire)
    }

    /// Learn of pages that the program has pinned since.
    pub fn refresh_pins(&mut self) {
        let count = self.control().pin_count.load(Acquire);
        if count == self.pins_seen {
            return;
        }
        self.pins_seen = count;
        let known = (count as usize).min(self.control().pins.len());
        self.pins = self.control().pins[..known].iter().map(|pin| pin.load(Acquire)).collect();
        self.pins.sort_unstable();
    }

    /// Whether the program asked that a page stay.
    #[must_use]
    pub fn is_pinned(&self, page: PageNumber) -> bool {
        self.pins.binary_search(&page).is_ok()
    }

    /// Have the pages moved into staging buffer `buffer`, and wait. `is_alive` is asked now and then; when it says no,
    /// `false` comes back.
    pub fn take(
        &mut self,
        buffer: usize,
        pages: &[PageNumber],
        out: &mut Vec<Taken>,
        mut is_alive: impl FnMut() -> bool,
    ) -> bool {
        assert!(pages.len() <= TAKE_PAGES_MAX);
        let control = self.control();
        for (place, page) in control.addresses.iter().zip(pages) {
            place.store(page * PAGE_BYTES as u64, Relaxed);
        }
        control.count.store(u32::try_from(pages.len()).expect("at most 64"), Relaxed);
        control.buffer.store(u32::try_from(buffer).expect("a few buffers"), Relaxed);
        let command = self.command.wrapping_add(1);
        control.command.store(command, Release);
        let flags = futex::Flags::empty();
        if let Err(error) = futex::wake(&control.command, flags, 1) {
            tracing::warn!(%error, "a worker cannot be woken");
        }
        loop {
            let done = control.done.load(Acquire);
            if done == command {
                break;
            }
            let patience = rustix::fs::Timespec { tv_sec: 0, tv_nsec: i64::from(PATIENCE.subsec_nanos()) };
            // Any outcome means: look again.
            let _ = futex::wait(&control.done, flags, done, Some(&patience));
            if control.done.load(Acquire) != command && !is_alive() {
                return false;
            }
        }
        out.extend(control.statuses[..pages.len()].iter().map(|status| outcome(status.load(Relaxed))));
        self.command = command;
        true
    }
}

/// What a worker's errno means for the page. Only what the kernel says of a missing page counts as absent.
fn outcome(status: u32) -> Taken {
    match i32::try_from(status) {
        Ok(0) => Taken::Moved,
        Ok(libc::ENOENT) => Taken::Absent,
        _ => Taken::Kept,
    }
}

impl Drop for WorkerPort {
    fn drop(&mut self) {
        // SAFETY: nothing refers to the mapping any more.
        if let Err(error) = unsafe { munmap(self.control.cast(), CONTROL_BYTES) } {
            tracing::error!(%error, "control memory cannot be unmapped");
        }
    }
}
