//! A segment in the arena of a program.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::with_exposed_provenance_mut;
use std::sync::atomic::AtomicU64;

use rustix::mm::{
    Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap, mmap_anonymous, mremap_fixed, munmap,
};

use crate::arena::{ARENA_BYTES, Arena, ArenaError, reserve};
use crate::uffd;

/// What a touch of a page does that is elsewhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Touch {
    /// It waits until the page is here.
    Waits,
    /// It is SIGBUS.
    IsRefused,
}

/// A segment at its addresses.
#[derive(Debug)]
pub struct Mapping<'a> {
    _arena: &'a Arena,
    address: usize,
    bytes: usize,
    is_away: bool,
    /// Whether the addresses that it has left are reserved for it.
    is_reserved: bool,
}

impl<'a> Mapping<'a> {
    /// Maps the file of a segment at its addresses. Forked children do not have it.
    ///
    /// # Errors
    /// If the addresses are not possible, or the system refuses.
    pub fn new(arena: &'a Arena, address: usize, bytes: usize, file: impl AsFd) -> Result<Self, ArenaError> {
        Arena::check(address, bytes)?;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let start = with_exposed_provenance_mut(address);
        // SAFETY: the range is inside the arena, whose addresses nothing else uses. Ranges of
        // segments do not overlap, which the directory grants.
        unsafe {
            mmap(start, bytes, access, flags, file, 0).map_err(ArenaError::system("map a segment"))?;
            let mapping = Self { _arena: arena, address, bytes, is_away: false, is_reserved: true };
            madvise(start, bytes, Advice::LinuxDontFork)
                .map_err(ArenaError::system("keep a segment from children"))?;
            Ok(mapping)
        }
    }

    /// Has touches of pages that are not mapped yet wait for the holder of the descriptor, which is
    /// returned; or end in SIGBUS. To be called before the first touch. `device` is
    /// `/dev/userfaultfd`, if the process has it open.
    ///
    /// # Errors
    /// If the process may not have a userfaultfd.
    pub fn arm(&self, touch: Touch, device: Option<BorrowedFd<'_>>) -> Result<OwnedFd, ArenaError> {
        let failed = |source| ArenaError::System { what: "have faults of a segment served", source };
        let uffd = uffd::open(device, touch == Touch::IsRefused).map_err(failed)?;
        uffd::register(&uffd, self.address, self.bytes).map_err(failed)?;
        Ok(uffd)
    }

    /// Withdraws the segment from the program: from now on each touch is SIGSEGV, until
    /// [`Self::restore`]. If it is armed, this waits until the agent has read the event.
    ///
    /// # Errors
    /// If the system refuses; nothing has changed then. If another thread maps something at the
    /// addresses in the same moment, which is an error of the program, they stay without it.
    pub fn withdraw(&mut self) -> Result<(), ArenaError> {
        if !self.is_away {
            self.shift(self.address, self.address + ARENA_BYTES)?;
        }
        Ok(())
    }

    /// Gives the segment to the program again, which it has not left after all.
    ///
    /// # Errors
    /// Those of [`Self::withdraw`]; also if another thread has mapped something at the addresses.
    pub fn restore(&mut self) -> Result<(), ArenaError> {
        if self.is_away && !self.is_reserved {
            return Err(ArenaError::Range { address: self.address, bytes: self.bytes });
        }
        if self.is_away {
            self.shift(self.address + ARENA_BYTES, self.address)?;
        }
        Ok(())
    }

    /// Moves the mapping, and reserves the addresses that it leaves.
    fn shift(&mut self, from: usize, to: usize) -> Result<(), ArenaError> {
        let (start, flags) = (with_exposed_provenance_mut(from), MremapFlags::MAYMOVE);
        // SAFETY: both ranges are in the arena, where nothing but this segment and its counterpart
        // behind the arena is mapped.
        unsafe { mremap_fixed(start, self.bytes, self.bytes, flags, with_exposed_provenance_mut(to)) }
            .map_err(ArenaError::system("move a segment"))?;
        self.is_away = !self.is_away;
        let reserved = reserve(from..from + self.bytes);
        self.is_reserved = reserved.is_ok();
        reserved.map_err(ArenaError::system("reserve the addresses of a segment"))
    }

    /// The first address.
    #[must_use]
    pub fn address(&self) -> usize {
        self.address
    }

    /// The length in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The words of the segment; none while it is withdrawn.
    ///
    /// A touch of a page that is elsewhere waits.
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        if self.is_away {
            return &[];
        }
        let start = with_exposed_provenance_mut::<AtomicU64>(self.address);
        // SAFETY: the range is mapped and aligned as long as `self` is borrowed, because moving it
        // borrows it exclusively. All accesses through it are atomic.
        unsafe { std::slice::from_raw_parts(start, self.bytes / 8) }
    }
}

/// Takes a segment from the program, whose [`Mapping`] another thread has: each touch is SIGSEGV
/// from now on.
///
/// # Errors
/// If the range is not inside the arena, or the system refuses.
pub fn revoke(address: usize, bytes: usize) -> Result<(), ArenaError> {
    Arena::check(address, bytes)?;
    for start in [address, address + ARENA_BYTES] {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: nothing but a segment is in the arena, and behind it. References to its words end
        // in SIGSEGV when they are used, as documented, and never refer to other memory.
        unsafe { mmap_anonymous(with_exposed_provenance_mut(start), bytes, ProtFlags::empty(), flags) }
            .map_err(ArenaError::system("take a segment from the program"))?;
    }
    Ok(())
}

impl Drop for Mapping<'_> {
    fn drop(&mut self) {
        let at = if self.is_away { self.address + ARENA_BYTES } else { self.address };
        // SAFETY: it is this segment's mapping, and nothing refers to it any more.
        let unmapped = unsafe { munmap(with_exposed_provenance_mut(at), self.bytes) };
        let reserved = unmapped.and_then(|()| reserve(at..at + self.bytes));
        debug_assert!(reserved.is_ok(), "{reserved:?}");
    }
}
