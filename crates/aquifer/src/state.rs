//! The cluster's folder: sockets, locks, logs, the directory's file, and what shape the cluster has.

use std::fs::{self, DirBuilder, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use aquifer_channel::paths::cluster_folder;

/// A socket's path has at most 107 bytes; the longest name in the folder is `/node-65535.sock`.
const PATH_BYTES_MAX: usize = 107 - 16;

/// Why a folder cannot be a cluster's.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// It cannot be had.
    #[error("the state folder {path} cannot be {what}: {source}; choose another with --state", path = path.display())]
    System {
        /// The folder.
        path: PathBuf,
        /// What was attempted.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// It is a file, or a link where there should be none.
    #[error("the state folder {path} is not a folder; choose another with --state", path = path.display())]
    NotAFolder {
        /// The path.
        path: PathBuf,
    },
    /// Somebody else's.
    #[error("the state folder {path} belongs to user {owner}, not to you ({own}); choose another with --state", path = path.display())]
    Foreign {
        /// The folder.
        path: PathBuf,
        /// Whose it is.
        owner: u32,
        /// Who asks.
        own: u32,
    },
    /// Others can put files there.
    #[error("the state folder {path} can be written by other users (mode {mode:o}): chmod 700 it, or choose another with --state", path = path.display())]
    Open {
        /// The folder.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// Sockets have short names.
    #[error(
        "the path of the state folder has {bytes} bytes, and sockets allow {PATH_BYTES_MAX}: choose a shorter one with --state"
    )]
    TooLong {
        /// Its length.
        bytes: usize,
    },
}

/// A cluster's folder. It may not be there yet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StateDir {
    path: PathBuf,
}

impl StateDir {
    /// The folder that was asked for, or the user's own. Checked if it is there.
    ///
    /// # Errors
    /// It is not ours alone.
    pub fn locate(asked: Option<&Path>) -> Result<Self, StateError> {
        let path = match asked {
            Some(asked) => absolute(asked)?,
            None => cluster_folder(),
        };
        let bytes = path.as_os_str().as_bytes().len();
        if bytes > PATH_BYTES_MAX {
            return Err(StateError::TooLong { bytes });
        }
        let state = Self { path };
        state.check()?;
        Ok(state)
    }

    /// Create it if it is not there, for this user alone. Programs of root's that become somebody else still have to reach their agent,
    /// so all may pass through root's; what lies there is closed by modes of its own.
    ///
    /// # Errors
    /// It cannot be created, or somebody else was quicker.
    pub fn create(&self) -> Result<(), StateError> {
        let mut builder = DirBuilder::new();
        match builder.mode(Self::mode()).create(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => created.map_err(|source| self.error("created", source))?,
        }
        match builder.mode(0o700).create(self.path.join("log")) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => created.map_err(|source| self.error("written to", source))?,
        }
        self.check()
    }

    fn mode() -> u32 {
        if rustix::process::geteuid().is_root() { 0o711 } else { 0o700 }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory's file.
    pub fn directory_file(&self) -> PathBuf {
        self.path.join("directory.redb")
    }

    /// Where a part of this name listens.
    pub fn socket(&self, part: &str) -> PathBuf {
        self.path.join(format!("{part}.sock"))
    }

    /// Where the agent listens.
    pub fn agent_socket(&self) -> PathBuf {
        self.socket("agent")
    }

    /// What a part of this name holds locked while it lives.
    pub fn lock(&self, part: &str) -> PathBuf {
        self.path.join(format!("{part}.lock"))
    }

    /// What a part of this name has to tell.
    pub fn log(&self, part: &str) -> PathBuf {
        self.path.join("log").join(format!("{part}.log"))
    }

    /// The key that proves who belongs to the cluster.
    pub fn key_file(&self) -> PathBuf {
        self.path.join("cluster.key")
    }

    /// The cluster's shape.
    pub fn shape(&self) -> PathBuf {
        self.path.join("cluster.json")
    }

    fn check(&self) -> Result<(), StateError> {
        match fs::symlink_metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(source) => Err(self.error("looked at", source)),
            Ok(metadata) => self.check_owner(&metadata),
        }
    }

    fn check_owner(&self, metadata: &Metadata) -> Result<(), StateError> {
        let own = rustix::process::geteuid().as_raw();
        if !metadata.is_dir() {
            return Err(StateError::NotAFolder { path: self.path.clone() });
        }
        if metadata.uid() != own {
            return Err(StateError::Foreign { path: self.path.clone(), owner: metadata.uid(), own });
        }
        if metadata.mode() & 0o022 != 0 {
            return Err(StateError::Open { path: self.path.clone(), mode: metadata.mode() & 0o7777 });
        }
        Ok(())
    }

    fn error(&self, what: &'static str, source: io::Error) -> StateError {
        StateError::System { path: self.path.clone(), what, source }
    }
}

/// Parts run in `/`, so the path must not depend on where it was typed.
fn absolute(asked: &Path) -> Result<PathBuf, StateError> {
    let error = |source| StateError::System { path: asked.to_owned(), what: "found", source };
    match fs::canonicalize(asked) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        found => return found.map_err(error),
    }
    // It is not there yet: its parent must be.
    let absolute = std::path::absolute(asked).map_err(error)?;
    match (absolute.parent().map(fs::canonicalize), absolute.file_name()) {
        (Some(Ok(parent)), Some(name)) => Ok(parent.join(name)),
        _ => Ok(absolute),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn in_folder() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        (folder, path)
    }

    #[test]
    fn a_new_folder_is_private() {
        let (_folder, path) = in_folder();
        let state = StateDir::locate(Some(&path)).unwrap();
        assert!(!path.exists(), "looking for it does not create it");
        state.create().unwrap();
        state.create().expect("twice is fine");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, StateDir::mode());
        assert_eq!(fs::metadata(path.join("log")).unwrap().mode() & 0o777, 0o700);
        assert!(StateDir::locate(Some(&path)).is_ok());
    }

    #[test]
    fn a_folder_that_others_can_write_is_refused() {
        let (_folder, path) = in_folder();
        fs::create_dir(&path).unwrap();
        for (mode, is_fine) in [(0o755, true), (0o700, true), (0o770, false), (0o707, false)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(StateDir::locate(Some(&path)).is_ok(), is_fine, "{mode:o}");
        }
    }

    #[test]
    fn what_is_no_folder_is_refused() {
        let (_folder, path) = in_folder();
        fs::write(&path, "").unwrap();
        assert!(matches!(StateDir::locate(Some(&path)), Err(StateError::NotAFolder { .. })));
        assert!(StateDir::locate(Some(&path.join("below"))).is_err());
    }

    #[test]
    fn a_link_is_followed_when_it_is_asked_for_only() {
        let (folder, path) = in_folder();
        fs::create_dir(&path).unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert_eq!(StateDir::locate(Some(&link)).unwrap().path(), fs::canonicalize(&path).unwrap());
        assert!(matches!(StateDir { path: link }.check(), Err(StateError::NotAFolder { .. })));
    }

    #[test]
    fn a_path_at_the_limit_leaves_room_for_sockets() {
        let longest = PathBuf::from(format!("/{}", "d".repeat(PATH_BYTES_MAX - 1)));
        let state = StateDir::locate(Some(&longest)).unwrap();
        assert_eq!(state.socket("node-65535").as_os_str().len(), 107);
        let over = PathBuf::from(format!("/{}", "d".repeat(PATH_BYTES_MAX)));
        assert!(matches!(StateDir::locate(Some(&over)), Err(StateError::TooLong { .. })));
    }
}
