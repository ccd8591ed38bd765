//! Temporary folders of benches and of the demo, and removal of the folders of killed ones.
//!
//! The name of a folder has the process number of its owner, so that a later bench finds the
//! folders whose owner has ended.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::BenchError;

/// Start of the name of a temporary folder; the owner's process number follows.
const PREFIX: &str = "aquifer-bench-";

/// Creates a temporary folder, after removing those of benches that have ended.
///
/// # Errors
/// If the folder cannot be created.
pub fn temporary() -> Result<TempDir, BenchError> {
    for path in abandoned(&std::env::temp_dir(), PREFIX) {
        // A failure to remove a folder is ignored: the bench can still measure.
        let _ = std::fs::remove_dir_all(&path);
    }
    create(PREFIX)
}

/// Creates a temporary folder with a prefix and this process's number in its name. Other users can
/// enter and not list it, so it can be the state folder of a cluster.
///
/// # Errors
/// If it cannot be created.
pub fn create(prefix: &str) -> Result<TempDir, BenchError> {
    let parent = std::env::temp_dir();
    tempfile::Builder::new()
        .prefix(&format!("{prefix}{}-", std::process::id()))
        .permissions(Permissions::from_mode(0o711))
        .tempdir_in(&parent)
        .map_err(BenchError::io("create a folder in", &parent))
}

/// Folders of this user with a prefix, whose owner has ended.
pub fn abandoned(parent: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(parent) else {
        return Vec::new();
    };
    let paths = entries.flatten().map(|entry| entry.path());
    let has_ended = |pid: u32| !Path::new(&format!("/proc/{pid}")).exists();
    // A folder of another user may be a trap: files would be written or removed through its links.
    paths.filter(|path| owner(path, prefix).is_some_and(has_ended) && is_private(path)).collect()
}

/// Whether the path is a folder of this user that no other user can write to.
fn is_private(path: &Path) -> bool {
    let own = rustix::process::geteuid().as_raw();
    std::fs::symlink_metadata(path)
        .is_ok_and(|found| found.is_dir() && found.uid() == own && found.mode() & 0o022 == 0)
}

/// The process number in a folder's name.
fn owner(path: &Path, prefix: &str) -> Option<u32> {
    let (pid, _) = path.file_name()?.to_str()?.strip_prefix(prefix)?.split_once('-')?;
    pid.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_folders_of_ended_processes_are_abandoned() {
        let parent = tempfile::tempdir().unwrap();
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let make = |name: String| {
            let path = parent.path().join(name);
            std::fs::create_dir(&path).unwrap();
            path
        };
        let left = make(format!("{PREFIX}{}-abc", ended.id()));
        make(format!("{PREFIX}{}-abc", std::process::id()));
        make(format!("{PREFIX}abc"));
        make(format!("other-{}-abc", ended.id()));
        assert_eq!(abandoned(parent.path(), PREFIX), [left]);
        assert!(abandoned(Path::new("/nonexistent"), PREFIX).is_empty());
    }

    #[test]
    fn a_folder_that_other_users_can_write_to_is_not_private() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let folder = tempfile::tempdir().unwrap();
        assert!(is_private(folder.path()));
        let link = folder.path().join("link");
        symlink(folder.path(), &link).unwrap();
        assert!(!is_private(&link));
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(!is_private(folder.path()));
        assert!(!is_private(Path::new("/nonexistent")));
    }

    #[test]
    fn the_owner_is_in_the_name() {
        assert_eq!(owner(Path::new("/tmp/aquifer-bench-12-abc"), PREFIX), Some(12));
        assert_eq!(owner(Path::new("/tmp/aquifer-bench-x-abc"), PREFIX), None);
        assert_eq!(owner(Path::new("/tmp/aquifer-bench-12"), PREFIX), None);
        assert_eq!(owner(Path::new("/tmp/other-12-abc"), PREFIX), None);
    }
}
