//! Kernel swap as a peer: runs a program with little memory and a swap device, the way an operator would
//! without Aquifer, so that demo and benches can show both side by side.
//!
//! A [`PeerSetup`] makes a memory cgroup and a swap device of its own and undoes both when it is dropped.
//! What it does is written to a record *before* it is done, so that a setup whose owner was killed can be
//! undone by whoever comes next: see [`cleanup_stale`].
//!
//! Swap devices belong to the whole machine: while a setup lives, other programs under memory pressure may
//! swap to its device, too. Its priority is the highest, so that the program under test gets no other.

mod cgroup;
mod record;
mod swapfile;
#[cfg(test)]
mod tests;
mod zram;

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::Command;

use cgroup::Cgroup;
use record::{Record, Step};

pub use record::cleanup_stale;

/// The sizes that a setup takes, for its limit as for its swap device.
pub const SIZE_BYTES: RangeInclusive<u64> = (1 << 20)..=(1 << 40);

const PAGE_CLUSTER: &str = "/proc/sys/vm/page-cluster";

/// Where the kernel swaps to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// A file on this machine's disk.
    SwapFile,
    /// Compressed memory.
    ///
    /// The compressed pages are this machine's memory, but the kernel counts them against no cgroup: the
    /// program gets its limit *and* the store. [`PeerUsage::store_peak_bytes`] says how much that was;
    /// a report must show it, or grant a limit that is smaller by as much.
    Zram,
}

/// How many pages the kernel reads at once when one is needed; it holds for all swap on the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadAhead {
    /// Only the page itself: best for random access.
    OnePage,
    /// Eight pages, the kernel's default: best for sequential access to a disk.
    EightPages,
}

/// What a setup has used until now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerUsage {
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
pub enum PeerError {
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

impl PeerError {
    fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { what, path, source }
    }
}

/// A limited cgroup and a swap device, until dropped.
#[derive(Debug)]
pub struct PeerSetup {
    cgroup: Cgroup,
    zram: Option<u32>,
    record: Record,
}

impl PeerSetup {
    /// Sets up `peer` with `swap_bytes` of swap, for programs with `limit_bytes` of memory (anonymous memory
    /// and page cache together).
    ///
    /// Nothing is left behind when this fails.
    pub fn new(peer: Peer, limit_bytes: u64, swap_bytes: u64) -> Result<Self, PeerError> {
        for (what, bytes) in [("memory limit", limit_bytes), ("swap device", swap_bytes)] {
            if !SIZE_BYTES.contains(&bytes) {
                return Err(PeerError::Size { what, bytes });
            }
        }
        if !rustix::process::geteuid().is_root() {
            return Err(PeerError::NotRoot);
        }
        // From here on an early return drops the record, and that undoes what it holds.
        let mut record = Record::create()?;
        let cgroup = Cgroup::create(&mut record, limit_bytes, swap_bytes)?;
        let zram = match peer {
            Peer::SwapFile => {
                swapfile::create(&mut record, swap_bytes)?;
                None
            }
            Peer::Zram => Some(zram::create(&mut record, swap_bytes)?),
        };
        Ok(Self { cgroup, zram, record })
    }

    /// Sets the read-ahead of swap; the former setting comes back when the setup is dropped.
    pub fn set_read_ahead(&mut self, read_ahead: ReadAhead) -> Result<(), PeerError> {
        let path = Path::new(PAGE_CLUSTER);
        let former = read_number(path)?;
        if !self.record.has_page_cluster() {
            self.record.add(Step::PageCluster(former))?;
        }
        let log2_pages = match read_ahead {
            ReadAhead::OnePage => "0",
            ReadAhead::EightPages => "3",
        };
        fs::write(path, log2_pages).map_err(PeerError::io("set the swap read-ahead in", path))
    }

    /// A command whose program runs within the limit, from before its first instruction.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Result<Command, PeerError> {
        self.cgroup.command(program.as_ref())
    }

    /// What has been used until now.
    pub fn usage(&self) -> Result<PeerUsage, PeerError> {
        let mut usage = self.cgroup.usage()?;
        if let Some(number) = self.zram {
            usage.store_peak_bytes = zram::store_peak_bytes(number)?;
        }
        Ok(usage)
    }

    /// Undoes everything now, and says what went wrong; dropping does the same in silence.
    pub fn close(mut self) -> Result<(), PeerError> {
        self.record.undo()
    }
}

fn read_number(path: &Path) -> Result<u64, PeerError> {
    let text = fs::read_to_string(path).map_err(PeerError::io("read", path))?;
    text.trim().parse().map_err(|_| PeerError::Io {
        what: "read a number from",
        path: path.to_owned(),
        source: io::Error::from(io::ErrorKind::InvalidData),
    })
}
