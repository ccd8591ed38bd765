//! State folder of a cluster: sockets, locks, logs, the directory's file, the key and the
//! configuration.

use std::fs::{self, DirBuilder, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use aquifer_channel::paths::{SYSTEM_FOLDER, cluster_folder, folder_of_environment};

/// Longest path of a state folder, in bytes: a socket's path has at most 107, and the longest name
/// of a socket is `/node-65535.sock`.
const PATH_BYTES_MAX: usize = 107 - 16;

/// Why a path cannot be a state folder.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The folder cannot be created or read.
    #[error("the state folder {path} cannot be {what}: {source}; choose another with \
        --state", path = path.display())]
    System {
        /// The folder.
        path: PathBuf,
        /// The attempted action.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The parent of the folder does not exist.
    #[error("the state folder {path} cannot be created: {parent}{origin} does not exist; create that \
        folder, or choose another state folder with \
        --state", path = path.display(), parent = parent.display())]
    NoParent {
        /// The folder.
        path: PathBuf,
        /// The parent folder.
        parent: PathBuf,
        /// Text for a parent that comes from the environment; else empty.
        origin: &'static str,
    },
    /// The path is a file or a symbolic link.
    #[error("the state folder {path} is not a folder; choose another with --state", path = path.display())]
    NotAFolder {
        /// The path.
        path: PathBuf,
    },
    /// The folder belongs to another user.
    #[error("the state folder {path} belongs to user {owner}, not to you ({own}); choose another with \
        --state", path = path.display())]
    OtherOwner {
        /// The folder.
        path: PathBuf,
        /// The user id of the owner.
        owner: u32,
        /// The user id of this process.
        own: u32,
    },
    /// Other users can list the folder, or create files in it.
    #[error("the state folder {path} can be {what} by other users (mode {mode:o}); run chmod {wanted:o} \
        {path}, or choose another with --state", path = path.display())]
    OpenToOthers {
        /// The folder.
        path: PathBuf,
        /// The access of others: "read" or "written".
        what: &'static str,
        /// The mode of the folder.
        mode: u32,
        /// The mode with which `aquifer` creates the folder.
        wanted: u32,
    },
    /// The path is too long for the sockets in the folder.
    #[error(
        "the path of the state folder has {bytes} bytes, but sockets in it allow {PATH_BYTES_MAX} at \
            most; choose a shorter one with --state"
    )]
    TooLong {
        /// The length of the path in bytes.
        bytes: usize,
    },
}

/// State folder of a cluster. It may not exist yet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StateDir {
    path: PathBuf,
    origin: Origin,
}

/// The source of the path of a state folder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Origin {
    /// The option `--state`.
    Option,
    /// The environment variable `AQUIFER_STATE`.
    Environment,
    /// The user's default folder.
    Default,
}

impl StateDir {
    /// The folder of the option `--state`; else that of the environment variable `AQUIFER_STATE`;
    /// else the default folder of the user. Checks it if it exists.
    ///
    /// # Errors
    /// If the folder belongs to another user, other users can list it or write to it, or its path
    /// is too long.
    pub fn locate(option: Option<&Path>) -> Result<Self, StateError> {
        let (path, origin) = match (option, folder_of_environment()) {
            (Some(given), _) => (absolute(given)?, Origin::Option),
            (None, Some(given)) => (absolute(&given)?, Origin::Environment),
            (None, None) => (cluster_folder(), Origin::Default),
        };
        Self::at(path, origin)
    }

    fn at(path: PathBuf, origin: Origin) -> Result<Self, StateError> {
        let bytes = path.as_os_str().as_bytes().len();
        if bytes > PATH_BYTES_MAX {
            return Err(StateError::TooLong { bytes });
        }
        let state = Self { path, origin };
        state.check()?;
        Ok(state)
    }

