//! Swap devices of `aquifer run --swap`, as this machine shows them.

use std::fs;
use std::path::{Path, PathBuf};

use crate::cluster::Cluster;
use crate::processes;

/// Start of the names of records and of all that they undo.
const PREFIX: &str = "aquifer-setup-";

/// Whether this machine supports swap devices; prints what is missing.
#[must_use]
pub fn is_possible() -> bool {
    let missing: Vec<&str> =
        ["/dev/fuse", "/dev/loop-control"].into_iter().filter(|path| !Path::new(path).exists()).collect();
    if !missing.is_empty() {
        eprintln!("skipped: this machine has no {}", missing.join(" and no "));
    }
    missing.is_empty()
}

/// Names of the records of a cluster's swap devices.
#[must_use]
pub fn devices(cluster: &Cluster) -> Vec<String> {
    let entries = fs::read_dir(cluster.state()).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.starts_with(PREFIX))
        .collect()
}

/// All parts of a device on this machine: cgroups, mounts, loop devices and the record.
#[must_use]
pub fn traces(name: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut note = |what: &str, path: PathBuf| {
        if path.exists() {
            found.push(format!("{what} {}", path.display()));
        }
    };
    note("record", Path::new("/run/aquifer-setups").join(name));
    note("cgroup", Path::new("/sys/fs/cgroup/memory").join(name));
    note("cgroup", Path::new("/sys/fs/cgroup").join(name));
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    found.extend(mounts.lines().filter(|line| line.contains(name)).map(|line| format!("mount {line}")));
    for entry in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
        let backing = fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
        if backing.contains(name) {
            found.push(format!("{} on {}", entry.path().display(), backing.trim()));
        }
    }
    found
}

/// Process numbers of a cluster's swap servers.
#[must_use]
pub fn servers(cluster: &Cluster) -> Vec<u32> {
    let state = cluster.state().to_str().expect("temporary folders have plain names");
    let is_server = |pid: &u32| {
        let arguments = processes::arguments(*pid);
        processes::is_alive(*pid)
            && arguments.iter().any(|word| word == "swap-server")
            && arguments.iter().any(|word| word == state)
    };
    processes::all().into_iter().filter(is_server).collect()
}

/// Bytes that the kernel has swapped out for the cgroup of a record.
#[must_use]
pub fn swapped_bytes(name: &str) -> u64 {
    let field = |path: PathBuf, name: &str| -> Option<u64> {
        let text = fs::read_to_string(path).ok()?;
        text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
    };
    let v1 = field(Path::new("/sys/fs/cgroup/memory").join(name).join("memory.stat"), "swap ");
    let v2 = || {
        let path = Path::new("/sys/fs/cgroup").join(name).join("memory.swap.current");
        fs::read_to_string(path).ok()?.trim().parse().ok()
    };
    v1.or_else(v2).unwrap_or(0)
}

/// The limit of memory of the cgroup of a record.
///
/// # Panics
/// If it cannot be read.
#[must_use]
pub fn limit_bytes(name: &str) -> u64 {
    let v1 = Path::new("/sys/fs/cgroup/memory").join(name).join("memory.limit_in_bytes");
    let v2 = Path::new("/sys/fs/cgroup").join(name).join("memory.max");
    let text = fs::read_to_string(v1).or_else(|_| fs::read_to_string(v2)).expect("the cgroup has a limit");
    text.trim().parse().expect("a number")
}
