//! Memory that is left below the limits of a process's cgroups, in version 1 or 2.

use std::path::{Path, PathBuf};

const MOUNT: &str = "/sys/fs/cgroup";

/// The files of one version of the memory controller.
#[derive(Clone, Copy, Debug)]
struct ControllerFiles {
    limit: &'static str,
    used: &'static str,
    /// The line of `memory.stat` with page cache that can be dropped.
    cache: &'static str,
}

const V1: ControllerFiles = ControllerFiles {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cache: "total_inactive_file",
};
const V2: ControllerFiles =
    ControllerFiles { limit: "memory.max", used: "memory.current", cache: "inactive_file" };

/// The memory cgroup of a process, with its ancestors.
#[derive(Clone, Debug)]
pub struct CgroupMemory {
    /// The folder of the cgroup, then those of its ancestors.
    folders: Vec<PathBuf>,
    files: ControllerFiles,
}

impl CgroupMemory {
    /// The memory cgroup of this process; `None` if there is none.
    #[must_use]
    pub fn of_this_process() -> Option<Self> {
        Self::in_file("/proc/self/cgroup")
    }

    /// The memory cgroup of a process; `None` if there is none, or no such process.
    #[must_use]
    pub fn of_process(pid: u32) -> Option<Self> {
        Self::in_file(&format!("/proc/{pid}/cgroup"))
    }

    fn in_file(path: &str) -> Option<Self> {
        let (root, path, files) = find(&std::fs::read_to_string(path).ok()?)?;
        let folder = |path: &Path| root.join(path.strip_prefix("/").unwrap_or(path));
        Some(Self { folders: Path::new(&path).ancestors().map(folder).collect(), files })
    }

    /// The least memory in bytes that is left below the limits of the cgroup and its ancestors;
    /// `None` if none has a limit.
    #[must_use]
    pub fn remaining_bytes(&self) -> Option<u64> {
        self.folders.iter().filter_map(|folder| remaining_in(folder, self.files)).min()
    }

    /// The least limit in bytes of the cgroup and its ancestors; `None` if none has one.
    #[must_use]
    pub fn limit_bytes(&self) -> Option<u64> {
        self.folders.iter().filter_map(|folder| limit_of(folder, self.files)).min()
    }

    /// The file with the memory pressure in the cgroup, which only version 2 has, and the root
    /// cgroup has not.
    pub(crate) fn pressure_file(&self) -> Option<PathBuf> {
        Some(self.folders.first()?.join("memory.pressure"))
    }
}

/// Finds the mount point of the memory controller, the cgroup of this process in it, and its files
/// in the text of `/proc/self/cgroup`.
fn find(own: &str) -> Option<(PathBuf, String, ControllerFiles)> {
    let lines: Vec<Vec<&str>> = own.lines().map(|line| line.splitn(3, ':').collect()).collect();
    let in_v1 = lines.iter().find_map(|fields| match fields[..] {
        [_, controllers, path] if controllers.split(',').any(|name| name == "memory") => {
            Some((Path::new(MOUNT).join("memory"), path.to_owned(), V1))
        }
        _ => None,
    });
    in_v1.or_else(|| {
        lines.iter().find_map(|fields| match fields[..] {
            ["0", "", path] => Some((PathBuf::from(MOUNT), path.to_owned(), V2)),
            _ => None,
        })
    })
}

/// The memory in bytes that is left below the limit of one cgroup; `None` if it has no limit.
fn remaining_in(folder: &Path, files: ControllerFiles) -> Option<u64> {
    let read = |name| std::fs::read_to_string(folder.join(name)).ok();
    let limit = limit_of(folder, files)?;
    let used: u64 = read(files.used)?.trim().parse().ok()?;
    let cache = read("memory.stat").and_then(|stat| value_of(&stat, files.cache)).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(cache)))
}

/// The limit of one cgroup in bytes, if it has one.
fn limit_of(folder: &Path, files: ControllerFiles) -> Option<u64> {
    let text = std::fs::read_to_string(folder.join(files.limit)).ok()?;
    // Without a limit, version 2 has the word "max" here, and version 1 a huge number.
    text.trim().parse().ok().filter(|limit| *limit < 1 << 60)
}

fn value_of(stat: &str, name: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_controller_is_found_in_either_version() {
        let of = |text| find(text).map(|(root, path, files)| (root.display().to_string(), path, files.limit));
        let v1 = "11:cpu,cpuacct:/x\n0::/ignored\n7:memory:/user/one\n";
        assert_eq!(
            of(v1),
            Some(("/sys/fs/cgroup/memory".into(), "/user/one".into(), "memory.limit_in_bytes"))
        );
        let v2 = "0::/user.slice/a:b\n";
        assert_eq!(of(v2), Some(("/sys/fs/cgroup".into(), "/user.slice/a:b".into(), "memory.max")));
        assert_eq!(of(""), None);
        assert_eq!(of("3:cpuset:/\n"), None);
    }

    #[test]
    fn cache_that_can_be_dropped_counts_as_remaining() {
        let folder = std::env::temp_dir().join(format!("aquifer-cgroup-test-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
        assert_eq!(remaining_in(&folder, V2), None);
        write("memory.max", "max\n");
        write("memory.current", "700\n");
        assert_eq!(remaining_in(&folder, V2), None, "there is no limit");
        write("memory.max", "1000\n");
        assert_eq!(remaining_in(&folder, V2), Some(300));
        write("memory.stat", "anon 500\ninactive_file 200\n");
        assert_eq!(remaining_in(&folder, V2), Some(500));
        write("memory.current", "5000\n");
        assert_eq!(remaining_in(&folder, V2), Some(0));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
