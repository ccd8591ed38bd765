//! The file of the items of a server: memcached's option `-e`.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

/// Permissions of the file's group and of other users.
const GROUP_AND_OTHERS: u32 = 0o077;

/// Opens or creates the file with a length of `bytes`, and locks it against other processes. Most
/// of the bytes are never written: a server writes about as many as its limit.
///
/// Other users must not be able to change the file: they could shorten it while it is mapped.
///
/// # Errors
/// If the file cannot be opened, if other users can access it, or if its file system has no room
/// for `limit` bytes.
pub fn open(path: &Path, bytes: u64, limit: u64) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(|error| match error {
        Errno::LOOP => refused("it is a symbolic link"),
        other => other.into(),
    })?;
    check(&file)?;
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|error| match error {
        Errno::WOULDBLOCK => refused("another process uses it"),
        other => other.into(),
    })?;
    let file = std::fs::File::from(file);
    let metadata = file.metadata()?;
    if metadata.len() != bytes {
        // The file is new, or of a server with another memory size.
        file.set_len(0)?;
        file.set_len(bytes)?;
    }
    let file = OwnedFd::from(file);
    let system = rustix::fs::fstatvfs(&file)?;
    let room = system.f_bavail.saturating_mul(system.f_frsize).saturating_add(metadata.blocks() * 512);
    if room < limit {
        let (room, limit) = (room >> 20, limit >> 20);
        return Err(refused(&format!(
            "its file system has room for {room} MiB, and the items may need {limit} MiB: give a smaller -m"
        )));
    }
    Ok(file)
}

/// Checks that only this user can access an open file.
fn check(file: &OwnedFd) -> io::Result<()> {
    let found = rustix::fs::fstat(file)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err(refused("it is not a regular file"));
    }
    let own = rustix::process::geteuid().as_raw();
    if found.st_uid != own {
        return Err(refused(&format!("it belongs to user {}, not to user {own}", found.st_uid)));
    }
    if found.st_nlink != 1 {
        return Err(refused("it has several names (hard links)"));
    }
    let mode = found.st_mode & 0o7777;
    if mode & GROUP_AND_OTHERS != 0 {
        return Err(refused(&format!("other users may use it (mode {mode:o}): run chmod 600 on it")));
    }
    Ok(())
}

fn refused(why: &str) -> io::Error {
    io::Error::other(why)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::PathBuf;

    use super::*;

    /// A folder with a file that is not empty.
    fn folder() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = folder.path().join("items");
        fs::write(&path, "something").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        (folder, path)
    }

    fn refusal(path: &Path) -> String {
        open(path, 8192, 1).unwrap_err().to_string()
    }

    #[test]
    fn a_new_file_is_for_its_user_only() {
        let (folder, path) = folder();
        let new = folder.path().join("new");
        for path in [&new, &path] {
            let _open = open(path, 8192, 1).unwrap();
            let metadata = fs::metadata(path).unwrap();
            assert_eq!((metadata.len(), metadata.mode() & 0o7777), (8192, 0o600));
            assert_eq!(refusal(path), "another process uses it");
        }
    }

    #[test]
    fn a_file_system_without_room_is_refused() {
        let (_folder, path) = folder();
        let refusal = open(&path, 8192, 1 << 60).unwrap_err().to_string();
        assert!(refusal.contains("smaller -m"), "{refusal}");
    }

    #[test]
    fn files_that_others_can_change_are_refused_and_not_changed() {
        let (folder, path) = folder();
        for mode in [0o640, 0o602, 0o644] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            assert!(refusal(&path).contains(&format!("mode {mode:o}")));
        }
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        let link = folder.path().join("link");
        symlink(&path, &link).unwrap();
        assert_eq!(refusal(&link), "it is a symbolic link");
        fs::hard_link(&path, folder.path().join("second")).unwrap();
        assert!(refusal(&path).contains("hard links"));
        fs::remove_file(folder.path().join("second")).unwrap();
        std::os::unix::fs::chown(&path, Some(12345), None).unwrap();
        assert!(refusal(&path).contains("belongs to user 12345"));
        let fifo = folder.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert_eq!(refusal(&fifo), "it is not a regular file");
        assert_eq!(fs::read_to_string(&path).unwrap(), "something");
    }
}