    /// Creates the folder if it does not exist, with access for this user only.
    ///
    /// All users may enter root's folder, but not list it: programs of root that change their user
    /// must still reach their agent. The files in it have modes of their own.
    ///
    /// # Errors
    /// If the folder cannot be created, or another user created it first.
    pub fn create(&self) -> Result<(), StateError> {
        self.create_home_folders()?;
        let mut builder = DirBuilder::new();
        match builder.mode(Self::mode()).create(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => created.map_err(|source| self.creation_error(source))?,
        }
        match builder.mode(0o700).create(self.path.join("log")) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => created.map_err(|source| self.error("written to", source))?,
        }
        self.check()
    }

    /// Creates `.local/state` in the home folder, if the folder is the default one there.
    fn create_home_folders(&self) -> Result<(), StateError> {
        match self.path.parent() {
            Some(parent) if parent.ends_with(".local/state") && self.path == cluster_folder() => {
                let mut builder = DirBuilder::new();
                let created = builder.recursive(true).mode(0o700).create(parent);
                created.map_err(|source| self.creation_error(source))
            }
            _ => Ok(()),
        }
    }

    fn mode() -> u32 {
        if rustix::process::geteuid().is_root() { 0o711 } else { 0o700 }
    }

    /// The start of a command line for the cluster in this folder, for messages.
    pub fn command(&self) -> String {
        match self.origin {
            Origin::Default => "aquifer".into(),
            Origin::Option | Origin::Environment => format!("aquifer --state {}", self.path.display()),
        }
    }

    /// The folder, if the option `--state` has named it.
    pub fn by_option(&self) -> Option<&Path> {
        (self.origin == Origin::Option).then_some(&*self.path)
    }

    /// The state folder of the daemons that systemd starts, instead of this one if this is the
    /// user's default; `None` if that folder cannot be used.
    pub fn system_folder(&self) -> Option<Self> {
        let system = Path::new(SYSTEM_FOLDER);
        let is_default = self.origin == Origin::Default && self.path != system;
        // Treated as named by the option, because later commands must name it.
        let state = is_default.then(|| Self::at(system.to_owned(), Origin::Option).ok()).flatten();
        state.filter(|state| state.path.is_dir())
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// File of the embedded directory.
    pub fn directory_file(&self) -> PathBuf {
        self.path.join("directory.redb")
    }

    /// Socket of the daemon with this name.
    pub fn socket(&self, daemon: &str) -> PathBuf {
        self.path.join(format!("{daemon}.sock"))
    }

    /// Socket of the agent.
    pub fn agent_socket(&self) -> PathBuf {
        self.socket("agent")
    }

    /// Lock file of the daemon with this name.
    pub fn lock(&self, daemon: &str) -> PathBuf {
        self.path.join(format!("{daemon}.lock"))
    }

    /// Log of the daemon with this name.
    pub fn log(&self, daemon: &str) -> PathBuf {
        self.path.join("log").join(format!("{daemon}.log"))
    }

    /// File with the cluster key.
    pub fn key_file(&self) -> PathBuf {
        self.path.join("cluster.key")
    }

    /// File with the cluster's configuration.
    pub fn cluster_config(&self) -> PathBuf {
        self.path.join("cluster.json")
    }

    fn check(&self) -> Result<(), StateError> {
        match fs::symlink_metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(source) => Err(self.error("read", source)),
            Ok(metadata) => self.check_owner(&metadata),
        }
    }

    fn check_owner(&self, metadata: &Metadata) -> Result<(), StateError> {
        let own = rustix::process::geteuid().as_raw();
        if !metadata.is_dir() {
            return Err(StateError::NotAFolder { path: self.path.clone() });
        }
        if metadata.uid() != own {
            return Err(StateError::OtherOwner { path: self.path.clone(), owner: metadata.uid(), own });
        }
        let mode = metadata.mode() & 0o7777;
        if mode & 0o066 == 0 {
            return Ok(());
        }
        let what = if mode & 0o022 == 0 { "read" } else { "written" };
        Err(StateError::OpenToOthers { path: self.path.clone(), what, mode, wanted: Self::mode() })
    }

    fn creation_error(&self, source: io::Error) -> StateError {
        match self.path.parent() {
            Some(parent) if source.kind() == io::ErrorKind::NotFound && !parent.exists() => {
                let runtime = std::env::var_os("XDG_RUNTIME_DIR");
                let is_runtime = runtime.is_some_and(|runtime| parent == runtime);
                let origin = if is_runtime { ", the value of XDG_RUNTIME_DIR," } else { "" };
                StateError::NoParent { path: self.path.clone(), parent: parent.to_owned(), origin }
            }
            _ => self.error("created", source),
        }
    }

    fn error(&self, what: &'static str, source: io::Error) -> StateError {
        StateError::System { path: self.path.clone(), what, source }
    }
}

