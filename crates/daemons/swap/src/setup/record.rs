//! Records of the steps of a setup. A step is written before it is made, so that any process of
//! root can undo the step.
//!
//! A record is the file `/run/aquifer-setups/NAME`, which only root can access, with one step on
//! each line. NAME contains the owner's pid and its start time, because pids are reused. So the
//! name shows whether the owner is still running.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use aquifer_channel::start_time;

use aquifer_channel::exiting::wait_if_exiting;

use super::{PAGE_CLUSTER, SetupError, cgroup, loop_device, mount, swapfile, zram};

const FOLDER: &str = "/run/aquifer-setups";
const PREFIX: &str = "aquifer-setup-";
/// Largest size of a record, which has at most one line for each kind of step.
const RECORD_BYTES_MAX: u64 = 16 << 10;

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A step of a setup, with the data that its undo needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SetupStep {
    /// A cgroup was created with this folder.
    Cgroup(PathBuf),
    /// A swap file was created and is in use.
    SwapFile(PathBuf),
    /// A zram device is in use.
    Zram {
        /// Number of the device.
        number: u32,
        /// True if this setup has added the device.
        added: bool,
    },
    /// `vm.page-cluster` was changed from this value.
    PageCluster(u64),
    /// A volume's file is mounted at this folder.
    Mount(PathBuf),
    /// The loop device with this number is in use, if its file belongs to the record.
    LoopSwap(u32),
}

impl SetupStep {
    fn to_line(&self) -> String {
        match self {
            Self::Cgroup(path) => format!("cgroup {}", path.display()),
            Self::SwapFile(path) => format!("swap-file {}", path.display()),
            Self::Zram { number, added: true } => format!("zram-added {number}"),
            Self::Zram { number, added: false } => format!("zram {number}"),
            Self::PageCluster(former) => format!("page-cluster {former}"),
            Self::Mount(path) => format!("mount {}", path.display()),
            Self::LoopSwap(number) => format!("loop-swap {number}"),
        }
    }

    /// Parses a line. A path in a record must end in the record's name, so that a damaged record
    /// cannot cause the removal of anything that the setup has not created.
    fn parse(line: &str, name: &str) -> Option<Self> {
        let (kind, value) = line.split_once(' ')?;
        let own_path = || {
            let path = PathBuf::from(value);
            (path.is_absolute() && path.file_name()? == name).then_some(path)
        };
        Some(match kind {
            "cgroup" => Self::Cgroup(own_path()?),
            "swap-file" => Self::SwapFile(own_path()?),
            "zram-added" => Self::Zram { number: value.parse().ok()?, added: true },
            "zram" => Self::Zram { number: value.parse().ok()?, added: false },
            "page-cluster" => Self::PageCluster(value.parse().ok()?),
            "mount" => Self::Mount(own_path()?),
            "loop-swap" => Self::LoopSwap(value.parse().ok()?),
            _ => return None,
        })
    }

    fn undo(&self, name: &str) -> Result<(), SetupError> {
        match self {
            Self::Cgroup(path) => cgroup::remove(path),
            Self::SwapFile(path) => swapfile::remove(path),
            Self::Zram { number, added } => zram::remove(*number, *added),
            Self::PageCluster(former) => fs::write(PAGE_CLUSTER, former.to_string())
                .map_err(SetupError::io("restore", Path::new(PAGE_CLUSTER))),
            Self::Mount(path) => mount::remove(path),
            Self::LoopSwap(number) => loop_device::swap_off(*number, name),
        }
    }
}

/// The steps of a setup, in memory and in a file. Dropping the record undoes them.
#[derive(Debug)]
pub struct SetupRecord {
    name: String,
    path: PathBuf,
    steps: Vec<SetupStep>,
}

impl SetupRecord {
    /// Creates an empty record in a new file.
    pub fn create() -> Result<Self, SetupError> {
        let folder = Path::new(FOLDER);
        match fs::DirBuilder::new().mode(0o700).create(folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(SetupError::io("create the folder", folder)(error));
            }
            _ => {}
        }
        let pid = std::process::id();
        let start = start_time(pid).ok_or_else(|| SetupError::Io {
            what: "read this process's start time from",
            path: PathBuf::from("/proc/self/stat"),
            source: io::Error::from(io::ErrorKind::InvalidData),
        })?;
        let name = format!("{PREFIX}{pid}-{start}-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let path = folder.join(&name);
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(SetupError::io("create the record", &path))?;
        Ok(Self { name, path, steps: Vec::new() })
    }

    /// The name of the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// True if the undo restores `vm.page-cluster`.
    pub fn has_page_cluster(&self) -> bool {
        self.steps.iter().any(|step| matches!(step, SetupStep::PageCluster(_)))
    }

    /// Writes a step to the record. Must be called before the step is made.
    pub fn add(&mut self, step: SetupStep) -> Result<(), SetupError> {
        let mut file: File = OpenOptions::new()
            .append(true)
            .open(&self.path)
            .map_err(SetupError::io("open the record", &self.path))?;
        writeln!(file, "{}", step.to_line()).map_err(SetupError::io("write the record", &self.path))?;
        self.steps.push(step);
        Ok(())
    }

