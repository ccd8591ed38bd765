//! Releases orphans whose memory is gone.
//!
//! The shadow of an agent that has died sends all userfaultfds of that agent, also when the next
//! agent has claimed the share already. The next agent has the userfaultfds of its programs from
//! other items, so the keeper would hold these until another agent claims the share.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use aquifer_ipc::HeldKind;
use aquifer_uffd::{UFFDIO_ZEROPAGE, uffdio_range, uffdio_zeropage};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, ioctl};

use super::share_items::ShareItems;

const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Checks the orphans of a share once a second.
#[derive(Debug)]
pub(super) struct OrphanWatch {
    next: Instant,
    /// Receives the numbers of orphans whose memory is gone, from the thread that checks.
    gone: Option<Receiver<Vec<u64>>>,
}

impl OrphanWatch {
    pub fn new() -> Self {
        Self { next: Instant::now(), gone: None }
    }

    /// Releases the orphans that the last check has found, and begins another check if it is due.
    pub fn poll(&mut self, items: &mut ShareItems) {
        match self.gone.as_ref().map(Receiver::try_recv) {
            Some(Ok(gone)) => {
                gone.into_iter().for_each(|id| items.remove(HeldKind::Orphan, id));
                self.gone = None;
            }
            // The thread still waits for the lock of a process's memory.
            Some(Err(TryRecvError::Empty)) => return,
            Some(Err(TryRecvError::Disconnected)) => self.gone = None,
            None => {}
        }
        if Instant::now() < self.next {
            return;
        }
        self.next = Instant::now() + CHECK_INTERVAL;
        let orphans = items.orphans();
        if orphans.is_empty() {
            return;
        }
        let (sender, receiver) = channel();
        let check = move || {
            let is_gone = |(id, uffd): (u64, OwnedFd)| is_memory_gone(uffd).then_some(id);
            let _ = sender.send(orphans.into_iter().filter_map(is_gone).collect());
        };
        // A thread, because the kernel waits for a lock of the memory, which a hostile process can
        // hold.
        if std::thread::Builder::new().name("orphans".into()).spawn(check).is_ok() {
            self.gone = Some(receiver);
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "numbers of requests have 32 bits")]
const ZERO_PAGE: Opcode = UFFDIO_ZEROPAGE as Opcode;

/// Whether the memory of a userfaultfd is gone.
///
/// A fill at the second page does nothing, and reports whether there is a memory: an area is only
/// registered if it is large, and below `vm.mmap_min_addr` no program has one.
fn is_memory_gone(uffd: impl AsFd) -> bool {
    let mut fill = uffdio_zeropage { range: uffdio_range { start: 4096, len: 4096 }, mode: 0, zeropage: 0 };
    // SAFETY: UFFDIO_ZEROPAGE reads and writes one `struct uffdio_zeropage`, and changes no
    // registered memory.
    let filled = unsafe { ioctl(uffd, Updater::<ZERO_PAGE, uffdio_zeropage>::new(&mut fill)) };
    filled == Err(Errno::SRCH)
}