/// The path without symbolic links; absolute, since daemons have another working directory.
fn absolute(given: &Path) -> Result<PathBuf, StateError> {
    let error = |source| StateError::System { path: given.to_owned(), what: "found", source };
    match fs::canonicalize(given) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        found => return found.map_err(error),
    }
    // The folder does not exist yet; its parent may.
    let absolute = std::path::absolute(given).map_err(error)?;
    match (absolute.parent().map(fs::canonicalize), absolute.file_name()) {
        (Some(Ok(parent)), Some(name)) => Ok(parent.join(name)),
        _ => Ok(absolute),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn new_path() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        (folder, path)
    }

    #[test]
    fn a_new_folder_is_private() {
        let (_folder, path) = new_path();
        let state = StateDir::locate(Some(&path)).unwrap();
        assert!(!path.exists(), "locating it does not create it");
        state.create().unwrap();
        state.create().expect("a second call changes nothing");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, StateDir::mode());
        assert_eq!(fs::metadata(path.join("log")).unwrap().mode() & 0o777, 0o700);
        assert!(StateDir::locate(Some(&path)).is_ok());
    }

    #[test]
    fn a_folder_that_others_can_list_or_write_is_refused() {
        let (_folder, path) = new_path();
        fs::create_dir(&path).unwrap();
        for (mode, refused) in [
            (0o700, None),
            (0o711, None),
            (0o755, Some("read")),
            (0o750, Some("read")),
            (0o704, Some("read")),
            (0o730, Some("written")),
            (0o707, Some("written")),
            (0o775, Some("written")),
        ] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let located = StateDir::locate(Some(&path)).map_err(|error| error.to_string());
            let Some(what) = refused else {
                assert!(located.is_ok(), "{mode:o}: {located:?}");
                continue;
            };
            let said = located.unwrap_err();
            let advice = format!("run chmod {:o} {}", StateDir::mode(), path.display());
            assert!(said.contains(&format!("can be {what} by other users (mode {mode:o})")), "{said}");
            assert!(said.contains(&advice), "{said}");
        }
    }

    #[test]
    fn a_missing_parent_is_named() {
        let (_folder, path) = new_path();
        let state = StateDir::locate(Some(&path.join("below"))).unwrap();
        let error = state.create().unwrap_err();
        assert!(
            matches!(&error, StateError::NoParent { parent, .. } if *parent == state.path.parent().unwrap())
        );
    }

    #[test]
    fn a_file_is_refused() {
        let (_folder, path) = new_path();
        fs::write(&path, "").unwrap();
        assert!(matches!(StateDir::locate(Some(&path)), Err(StateError::NotAFolder { .. })));
        assert!(StateDir::locate(Some(&path.join("below"))).is_err());
    }

    #[test]
    fn a_link_is_followed_only_if_it_is_given() {
        let (folder, path) = new_path();
        DirBuilder::new().mode(0o700).create(&path).unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert_eq!(StateDir::locate(Some(&link)).unwrap().path(), fs::canonicalize(&path).unwrap());
        assert!(matches!(
            StateDir { path: link, origin: Origin::Option }.check(),
            Err(StateError::NotAFolder { .. })
        ));
    }

    #[test]
    fn the_longest_path_leaves_room_for_sockets() {
        let longest = PathBuf::from(format!("/{}", "d".repeat(PATH_BYTES_MAX - 1)));
        let state = StateDir::locate(Some(&longest)).unwrap();
        for name in ["node-65535", "span-65535", "heaps-4095"] {
            assert_eq!(state.socket(name).as_os_str().len(), 107);
        }
        let over = PathBuf::from(format!("/{}", "d".repeat(PATH_BYTES_MAX)));
        assert!(matches!(StateDir::locate(Some(&over)), Err(StateError::TooLong { .. })));
    }
}
