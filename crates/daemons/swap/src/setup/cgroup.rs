//! The memory cgroup of a setup, in the version (1 or 2) that has the memory controller.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use parking_lot::Mutex;

use super::area::PAGE_BYTES;
use super::record::{SetupRecord, SetupStep};
use super::{SetupError, SetupUsage, read_number};

/// The limit of memory and swap together, in version 1.
const MEMSW_LIMIT: &str = "memory.memsw.limit_in_bytes";
/// Largest step by which a limit is lowered, in bytes. The writer waits until the kernel has
/// swapped that much out.
const LOWERED_BYTES: u64 = 16 << 20;
/// Maximum number of waits of 10 ms for killed programs.
const KILL_WAITS: u32 = 500;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CgroupVersion {
    V1,
    V2,
}

/// A cgroup with a memory limit. Its [`SetupRecord`] removes it.
#[derive(Debug)]
pub struct Cgroup {
    version: CgroupVersion,
    path: PathBuf,
    /// Held while limits are changed.
    limits: Mutex<()>,
}

/// The outcome of a change of limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LimitChange {
    /// The cgroup has the limits.
    Reached,
    /// The limits are nearer to the requested ones. The next call continues.
    Nearer,
    /// The kernel cannot swap enough out now.
    Stuck,
}

impl Cgroup {
    /// Creates a cgroup with these limits. Adds it to the record first.
    pub fn create(record: &mut SetupRecord, limit_bytes: u64, swap_bytes: u64) -> Result<Self, SetupError> {
        let mountinfo = Path::new("/proc/self/mountinfo");
        let mounts = fs::read_to_string(mountinfo).map_err(SetupError::io("read", mountinfo))?;
        let (version, root) = find_controller(&mounts, |root| {
            fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default()
        })
        .ok_or(SetupError::NoMemoryController)?;
        let cgroup = Self { version, path: root.join(record.name()), limits: Mutex::default() };
        if version == CgroupVersion::V2 {
            let file = root.join("cgroup.subtree_control");
            fs::write(&file, "+memory").map_err(SetupError::io("turn on the memory controller in", &file))?;
        }
        record.add(SetupStep::Cgroup(cgroup.path.clone()))?;
        fs::create_dir(&cgroup.path).map_err(SetupError::io("create the cgroup", &cgroup.path))?;
        // The programs must not use more than `swap_bytes` in total if the machine has other swap.
        let (memory_file, swap_file, swap_limit) = match version {
            CgroupVersion::V1 => ("memory.limit_in_bytes", MEMSW_LIMIT, limit_bytes + swap_bytes),
            CgroupVersion::V2 => ("memory.max", "memory.swap.max", swap_bytes),
        };
        let limit = cgroup.path.join(memory_file);
        fs::write(&limit, limit_bytes.to_string()).map_err(SetupError::io("set the limit in", &limit))?;
        let limit = cgroup.path.join(swap_file);
        if limit.exists() {
            fs::write(&limit, swap_limit.to_string()).map_err(SetupError::io("set the limit in", &limit))?;
        }
        Ok(cgroup)
    }

    /// Opens the file to which a process writes `0` to enter the cgroup.
    pub fn procs(&self) -> Result<File, SetupError> {
        let path = self.path.join("cgroup.procs");
        OpenOptions::new().write(true).open(&path).map_err(SetupError::io("open", &path))
    }

    /// The processes in the cgroup.
    pub fn processes(&self) -> Result<Vec<u32>, SetupError> {
        let path = self.path.join("cgroup.procs");
        let pids = fs::read_to_string(&path).map_err(SetupError::io("read", &path))?;
        Ok(pids.lines().filter_map(|pid| pid.parse().ok()).collect())
    }

    /// Kills all processes in the cgroup, and waits until they have ended.
    pub fn kill_all(&self) -> Result<(), SetupError> {
        kill_all(&self.path)
    }

