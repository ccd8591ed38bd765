//! Kernel swap as a peer: runs a program with a memory limit and a swap device, as an operator
//! would do without Aquifer.
//!
//! A [`PeerSetup`] creates a memory cgroup and a swap device, and removes both when it is dropped.
//!
//! A swap device serves the whole machine: other programs under memory pressure may swap to it,
//! too. It has the highest priority, so that the measured program uses no other device.

#[cfg(test)]
mod tests;

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use aquifer_swap::setup::cgroup::{self, Cgroup};
use aquifer_swap::setup::oom_wait::OomWait;
use aquifer_swap::setup::record::{SetupRecord, SetupStep};
use aquifer_swap::setup::{PAGE_CLUSTER, SIZE_BYTES, SetupError, SetupUsage, read_number, swapfile, zram};
use rustix::process::Pid;

/// Pause of a program without memory before it retries.
const RETRY_PAUSE: Duration = Duration::from_millis(5);

/// Kind of swap device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// A file on this machine's disk.
    SwapFile,
    /// zram: compressed memory.
    ///
    /// The compressed pages are this machine's memory, but the kernel counts them against no
    /// cgroup: the program gets its limit *and* the store. [`SetupUsage::store_peak_bytes`] says
    /// how much that was; a report must show it, or grant a limit that is smaller by as much.
    Zram,
}

/// Number of pages that the kernel reads at a fault; a setting of the whole machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadAhead {
    /// One page: best for random access.
    OnePage,
    /// Eight pages, the kernel's default: best for sequential access to a disk.
    EightPages,
}

/// A cgroup with a limit of memory and no swap; removed when dropped.
#[derive(Debug)]
pub struct LimitedCgroup {
    cgroup: Cgroup,
    _record: SetupRecord,
}

impl LimitedCgroup {
    /// Creates a cgroup.
    ///
    /// # Errors
    /// If this is not root, or the kernel has no memory controller.
    pub fn new(limit_bytes: u64) -> Result<Self, SetupError> {
        let mut record = SetupRecord::create()?;
        let cgroup = Cgroup::create(&mut record, limit_bytes, 0)?;
        Ok(Self { cgroup, _record: record })
    }

    /// Moves a process into the cgroup. The memory that it has counts where it was allocated.
    ///
    /// # Errors
    /// If the process has ended.
    pub fn add(&self, pid: Pid) -> Result<(), SetupError> {
        let procs = self.cgroup.procs()?.write_all(pid.to_string().as_bytes());
        procs.map_err(SetupError::io("move a process into", Path::new("the cgroup of the bench")))
    }
}

/// A cgroup with a limit, and a swap device; removed when dropped.
#[derive(Debug)]
pub struct PeerSetup {
    cgroup: Cgroup,
    zram: Option<u32>,
    record: SetupRecord,
}

impl PeerSetup {
    /// Sets up `peer` with `swap_bytes` of swap, for programs with `limit_bytes` of memory
    /// (anonymous memory and page cache together).
    ///
    /// Undoes all steps if one fails.
    pub fn new(peer: Peer, limit_bytes: u64, swap_bytes: u64) -> Result<Self, SetupError> {
        for (what, bytes) in [("memory limit", limit_bytes), ("swap device", swap_bytes)] {
            if !SIZE_BYTES.contains(&bytes) {
                return Err(SetupError::Size { what, bytes });
            }
        }
        if !rustix::process::geteuid().is_root() {
            return Err(SetupError::NotRoot);
        }
        // From now on an early return drops the record, which undoes its steps.
        let mut record = SetupRecord::create()?;
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

    /// Sets the read-ahead of swap. The previous setting is restored when the setup is dropped.
    pub fn set_read_ahead(&mut self, read_ahead: ReadAhead) -> Result<(), SetupError> {
        let path = Path::new(PAGE_CLUSTER);
        let former = read_number(path)?;
        if !self.record.has_page_cluster() {
            self.record.add(SetupStep::PageCluster(former))?;
        }
        let log2_pages = match read_ahead {
            ReadAhead::OnePage => "0",
            ReadAhead::EightPages => "3",
        };
        fs::write(path, log2_pages).map_err(SetupError::io("set the swap read-ahead in", path))
    }

    /// A command that starts a program in the cgroup.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Result<Command, SetupError> {
        Ok(cgroup::command(program.as_ref(), self.cgroup.procs()?))
    }

    /// Runs `work` while programs that find no memory wait and retry, if the kernel supports that.
    ///
    /// Without that, the kernel would kill them although there is free swap. Also returns true if a
    /// program had to wait: then one of its system calls may have failed for lack of memory.
    pub fn with_oom_waits<T>(&self, work: impl FnOnce() -> T) -> Result<(T, bool), SetupError> {
        self.cgroup.set_oom_waits(true)?;
        let (done, is_done) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(move || {
                let mut oom_wait = OomWait::default();
                let mut has_waited = false;
                while let Err(RecvTimeoutError::Timeout) = is_done.recv_timeout(RETRY_PAUSE) {
                    oom_wait.poll(&self.cgroup)?;
                    has_waited |= !matches!(oom_wait, OomWait::None);
                }
                // From now on the kernel may kill the remaining programs.
                self.cgroup.set_oom_waits(false)?;
                Ok(has_waited)
            });
            let result = work();
            drop(done);
            let has_waited = waiter.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            Ok((result, has_waited))
        })
    }

    /// Memory and swap used so far.
    pub fn usage(&self) -> Result<SetupUsage, SetupError> {
        let mut usage = self.cgroup.usage()?;
        if let Some(number) = self.zram {
            usage.store_peak_bytes = zram::store_peak_bytes(number)?;
        }
        Ok(usage)
    }

    /// Removes cgroup and device, and returns errors. Dropping a setup ignores errors.
    pub fn close(mut self) -> Result<(), SetupError> {
        self.record.undo()
    }
}
