//! Changes to the machine that must be undone: cgroups, swap areas, devices and mounts, for `aquifer run --swap` and for the peers of benches.
//!
//! Each is written to a record *before* it is done, so that what a killed owner left can be undone by whoever comes next: see
//! [`cleanup_stale`].

mod area;
pub mod cgroup;
pub mod loop_device;
pub mod mount;
pub mod record;
pub mod swapfile;
pub mod want;
pub mod zram;

use std::fs;
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

pub use record::cleanup_stale;

/// The sizes that a setup takes, for its limit as for its swap device.
pub const SIZE_BYTES: RangeInclusive<u64> = (1 << 20)..=(1 << 40);

/// How many pages swap reads at once, as a power of two; the whole machine's.
pub const PAGE_CLUSTER: &str = "/proc/sys/vm/page-cluster";

/// What a setup has used until now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Anonymous memory of the cgroup's programs that is resident now.
    pub anonymous_bytes: u64,
    /// The most memory that was charged to the cgroup, page cache included.
    pub memory_peak_bytes: u64,
    /// What the cgroup's programs have on swap now.
    pub swap_bytes: u64,
    /// At least this much was on swap at some time, if the kernel keeps count of it.
    pub swap_peak_bytes: Option<u64>,
    /// Page faults that waited for the device.
    pub major_faults: u64,
    /// Programs that the kernel killed because it found nothing more to swap out. It happens now and then even
    /// with swap left, when all that is resident is in use; the run must be reported as lost, or repeated.
    pub oom_kills: u64,
    /// The most memory that the device itself has taken: a zram's store, nothing for a file.
    pub store_peak_bytes: u64,
}

/// Why a setup could not be made or used.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// Cgroups and swap devices are root's.
    #[error("kernel swap can be set up by root only; run as root, or leave this peer out")]
    NotRoot,
    /// A size out of [`SIZE_BYTES`].
    #[error("a {what} of {bytes} bytes is not between 1 MiB and 1 TiB; choose one that is")]
    Size {
        /// Which size.
        what: &'static str,
        /// What was asked for.
        bytes: u64,
    },
    /// Neither cgroup v1 nor v2 has a memory controller here.
    #[error(
        "no memory controller is mounted, neither cgroup v1 nor v2, so memory cannot be limited; mount one under /sys/fs/cgroup"
    )]
    NoMemoryController,
    /// No file system can hold a swap file.
    #[error(
        "no folder can hold a swap file (tried {tried}): each is missing, or on a file system without swap files; leave this peer out"
    )]
    NoSwapFolder {
        /// The folders, with commas between.
        tried: String,
    },
    /// The kernel has no zram, or every device is taken.
    #[error("there is no free zram device (kernel module zram); load it, or leave this peer out")]
    NoZram,
    /// A record that cannot be trusted.
    #[error("the record {path} says {line:?}, which is not known; undo by hand what is left of it, then remove it", path = .path.display())]
    Record {
        /// The record.
        path: PathBuf,
        /// The line that was not understood.
        line: String,
    },
    /// A cgroup whose programs do not end.
    #[error("programs in {path} did not end when killed; end them, then run this again", path = .path.display())]
    StillRunning {
        /// The cgroup.
        path: PathBuf,
    },
    /// The kernel refused.
    #[error("could not {what} {path}: {source}", path = .path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

impl SetupError {
    /// An error about `path` while it was tried to `what`.
    pub fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { what, path, source }
    }
}

/// The number that a file of the kernel holds.
pub fn read_number(path: &Path) -> Result<u64, SetupError> {
    let text = fs::read_to_string(path).map_err(SetupError::io("read", path))?;
    text.trim().parse().map_err(|_| SetupError::Io {
        what: "read a number from",
        path: path.to_owned(),
        source: io::Error::from(io::ErrorKind::InvalidData),
    })
}