    /// Changes the limits, or lowers one by a step. Waits until the kernel has swapped enough out
    /// for that.
    ///
    /// # Errors
    /// If the limits cannot be read or written.
    pub fn change_limits(&self, limit_bytes: u64, swap_bytes: u64) -> Result<LimitChange, SetupError> {
        let _one = self.limits.lock();
        match self.version {
            CgroupVersion::V1 => {
                let change = self.change_limits_v1(limit_bytes, swap_bytes);
                // Waiting programs were not woken during the change.
                self.shift_limit()?;
                change
            }
            CgroupVersion::V2 => self.change_limit_v2(limit_bytes),
        }
    }

    /// Changes the limits in version 1. The limit of memory must never be above the limit of memory
    /// and swap together.
    fn change_limits_v1(&self, limit_bytes: u64, swap_bytes: u64) -> Result<LimitChange, SetupError> {
        let (limit, both) = (self.path.join("memory.limit_in_bytes"), self.path.join(MEMSW_LIMIT));
        let used = self.path.join("memory.usage_in_bytes");
        let (before_bytes, used_bytes) = (read_number(&limit)?, read_number(&used)?);
        let next_bytes = limit_bytes.max(used_bytes.saturating_sub(LOWERED_BYTES));
        let mut writes = vec![(&limit, next_bytes)];
        if both.exists() {
            let is_raised = next_bytes >= before_bytes;
            writes.insert(usize::from(!is_raised), (&both, next_bytes + swap_bytes));
        }
        for (file, bytes) in writes {
            match fs::write(file, bytes.to_string()) {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    // Prevents further growth. Fails if the usage has just grown.
                    if used_bytes < before_bytes {
                        let _ = fs::write(&limit, read_number(&used)?.to_string());
                    }
                    return Ok(LimitChange::Stuck);
                }
                written => written.map_err(SetupError::io("set the limit in", file))?,
            }
        }
        Ok(if next_bytes == limit_bytes { LimitChange::Reached } else { LimitChange::Nearer })
    }

    /// Changes the limit in version 2. A `memory.max` below the usage could kill programs, and a
    /// `memory.high` only slows them down.
    fn change_limit_v2(&self, limit_bytes: u64) -> Result<LimitChange, SetupError> {
        let (soft, hard) = (self.path.join("memory.high"), self.path.join("memory.max"));
        let used_bytes = || read_number(&self.path.join("memory.current"));
        let before_bytes = used_bytes()?;
        let next_bytes = limit_bytes.max(before_bytes.saturating_sub(LOWERED_BYTES));
        let write = |file: &Path, text: String| {
            fs::write(file, text).map_err(SetupError::io("set the limit in", file))
        };
        write(&soft, next_bytes.to_string())?;
        let after_bytes = used_bytes()?;
        if after_bytes > limit_bytes {
            let is_nearer = after_bytes < before_bytes;
            return Ok(if is_nearer { LimitChange::Nearer } else { LimitChange::Stuck });
        }
        let written = write(&hard, limit_bytes.to_string());
        write(&soft, "max".to_owned())?;
        written.map(|()| LimitChange::Reached)
    }

    /// Sets whether programs that get no memory wait, instead of being killed by the kernel.
    ///
    /// Each call with true also wakes waiting programs. Has no effect in version 2, which has no
    /// such setting.
    pub fn set_oom_waits(&self, waits: bool) -> Result<(), SetupError> {
        if self.version == CgroupVersion::V2 {
            return Ok(());
        }
        let path = self.path.join("memory.oom_control");
        fs::write(&path, if waits { "1" } else { "0" }).map_err(SetupError::io("set", &path))?;
        if waits { self.wake_waiting() } else { Ok(()) }
    }

    /// Wakes the programs that wait for memory.
    ///
    /// The kernel wakes them when a limit grows, so the limit of memory and swap together is raised
    /// by a page and lowered again. A moment in which the kernel may kill would wake them, too, but
    /// could kill a program.
    fn wake_waiting(&self) -> Result<(), SetupError> {
        let Some(_one) = self.limits.try_lock() else {
            // The limit is being changed, and the programs are woken afterwards.
            return Ok(());
        };
        self.shift_limit()
    }

    /// Raises the limit of memory and swap together by a page, and lowers it again.
    fn shift_limit(&self) -> Result<(), SetupError> {
        let path = self.path.join(MEMSW_LIMIT);
        if !path.exists() {
            // Without this limit, programs are woken when others free memory.
            return Ok(());
        }
        let limit_bytes = read_number(&path)?;
        let larger_bytes = limit_bytes + PAGE_BYTES;
        fs::write(&path, larger_bytes.to_string()).map_err(SetupError::io("set the limit in", &path))?;
        // Fails if a program has already used the page.
        let _ = fs::write(&path, limit_bytes.to_string());
        Ok(())
    }

    /// True if programs wait for memory. False in version 2, where programs cannot wait.
    pub fn is_under_oom(&self) -> bool {
        let control = fs::read_to_string(self.path.join("memory.oom_control")).unwrap_or_default();
        self.version == CgroupVersion::V1 && stat_field(&control, "under_oom") > 0
    }

    /// Number of pages that were charged to the cgroup so far; 0 in version 2, which does not count
    /// them.
    pub fn pages_charged(&self) -> u64 {
        let stat = fs::read_to_string(self.path.join("memory.stat")).unwrap_or_default();
        stat_field(&stat, "pgpgin")
    }

    /// The number of times that the limit was hit so far. Version 1 only.
    ///
    /// # Errors
    /// If the counter cannot be read. Version 2 has no such file.
    pub fn limit_hits(&self) -> Result<u64, SetupError> {
        read_number(&self.path.join("memory.failcnt"))
    }

    /// Present and peak memory of the cgroup.
    pub fn usage(&self) -> Result<SetupUsage, SetupError> {
        let path = self.path.join("memory.stat");
        let stat = fs::read_to_string(&path).map_err(SetupError::io("read", &path))?;
        let number = |name: &str| read_number(&self.path.join(name));
        let events = self.path.join(match self.version {
            CgroupVersion::V1 => "memory.oom_control",
            CgroupVersion::V2 => "memory.events",
        });
        let events = fs::read_to_string(&events).map_err(SetupError::io("read", &events))?;
        let oom_kills = stat_field(&events, "oom_kill");
        Ok(match self.version {
            CgroupVersion::V1 => {
                let memory_peak_bytes = number("memory.max_usage_in_bytes")?;
                SetupUsage {
                    anonymous_bytes: stat_field(&stat, "rss"),
                    memory_peak_bytes,
                    swap_bytes: stat_field(&stat, "swap"),
                    swap_peak_bytes: number("memory.memsw.max_usage_in_bytes")
                        .ok()
                        .map(|both| both.saturating_sub(memory_peak_bytes)),
                    major_faults: stat_field(&stat, "pgmajfault"),
                    oom_kills,
                    store_peak_bytes: 0,
                }
            }
            CgroupVersion::V2 => SetupUsage {
                anonymous_bytes: stat_field(&stat, "anon"),
                memory_peak_bytes: number("memory.peak").or_else(|_| number("memory.current"))?,
                swap_bytes: number("memory.swap.current").unwrap_or(0),
                swap_peak_bytes: number("memory.swap.peak").ok(),
                major_faults: stat_field(&stat, "pgmajfault"),
                oom_kills,
                store_peak_bytes: 0,
            },
        })
    }
}