    /// Undoes all steps, the last first. After a failure, continues with the other steps, keeps the
    /// record for another attempt, and returns the first error.
    pub fn undo(&mut self) -> Result<(), SetupError> {
        let mut result = Ok(());
        // Programs must end first: a swap area cannot be removed while its pages are in use.
        for step in &self.steps {
            if let SetupStep::Cgroup(path) = step {
                result = result.and(cgroup::kill_all(path));
            }
        }
        let mut remaining = Vec::new();
        for step in std::mem::take(&mut self.steps).into_iter().rev() {
            if let Err(error) = step.undo(&self.name) {
                remaining.push(step);
                result = result.and(Err(error));
            }
        }
        remaining.reverse();
        self.steps = remaining;
        if self.steps.is_empty() {
            match fs::remove_file(&self.path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    result = result.and(Err(SetupError::io("remove the record", &self.path)(error)));
                }
                _ => {}
            }
        }
        result
    }

    fn load(name: &str) -> Result<Self, SetupError> {
        let path = Path::new(FOLDER).join(name);
        let size = fs::metadata(&path).map_err(SetupError::io("read the record", &path))?.len();
        if size > RECORD_BYTES_MAX {
            return Err(SetupError::Record { path, line: format!("{size} bytes") });
        }
        let text = fs::read_to_string(&path).map_err(SetupError::io("read the record", &path))?;
        let steps =
            parse_steps(&text, name).map_err(|line| SetupError::Record { path: path.clone(), line })?;
        Ok(Self { name: name.to_owned(), path, steps })
    }
}

impl Drop for SetupRecord {
    fn drop(&mut self) {
        // An error cannot be returned from here. The record remains for `cleanup_stale`.
        let _ = self.undo();
    }
}

/// Undoes the setup of an owner that has ended, by the name of its record, if the record exists.
/// Kills the programs in its cgroup first.
pub fn undo_abandoned(name: &str) -> Result<(), SetupError> {
    if parse_owner(name).is_none() {
        return Err(SetupError::Record { path: Path::new(FOLDER).to_owned(), line: name.to_owned() });
    }
    if !Path::new(FOLDER).join(name).exists() {
        return Ok(());
    }
    SetupRecord::load(name)?.undo()
}

/// Undoes the setups of owners that have ended. Returns the number of setups.
///
/// Must be called before a new setup, because killed owners have not undone theirs.
pub fn cleanup_stale() -> Result<usize, SetupError> {
    let folder = Path::new(FOLDER);
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(SetupError::io("list", folder)(error)),
    };
    let mut undone = 0;
    let mut result = Ok(());
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some((pid, start)) = parse_owner(&name) else {
            continue;
        };
        if start_time(pid) == Some(start) {
            // A process that was just killed does not undo its setup. Wait for its end.
            wait_if_exiting(pid);
            if start_time(pid) == Some(start) {
                continue;
            }
        }
        match SetupRecord::load(&name).and_then(|mut record| record.undo()) {
            Ok(()) => undone += 1,
            // Another process has undone this setup meanwhile.
            Err(_) if !folder.join(&name).exists() => {}
            Err(error) => result = result.and(Err(error)),
        }
    }
    result.map(|()| undone)
}

/// Parses the steps of a record; fails with the first unknown line. A last line without a line
/// break was cut by a crash before its step was made, so it is ignored.
fn parse_steps(text: &str, name: &str) -> Result<Vec<SetupStep>, String> {
    text.split_inclusive('\n')
        .filter_map(|line| line.strip_suffix('\n'))
        .map(|line| SetupStep::parse(line, name).ok_or_else(|| line.to_owned()))
        .collect()
}

/// Parses the owner's pid and start time in a record's name.
fn parse_owner(name: &str) -> Option<(u32, u64)> {
    let mut parts = name.strip_prefix(PREFIX)?.split('-');
    let owner = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    parts.next()?.parse::<u32>().ok()?;
    parts.next().is_none().then_some(owner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "aquifer-setup-12-345-0";

    fn all_steps() -> Vec<SetupStep> {
        vec![
            SetupStep::Cgroup(PathBuf::from(format!("/sys/fs/cgroup/memory/{NAME}"))),
            SetupStep::SwapFile(PathBuf::from(format!("/var/tmp/{NAME}"))),
            SetupStep::Zram { number: 3, added: true },
            SetupStep::Zram { number: 0, added: false },
            SetupStep::PageCluster(3),
            SetupStep::Mount(PathBuf::from(format!("/run/aquifer/{NAME}"))),
            SetupStep::LoopSwap(7),
        ]
    }

    #[test]
    fn steps_survive_serialisation_and_a_cut_file_has_its_whole_lines() {
        let text: String = all_steps().iter().map(|step| step.to_line() + "\n").collect();
        assert_eq!(parse_steps(&text, NAME), Ok(all_steps()));
        // A cut file yields the whole lines before the cut.
        for end in 0..text.len() {
            let whole_lines = text[..end].matches('\n').count();
            assert_eq!(parse_steps(&text[..end], NAME), Ok(all_steps()[..whole_lines].to_vec()));
        }
    }

    #[test]
    fn foreign_paths_and_unknown_steps_are_refused() {
        for line in [
            "",
            "cgroup",
            "cgroup /sys/fs/cgroup/memory/other",
            "swap-file /etc/passwd",
            "swap-file aquifer-setup-12-345-0",
            "swap-file /aquifer-setup-12-345-0/..",
            "zram x",
            "zram-added -1",
            "page-cluster 99999999999999999999",
            "mount /",
            "loop-swap -1",
            "format-disk 1",
        ] {
            assert_eq!(parse_steps(&format!("{line}\n"), NAME), Err(line.to_owned()));
        }
    }

    #[test]
    fn owners_are_read_from_names() {
        assert_eq!(parse_owner(NAME), Some((12, 345)));
        for name in [
            "",
            "aquifer-setup-",
            "aquifer-setup-1-2",
            "aquifer-setup-1-2-3-4",
            "aquifer-setup-x-2-3",
            "1-2-3",
        ] {
            assert_eq!(parse_owner(name), None, "{name}");
        }
    }
}

#[cfg(test)]
mod golden_tests;
