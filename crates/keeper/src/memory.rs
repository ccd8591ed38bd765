//! Whether the memory that a userfaultfd serves exists.

use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::ioctl::{Updater, ioctl};

const UFFDIO_REGISTER: u32 = 0xc020_aa00;
const MODE_MISSING: u64 = 1;
const PAGE: u64 = 4096;
/// The last page of an address space. Nothing is mapped there.
const LAST_PAGE: u64 = (1 << 47) - 2 * PAGE;

/// `struct uffdio_register`.
#[repr(C)]
struct RegisterArgument {
    start: u64,
    length: u64,
    mode: u64,
    ioctls: u64,
}

/// Whether a process has the memory of a userfaultfd. It may be another one than at first.
///
/// Unlike for a fill, unread events do not matter.
pub fn exists(uffd: impl AsFd) -> bool {
    let mut argument = RegisterArgument { start: LAST_PAGE, length: PAGE, mode: MODE_MISSING, ioctls: 0 };
    // SAFETY: the argument is of the layout that this request has. At most it registers
    // a page that no program uses.
    let result = unsafe { ioctl(uffd, Updater::<UFFDIO_REGISTER, RegisterArgument>::new(&mut argument)) };
    !matches!(result, Err(Errno::NOMEM | Errno::NOTTY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_a_running_process_exists() {
        let flags = rustix::mm::UserfaultfdFlags::CLOEXEC | rustix::mm::UserfaultfdFlags::NONBLOCK;
        // SAFETY: the descriptor is never given a range of memory.
        match unsafe { rustix::mm::userfaultfd(flags) } {
            Ok(uffd) => assert!(exists(&uffd)),
            Err(error) => aquifer_tests_support::skip(&format!("no userfaultfd: {error}")),
        }
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(!exists(&file), "what is no userfaultfd serves no memory");
    }
}
