//! A segment in the arena of a program.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::with_exposed_provenance_mut;
use std::sync::atomic::AtomicU64;

use rustix::mm::{
    Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap, mmap_anonymous, mremap_fixed, munmap,
};

use crate::arena::{ARENA_BYTES, Arena, ArenaError, reserve};
use crate::uffd;

/// The effect of touching a missing page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Touch {
    /// The thread waits until the page is present.
    Waits,
    /// The thread gets SIGBUS.
    RaisesSigbus,
}

/// The mapping of a segment at its addresses.
#[derive(Debug)]
pub struct Mapping<'a> {
    _arena: &'a Arena,
    address: usize,
    bytes: usize,
    is_withdrawn: bool,
    /// Whether the addresses from which the mapping was moved are reserved.
    is_reserved: bool,
}

impl<'a> Mapping<'a> {
    /// Maps the file of a segment at its addresses. Forked children do not inherit the mapping.
    ///
    /// # Errors
    /// If the range is not valid for a segment, or a system call fails.
    pub fn new(arena: &'a Arena, address: usize, bytes: usize, file: impl AsFd) -> Result<Self, ArenaError> {
        Arena::check(address, bytes)?;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let start = with_exposed_provenance_mut(address);
        // SAFETY: the range is inside the arena, whose addresses nothing else uses. The directory
        // ensures that ranges of segments do not overlap.
        unsafe {
            mmap(start, bytes, access, flags, file, 0).map_err(ArenaError::system("map a segment"))?;
            let mapping = Self { _arena: arena, address, bytes, is_withdrawn: false, is_reserved: true };
            madvise(start, bytes, Advice::LinuxDontFork)
                .map_err(ArenaError::system("keep a segment from children"))?;
            Ok(mapping)
        }
    }

    /// Arms the mapping: from now on a touch of a page that is not mapped yet waits for the holder
    /// of the returned userfaultfd, or raises SIGBUS. Must be called before the first touch.
    /// `device` is `/dev/userfaultfd`, if the process has it open.
    ///
    /// # Errors
    /// If the process may not have a userfaultfd.
    pub fn arm(&self, touch: Touch, device: Option<BorrowedFd<'_>>) -> Result<OwnedFd, ArenaError> {
        let failed = |source| ArenaError::System { what: "register a segment for userfaultfd", source };
        let uffd = uffd::open(device, touch == Touch::RaisesSigbus).map_err(failed)?;
        uffd::register(&uffd, self.address, self.bytes).map_err(failed)?;
        Ok(uffd)
    }

    /// Withdraws the segment from the program: from now on each touch raises SIGSEGV, until
    /// [`Self::restore`]. If the mapping is armed, waits until the agent has read the event.
    ///
    /// # Errors
    /// If a system call fails; then nothing has changed. Or if another thread, which must not use
    /// these addresses, maps something there at the same moment; then the segment is withdrawn and
    /// cannot be restored.
    pub fn withdraw(&mut self) -> Result<(), ArenaError> {
        if !self.is_withdrawn {
            self.shift(self.address, self.address + ARENA_BYTES)?;
        }
        Ok(())
    }

    /// Undoes [`Self::withdraw`], because the hand-over was retracted.
    ///
    /// # Errors
    /// The errors of [`Self::withdraw`]; also if another thread has mapped something at the
    /// addresses.
    pub fn restore(&mut self) -> Result<(), ArenaError> {
        if self.is_withdrawn && !self.is_reserved {
            return Err(ArenaError::Range { address: self.address, bytes: self.bytes });
        }
        if self.is_withdrawn {
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
        self.is_withdrawn = !self.is_withdrawn;
        let reserved = reserve(from..from + self.bytes);
        self.is_reserved = reserved.is_ok();
        reserved.map_err(ArenaError::system("reserve the addresses of a segment"))
    }

    /// The first address of the segment.
    #[must_use]
    pub fn address(&self) -> usize {
        self.address
    }

    /// The length of the segment in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The words of the segment; empty while it is withdrawn.
    ///
    /// If the mapping is armed, a touch of a missing page has the effect of its [`Touch`].
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        if self.is_withdrawn {
            return &[];
        }
        let start = with_exposed_provenance_mut::<AtomicU64>(self.address);
        // SAFETY: the range is mapped and aligned as long as `self` is borrowed, because moving it
        // borrows it exclusively. All accesses through it are atomic.
        unsafe { std::slice::from_raw_parts(start, self.bytes / 8) }
    }
}

/// Revokes the program's access to a segment while another thread has its [`Mapping`]: each touch
/// raises SIGSEGV from now on.
///
/// # Errors
/// If the range is not inside the arena, or a system call fails.
pub fn revoke(address: usize, bytes: usize) -> Result<(), ArenaError> {
    Arena::check(address, bytes)?;
    for start in [address, address + ARENA_BYTES] {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: nothing but a segment is in the arena, and behind it. A use of a reference to its
        // words raises SIGSEGV, as documented, and never reaches other memory.
        unsafe { mmap_anonymous(with_exposed_provenance_mut(start), bytes, ProtFlags::empty(), flags) }
            .map_err(ArenaError::system("revoke access to a segment"))?;
    }
    Ok(())
}

impl Drop for Mapping<'_> {
    fn drop(&mut self) {
        let at = if self.is_withdrawn { self.address + ARENA_BYTES } else { self.address };
        // SAFETY: the range is this segment's mapping, and nothing refers to it any more.
        let unmapped = unsafe { munmap(with_exposed_provenance_mut(at), self.bytes) };
        let reserved = unmapped.and_then(|()| reserve(at..at + self.bytes));
        debug_assert!(reserved.is_ok(), "{reserved:?}");
    }
}
