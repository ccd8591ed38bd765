//! `mremap` of memory that is one mapping to the program and several to the kernel.
//!
//! The kernel joins mappings that lie side by side only if all or none of them are registered with
//! the userfaultfd, and it moves several at once only if none is. This module moves them one by
//! one.

use core::ffi::{c_int, c_void};

use crate::fatal;
use crate::next::fail_with_errno;
use crate::pieces::Pieces;
use crate::raw::syscall;

const PAGE: usize = 4096;
/// The range is not in one mapping.
const FAULT: isize = -(libc::EFAULT as isize);
/// The first kernel that moves several mappings at once, if their length does not change.
const MOVES_SEVERAL_SINCE: (u32, u32) = (6, 17);

/// The arguments of one `mremap`, with lengths of whole pages.
#[derive(Clone, Copy)]
struct Move {
    from: usize,
    old_length: usize,
    new_length: usize,
    flags: c_int,
    to: usize,
}

impl Move {
    fn has(&self, flag: c_int) -> bool {
        self.flags & flag != 0
    }

    /// Whether the call only moves a range to a given address.
    fn is_plain(&self) -> bool {
        self.has(libc::MREMAP_FIXED)
            && !self.has(libc::MREMAP_DONTUNMAP)
            && self.old_length == self.new_length
    }

    /// Moves the mappings of the range one by one, but not the gaps between them. The kernel would
    /// move these mappings at once if they were not registered.
    ///
    /// After an error some mappings have moved, as after an error of the kernel.
    unsafe fn move_several(&self, pieces: &Pieces) -> isize {
        for (start, end) in pieces.iter() {
            let target = self.to + (start - self.from);
            // SAFETY: the caller has requested the move.
            let result = unsafe { move_piece(start, end - start, end - start, 0, target) };
            if result < 0 {
                return result;
            }
        }
        self.to as isize
    }

    /// Moves, grows or shrinks mappings that are one to the program.
    unsafe fn resize(&self, pieces: &Pieces) -> isize {
        // SAFETY: the caller drops the memory behind the new end, and allows the rest to move.
        unsafe {
            if self.new_length < self.old_length {
                unmap(self.from + self.new_length, self.old_length - self.new_length);
            }
            if !self.has(libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP) {
                let grown = self.grow_in_place(pieces);
                if grown >= 0 || !self.has(libc::MREMAP_MAYMOVE) {
                    return grown;
                }
            }
            match self.reserve() {
                to @ 0.. => Move { to: to as usize, ..*self }.move_all(pieces),
                error => error,
            }
        }
    }

    unsafe fn grow_in_place(&self, pieces: &Pieces) -> isize {
        let (start, end) = pieces.last();
        let grown = self.from + self.new_length - start;
        // SAFETY: nothing moves.
        let result = unsafe { syscall(libc::SYS_mremap, [start, end - start, grown, 0, 0, 0]) };
        if result < 0 { result } else { self.from as isize }
    }

    /// Reserves the range to which the pieces move. Returns its address.
    unsafe fn reserve(&self) -> isize {
        let (fixed, address) = if self.has(libc::MREMAP_FIXED) { (libc::MAP_FIXED, self.to) } else { (0, 0) };
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed) as usize;
        // SAFETY: the caller has requested to replace the mappings at a fixed address.
        unsafe {
            let protection = libc::PROT_NONE as usize;
            syscall(libc::SYS_mmap, [address, self.new_length, protection, flags, usize::MAX, 0])
        }
    }

    /// Moves all pieces to the reserved range at `self.to`. After an error all are at their old
    /// addresses.
    ///
    /// The last piece is moved first, because it may grow and so is the likeliest to fail.
    unsafe fn move_all(&self, pieces: &Pieces) -> isize {
        let growth = self.new_length.saturating_sub(self.old_length);
        let last = pieces.last();
        for (start, end) in pieces.iter().rev() {
            let old_length = end - start;
            let new_length = if (start, end) == last { old_length + growth } else { old_length };
            let target = self.to + (start - self.from);
            let flags = self.flags & libc::MREMAP_DONTUNMAP;
            // SAFETY: the target is reserved, and the caller has requested the move. After an error
            // the pieces are moved back, and the reserved range is unmapped.
            unsafe {
                let result = move_piece(start, old_length, new_length, flags, target);
                if result < 0 {
                    for (moved, end) in pieces.iter().filter(|(moved, _)| *moved > start) {
                        let length = end - moved;
                        let back = move_piece(self.to + (moved - self.from), length, length, 0, moved);
                        if back < 0 {
                            fatal::exit("memory that mremap has moved in part cannot be moved back", -back);
                        }
                    }
                    unmap(self.to, self.new_length);
                    return result;
                }
            }
        }
        self.to as isize
    }
}