/// Returns a command whose program is in the cgroup of `procs` ([`Cgroup::procs`]) from its first
/// instruction on.
pub fn command(program: &OsStr, procs: File) -> Command {
    let mut command = Command::new(program);
    // SAFETY: between fork and exec the closure makes one write system call on an open descriptor.
    // It neither allocates nor acquires a lock.
    unsafe {
        command.pre_exec(move || {
            // "0" is the process that writes it.
            rustix::io::write(&procs, b"0")?;
            Ok(())
        });
    }
    command
}

/// Kills all processes in the cgroup at `path`, and waits until they have ended.
pub(super) fn kill_all(path: &Path) -> Result<(), SetupError> {
    let procs = path.join("cgroup.procs");
    for _ in 0..KILL_WAITS {
        let pids = match fs::read_to_string(&procs) {
            Ok(pids) => pids,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(SetupError::io("read", &procs)(error)),
        };
        let mut is_empty = true;
        for pid in
            pids.lines().filter_map(|line| line.parse().ok()).filter_map(rustix::process::Pid::from_raw)
        {
            is_empty = false;
            // Fails if the process has just ended.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        if is_empty {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Err(SetupError::StillRunning { path: path.to_owned() })
}

/// Removes the cgroup at `path`, if it exists.
pub(super) fn remove(path: &Path) -> Result<(), SetupError> {
    // Version 1 keeps a removed cgroup while page cache is charged to it, so that is freed first.
    let _ = fs::write(path.join("memory.force_empty"), "0");
    match fs::remove_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(SetupError::io("remove the cgroup", path)(error))
        }
        _ => Ok(()),
    }
}

