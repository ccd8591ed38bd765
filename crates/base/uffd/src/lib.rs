//! The kernel's requests of userfaultfd and of `/proc/PID/pagemap`: numbers, flags and structures.
//!
//! All have the names of `linux/userfaultfd.h` and `linux/fs.h`, where they are described. This
//! crate makes no request: programs and daemons make them in different ways.

#![no_std]
#![forbid(unsafe_code)]

use linux_raw_sys::{general, ioctl};

pub use general::{
    page_region, pm_scan_arg, uffdio_api, uffdio_continue, uffdio_copy, uffdio_move, uffdio_poison,
    uffdio_range, uffdio_register, uffdio_writeprotect, uffdio_zeropage,
};

/// Declares constants of 64 bits, which all arguments of the requests have.
macro_rules! constants {
    ($($name:ident = $value:expr;)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "` of the kernel.")]
            pub const $name: u64 = $value as u64;
        )*
    };
}

/// `UFFD_USER_MODE_ONLY` of the kernel, a flag of the system call `userfaultfd`.
pub const UFFD_USER_MODE_ONLY: i32 = general::UFFD_USER_MODE_ONLY.cast_signed();

constants! {
    UFFD_API = general::UFFD_API;
    USERFAULTFD_IOC_NEW = 0xaa00;
    UFFDIO_API = ioctl::UFFDIO_API;
    UFFDIO_REGISTER = ioctl::UFFDIO_REGISTER;
    UFFDIO_UNREGISTER = ioctl::UFFDIO_UNREGISTER;
    UFFDIO_WAKE = ioctl::UFFDIO_WAKE;
    UFFDIO_COPY = ioctl::UFFDIO_COPY;
    UFFDIO_ZEROPAGE = ioctl::UFFDIO_ZEROPAGE;
    UFFDIO_MOVE = 0xc028_aa05_u32;
    UFFDIO_WRITEPROTECT = ioctl::UFFDIO_WRITEPROTECT;
    UFFDIO_CONTINUE = ioctl::UFFDIO_CONTINUE;
    UFFDIO_POISON = 0xc020_aa08_u32;
    UFFD_FEATURE_PAGEFAULT_FLAG_WP = general::UFFD_FEATURE_PAGEFAULT_FLAG_WP;
    UFFD_FEATURE_EVENT_FORK = general::UFFD_FEATURE_EVENT_FORK;
    UFFD_FEATURE_EVENT_REMAP = general::UFFD_FEATURE_EVENT_REMAP;
    UFFD_FEATURE_EVENT_REMOVE = general::UFFD_FEATURE_EVENT_REMOVE;
    UFFD_FEATURE_MISSING_SHMEM = general::UFFD_FEATURE_MISSING_SHMEM;
    UFFD_FEATURE_EVENT_UNMAP = general::UFFD_FEATURE_EVENT_UNMAP;
    UFFD_FEATURE_SIGBUS = general::UFFD_FEATURE_SIGBUS;
    UFFD_FEATURE_THREAD_ID = general::UFFD_FEATURE_THREAD_ID;
    UFFD_FEATURE_MINOR_SHMEM = general::UFFD_FEATURE_MINOR_SHMEM;
    UFFD_FEATURE_WP_HUGETLBFS_SHMEM = general::UFFD_FEATURE_WP_HUGETLBFS_SHMEM;
    UFFD_FEATURE_WP_UNPOPULATED = general::UFFD_FEATURE_WP_UNPOPULATED;
    UFFD_FEATURE_POISON = general::UFFD_FEATURE_POISON;
    UFFD_FEATURE_WP_ASYNC = general::UFFD_FEATURE_WP_ASYNC;
    UFFD_FEATURE_MOVE = general::UFFD_FEATURE_MOVE;
    UFFDIO_REGISTER_MODE_MISSING = general::UFFDIO_REGISTER_MODE_MISSING;
    UFFDIO_REGISTER_MODE_WP = general::UFFDIO_REGISTER_MODE_WP;
    UFFDIO_REGISTER_MODE_MINOR = general::UFFDIO_REGISTER_MODE_MINOR;
    UFFDIO_WRITEPROTECT_MODE_WP = 1;
    UFFDIO_WRITEPROTECT_MODE_DONTWAKE = 2;
    UFFD_PAGEFAULT_FLAG_WRITE = general::UFFD_PAGEFAULT_FLAG_WRITE;
    UFFD_PAGEFAULT_FLAG_WP = general::UFFD_PAGEFAULT_FLAG_WP;
    PAGEMAP_SCAN = 0xc060_6610_u32;
    PM_SCAN_WP_MATCHING = general::PM_SCAN_WP_MATCHING;
    PM_SCAN_CHECK_WPASYNC = general::PM_SCAN_CHECK_WPASYNC;
    PAGE_IS_WRITTEN = general::PAGE_IS_WRITTEN;
    PAGE_IS_FILE = general::PAGE_IS_FILE;
    PAGE_IS_PRESENT = general::PAGE_IS_PRESENT;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of a request that reads and writes an argument of this many bytes.
    const fn read_write(kind: u8, number: u64, bytes: usize) -> u64 {
        3 << 30 | (bytes as u64) << 16 | (kind as u64) << 8 | number
    }

    #[test]
    fn numbers_that_the_library_lacks_have_the_sizes_of_their_arguments() {
        assert_eq!(UFFDIO_MOVE, read_write(0xaa, 5, size_of::<uffdio_move>()));
        assert_eq!(UFFDIO_POISON, read_write(0xaa, 8, size_of::<uffdio_poison>()));
        assert_eq!(PAGEMAP_SCAN, read_write(b'f', 16, size_of::<pm_scan_arg>()));
        assert_eq!(UFFDIO_CONTINUE, read_write(0xaa, 7, size_of::<uffdio_continue>()));
    }
}