unsafe fn move_piece(from: usize, old_length: usize, new_length: usize, flags: c_int, to: usize) -> isize {
    let flags = (flags | libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as usize;
    // SAFETY: as of the caller.
    unsafe { syscall(libc::SYS_mremap, [from, old_length, new_length, flags, to, 0]) }
}

unsafe fn unmap(start: usize, length: usize) {
    // SAFETY: as of the caller.
    unsafe {
        syscall(libc::SYS_munmap, [start, length, 0, 0, 0, 0]);
    }
}

fn is_mapped(page: usize) -> bool {
    let mut residence = 0_u8;
    // SAFETY: the kernel stores one byte for the page.
    unsafe { syscall(libc::SYS_mincore, [page, PAGE, (&raw mut residence) as usize, 0, 0, 0]) == 0 }
}

/// Major and minor number.
fn kernel_version() -> (u32, u32) {
    // SAFETY: the kernel fills the struct, for which all bits zero are valid.
    let release = unsafe {
        let mut names: libc::utsname = core::mem::zeroed();
        syscall(libc::SYS_uname, [(&raw mut names) as usize, 0, 0, 0, 0, 0]);
        names.release
    };
    parse_version(release.map(|byte| byte as u8))
}

fn parse_version(release: [u8; 65]) -> (u32, u32) {
    let mut numbers = [0_u32; 2];
    let mut at = 0;
    for byte in release {
        match (byte, numbers.get_mut(at)) {
            (b'0'..=b'9', Some(number)) => *number = number.saturating_mul(10) + u32::from(byte - b'0'),
            (b'.', Some(_)) => at += 1,
            _ => break,
        }
    }
    (numbers[0], numbers[1])
}

/// `mremap`, also of a range that is several mappings only because parts of it are registered.
/// Returns the kernel's result.
///
/// # Safety
/// As of the system call `mremap`.
pub unsafe fn move_mappings(
    from: usize,
    old_length: usize,
    new_length: usize,
    flags: c_int,
    to: usize,
) -> isize {
    // If the kernel fails it may have moved some mappings.
    let was_mapped = flags & libc::MREMAP_FIXED != 0 && is_mapped(from);
    // SAFETY: the caller is responsible for the call.
    let result = unsafe { syscall(libc::SYS_mremap, [from, old_length, new_length, flags as usize, to, 0]) };
    if result != FAULT {
        return result;
    }
    let pages = |length: usize| length.checked_next_multiple_of(PAGE);
    let (Some(old_length), Some(new_length)) = (pages(old_length), pages(new_length)) else { return FAULT };
    let wanted = Move { from, old_length, new_length, flags, to };
    let ends = [from.checked_add(old_length), from.checked_add(new_length), to.checked_add(new_length)];
    if ends.contains(&None) {
        return FAULT;
    }
    let range = from..from + old_length.min(new_length);
    let Some(pieces) = Pieces::find(&range) else { return FAULT };
    // SAFETY: as of the caller.
    unsafe {
        if wanted.is_plain() && was_mapped && kernel_version() >= MOVES_SEVERAL_SINCE {
            wanted.move_several(&pieces)
        } else if pieces.are_one(&range) {
            wanted.resize(&pieces)
        } else {
            FAULT
        }
    }
}

/// Interposes libc's function of this name. Makes the system call itself, because libc's function
/// does nothing else.
///
/// `to` is only given with `MREMAP_FIXED`.
///
/// # Safety
/// As of libc's `mremap`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    from: *mut c_void,
    old_length: usize,
    new_length: usize,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller is responsible for the call.
    let result = unsafe { move_mappings(from as usize, old_length, new_length, flags, to as usize) };
    if (-4095..0).contains(&result) {
        fail_with_errno(-result as c_int) as isize as *mut c_void
    } else {
        result as *mut c_void
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_versions_are_parsed() {
        let parse = |text: &str| {
            let mut release = [0; 65];
            release[..text.len()].copy_from_slice(text.as_bytes());
            parse_version(release)
        };
        assert_eq!(parse("6.18.44-generic"), (6, 18));
        assert_eq!(parse("7.0-rc1"), (7, 0));
        assert_eq!(parse("6"), (6, 0));
        assert_eq!(parse(""), (0, 0));
        assert!(kernel_version() >= (4, 0));
    }
}