/// Finds the mount point of the memory controller in the text of `/proc/self/mountinfo`.
/// `controllers` reads the controllers of a version 2 mount point.
fn find_controller(mounts: &str, controllers: impl Fn(&Path) -> String) -> Option<(CgroupVersion, PathBuf)> {
    mounts.lines().find_map(|line| {
        // "31 23 0:28 / /mount/point rw shared:1 - cgroup2 source options"
        let (front, back) = line.split_once(" - ")?;
        let mount_point = PathBuf::from(front.split(' ').nth(4)?);
        let mut back = back.split(' ');
        match (back.next()?, back.nth(1)?) {
            ("cgroup", options) if options.split(',').any(|option| option == "memory") => {
                Some((CgroupVersion::V1, mount_point))
            }
            ("cgroup2", _) => controllers(&mount_point)
                .split_whitespace()
                .any(|controller| controller == "memory")
                .then_some((CgroupVersion::V2, mount_point)),
            _ => None,
        }
    })
}

/// The value of `name` in a memory.stat; 0 if the kernel does not count it.
fn stat_field(stat: &str, name: &str) -> u64 {
    stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n";
    const V2: &str = "41 31 0:38 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw\n";

    #[test]
    fn finds_either_version() {
        let none = |_: &Path| String::from("hugetlb\n");
        let memory = |_: &Path| String::from("cpu memory\n");
        let v1_root = PathBuf::from("/sys/fs/cgroup/memory");
        assert_eq!(find_controller(V1, none), Some((CgroupVersion::V1, v1_root.clone())));
        assert_eq!(find_controller(V2, memory), Some((CgroupVersion::V2, PathBuf::from("/sys/fs/cgroup"))));
        // If both are mounted, the controller is in the one that lists it.
        assert_eq!(find_controller(&format!("{V2}{V1}"), none), Some((CgroupVersion::V1, v1_root)));
        assert_eq!(find_controller(V2, none), None);
    }

    #[test]
    fn cut_lines_name_no_controller() {
        for end in 0..V1.len() - "memory\n".len() {
            assert_eq!(find_controller(&V1[..end], |_| String::from("memory")), None, "cut at {end}");
        }
    }

    #[test]
    fn reads_fields_by_their_whole_name() {
        let stat = "rss_huge 5\ntotal_rss 7\nrss 42\nswap x\n";
        assert_eq!(stat_field(stat, "rss"), 42);
        assert_eq!(stat_field(stat, "swap"), 0);
        assert_eq!(stat_field(stat, "anon"), 0);
    }
}
