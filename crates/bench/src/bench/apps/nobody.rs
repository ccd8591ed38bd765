//! Another user, for servers that refuse to be root: with a folder of its own, and Aquifer's
//! program where it can reach it.

use std::ffi::{OsStr, OsString};
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::bench::BenchError;
use crate::bench::support::cluster::aquifer_program;
use crate::bench::support::folder;

/// Debian's `nobody`.
const UID: u32 = 65_534;
const SHIM: &str = "libaquifer_shim.so";

/// That user; this process's own, if it is not root's.
#[derive(Debug)]
pub struct Nobody {
    folder: TempDir,
    is_other: bool,
}

impl Nobody {
    /// With a folder in the system's one for temporary files.
    ///
    /// # Errors
    /// If the folder cannot be made or given away.
    pub fn new() -> Result<Self, BenchError> {
        let folder = folder::temporary()?;
        let nobody = Self { folder, is_other: rustix::process::geteuid().is_root() };
        let home = nobody.home();
        fs::create_dir(&home).map_err(BenchError::io("create the folder", &home))?;
        if nobody.is_other {
            chown(&home, Some(UID), Some(UID)).map_err(BenchError::io("give away", &home))?;
            let open = Permissions::from_mode(0o755);
            let folder = nobody.folder.path();
            fs::set_permissions(folder, open).map_err(BenchError::io("open", folder))?;
            nobody.copy_aquifer()?;
        }
        Ok(nobody)
    }

    /// What root runs may lie where nobody else may look.
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

    /// A folder that is that user's.
    pub fn home(&self) -> PathBuf {
        self.folder.path().join("home")
    }

    /// Where that user finds the agent of a cluster of this name; `None` if it needs no socket of
    /// its own.
    pub fn socket(&self, cluster: &str) -> Option<PathBuf> {
        self.is_other.then(|| self.folder.path().join(format!("{cluster}.sock")))
    }

    /// What has to stand before the words of a command, so that it is that user's; the first is a
    /// program.
    fn prefix(&self) -> Vec<OsString> {
        if !self.is_other {
            return Vec::new();
        }
        let id = UID.to_string();
        ["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups"].map(OsString::from).to_vec()
    }

    /// A command of that user, made of what `start` makes of its first word.
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

    /// A command of that user on the agent at `socket`.
    pub fn pooled_command(&self, socket: &Path, limit_bytes: u64, stats: &Path, program: &Path) -> Command {
        let words = self.prefix();
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).arg(self.aquifer()).env("AQUIFER_AGENT", socket);
        command.args(["run", "--local", &limit_bytes.to_string(), "--stats"]).arg(stats).arg("--");
        command.arg(program).current_dir(self.home());
        command
    }
}
