//! Changes to the machine that must be undone: cgroups, swap areas, devices and mounts.
//!
//! `aquifer run --swap` and the peers of benches use these changes. Each change is written to a
//! record before it is made, so that another process can undo the changes of a killed owner: see
//! [`cleanup_stale`].

mod area;
pub mod cgroup;
pub(crate) mod loop_device;
pub(crate) mod mount;
pub mod oom_wait;
pub mod record;
pub mod swapfile;
pub mod zram;

use std::fs;
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

pub use record::cleanup_stale;

/// The permitted sizes of a limit and of a swap area.
pub const SIZE_BYTES: RangeInclusive<u64> = (1 << 20)..=(1 << 40);

/// The machine's setting for the pages that swap reads at once, as a power of two.
pub const PAGE_CLUSTER: &str = "/proc/sys/vm/page-cluster";

/// Present and peak memory of a setup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetupUsage {
    /// Resident anonymous memory of the cgroup now.
    pub anonymous_bytes: u64,
    /// The most memory that was charged to the cgroup; includes page cache.
    pub memory_peak_bytes: u64,
    /// Memory of the cgroup on swap now.
    pub swap_bytes: u64,
    /// A lower bound of the peak memory on swap; `None` if the kernel does not count it.
    pub swap_peak_bytes: Option<u64>,
    /// Page faults that waited for the swap area.
    pub major_faults: u64,
    /// Number of programs that the kernel killed because it could swap nothing out. That can happen
    /// although swap is free, when all resident pages are in use. The run must then be reported as
    /// failed or be repeated.
    pub oom_kills: u64,
    /// The peak memory of the swap area itself: the store of a zram device; 0 for a file.
    pub store_peak_bytes: u64,
}

/// Why a setup failed.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The process is not root.
    #[error("only root can set up kernel swap: run as root, or leave this peer out")]
    NotRoot,
    /// A size is not in [`SIZE_BYTES`].
    #[error("a {what} of {bytes} bytes is not between 1 MiB and 1 TiB: choose another size")]
    Size {
        /// The name of the size.
        what: &'static str,
        /// The size.
        bytes: u64,
    },
    /// No memory controller is mounted.
    #[error(
        "memory cannot be limited: no memory controller of cgroup v1 or v2 is mounted; mount one under \
         /sys/fs/cgroup"
    )]
    NoMemoryController,
    /// No file system can hold a swap file.
    #[error(
        "no folder can hold a swap file (tried {tried}): each is missing, or on a file system without swap \
         files; leave this peer out"
    )]
    NoSwapFolder {
        /// The folders, separated by commas.
        tried: String,
    },
    /// The kernel has no zram, or all devices are in use.
    #[error("there is no free zram device: load the kernel module zram, or leave this peer out")]
    NoZram,
    /// A record has a line that this build does not know.
    #[error(
        "the record {path} has an unknown line {line:?}: undo by hand what it describes, then \
         remove it",
        path = .path.display()
    )]
    Record {
        /// The record's file.
        path: PathBuf,
        /// The line.
        line: String,
    },
    /// Programs in a cgroup have not ended after they were killed.
    #[error(
        "programs in {path} did not end when killed: end them, then run this again",
        path = .path.display()
    )]
    StillRunning {
        /// The cgroup.
        path: PathBuf,
    },
    /// A system call failed.
    #[error("cannot {what} {path}: {source}", path = .path.display())]
    Io {
        /// The attempted action.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl SetupError {
    /// Returns a function that makes an error of a failure to `what` `path`.
    pub fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { what, path, source }
    }
}

/// Reads a number from a file of the kernel.
pub fn read_number(path: &Path) -> Result<u64, SetupError> {
    let text = fs::read_to_string(path).map_err(SetupError::io("read", path))?;
    text.trim().parse().map_err(|_| SetupError::Io {
        what: "read a number from",
        path: path.to_owned(),
        source: io::Error::from(io::ErrorKind::InvalidData),
    })
}
