//! An unprivileged user for servers that refuse to run as root, with a folder and a copy of
//! Aquifer's binaries.

use std::ffi::{OsStr, OsString};
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use aquifer_bench::BenchError;
use aquifer_bench::support::cluster::aquifer_program;
use aquifer_bench::support::folder;
use tempfile::TempDir;

/// User id of Debian's unprivileged user.
const UID: u32 = 65_534;
const SHIM: &str = "libaquifer_shim.so";

/// The unprivileged user, or the user of this process if that is not root.
#[derive(Debug)]
pub struct UnprivilegedUser {
    folder: TempDir,
    is_other: bool,
}

impl UnprivilegedUser {
    /// Creates the user's folder.
    ///
    /// # Errors
    /// If the folder cannot be created, or its owner cannot be changed.
    pub fn new() -> Result<Self, BenchError> {
        let folder = folder::temporary()?;
        let user = Self { folder, is_other: rustix::process::geteuid().is_root() };
        let home = user.home();
        fs::create_dir(&home).map_err(BenchError::io("create folder", &home))?;
        if user.is_other {
            chown(&home, Some(UID), Some(UID)).map_err(BenchError::io("change the owner of", &home))?;
            let open = Permissions::from_mode(0o755);
            let folder = user.folder.path();
            fs::set_permissions(folder, open).map_err(BenchError::io("change the mode of", folder))?;
            user.copy_aquifer()?;
        }
        Ok(user)
    }

    /// Copies the binaries, which may be in a folder that other users cannot enter.
    fn copy_aquifer(&self) -> Result<(), BenchError> {
        let own = aquifer_program()?;
        let target = self.aquifer();
        fs::copy(&own, &target).map_err(BenchError::io("copy this program to", &target))?;
        let shim = own.with_file_name(SHIM);
        let target = self.folder.path().join(SHIM);
        fs::copy(&shim, &target).map_err(BenchError::io("copy the shim to", &target))?;
        Ok(())
    }

    fn aquifer(&self) -> PathBuf {
        self.folder.path().join("aquifer")
    }

    /// The user's folder.
    pub fn home(&self) -> PathBuf {
        self.folder.path().join("home")
    }

    /// Path for the shared socket of a cluster; `None` if this process runs as the user.
    pub fn socket(&self, cluster: &str) -> Option<PathBuf> {
        self.is_other.then(|| self.folder.path().join(format!("{cluster}.sock")))
    }

    /// Start of a command line that changes to the user.
    fn prefix(&self) -> Vec<OsString> {
        if !self.is_other {
            return Vec::new();
        }
        let id = UID.to_string();
        ["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups"].map(OsString::from).to_vec()
    }

    /// A command that runs a program as the user. `start` makes the command from the first program
    /// name.
    ///
    /// # Errors
    /// Those of `start`.
    pub fn command<E>(
        &self,
        program: &Path,
        start: impl FnOnce(&OsStr) -> Result<Command, E>,
    ) -> Result<Command, E> {
        let mut words = self.prefix();
        words.push(program.into());
        let mut command = start(&words[0])?;
        command.args(&words[1..]).current_dir(self.home());
        Ok(command)
    }

    /// A command that runs a program as the user with `aquifer run`, on the agent at `socket`.
    /// `options`: further options of `aquifer run`.
    pub fn pooled_command(
        &self,
        socket: &Path,
        options: &[&str],
        limit_bytes: u64,
        stats: &Path,
        program: &Path,
    ) -> Command {
        let words = self.prefix();
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).arg(self.aquifer()).env("AQUIFER_AGENT", socket);
        // Root's folders are closed to the user.
        command.env("HOME", self.home()).env_remove("XDG_RUNTIME_DIR").env_remove("AQUIFER_STATE");
        command.args(["run", "--local", &limit_bytes.to_string()]).args(options);
        command.arg("--stats").arg(stats).arg("--");
        command.arg(program).current_dir(self.home());
        command
    }
}
