//! A cluster of root that serves all users, and copies of the programs that all users can execute.

use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::{Cluster, build};

/// A cluster that serves all users, and a folder that all users can enter.
#[derive(Debug)]
pub struct SharedCluster {
    /// The cluster, of root. Dropped before the folder, which may have its program.
    pub cluster: Cluster,
    folder: TempDir,
}

impl SharedCluster {
    /// Starts the cluster and copies the programs.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn up() -> Self {
        Self::up_with(2, &[])
    }

    /// Starts the cluster with a number of nodes and further options of `aquifer up`.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn up_with(nodes: usize, options: &[&str]) -> Self {
        Self::up_in(&[], nodes, options)
    }

    /// Starts the cluster with environment variables for its daemons.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn up_in(environment: &[(&str, &str)], nodes: usize, options: &[&str]) -> Self {
        Self::up_of(options, |_, words| Cluster::up_in(environment, nodes, "256M", words))
    }

    /// Starts the cluster with a supervisor, which starts daemons again.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn up_with_supervisor(nodes: usize) -> Self {
        Self::up_of(&[], |_, words| Cluster::up_with_supervisor(nodes, "256M", words))
    }

    /// Starts the cluster by a shell command that executes its arguments, which `command` returns
    /// for the folder.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn up_through(nodes: usize, command: impl FnOnce(&Path) -> String) -> Self {
        Self::up_of(&[], |folder, words| {
            let script = folder.join("start");
            let command = command(folder);
            let text = format!("#!/bin/sh\nexec {command} {} \"$@\"\n", build::binary().display());
            std::fs::write(&script, text).expect("our own folder");
            std::fs::set_permissions(&script, Permissions::from_mode(0o755)).expect("our own file");
            let words = [words, &["--no-restart"]].concat();
            let mut cluster = Cluster::up_by(&script, nodes, "256M", &words);
            // The script ends before the cluster.
            cluster.set_binary(build::binary());
            cluster
        })
    }

    /// Copies the programs to a folder, and starts the cluster by `up`, whose arguments are the
    /// folder and the options.
    fn up_of(options: &[&str], up: impl FnOnce(&Path, &[&str]) -> Cluster) -> Self {
        let folder = TempDir::with_prefix("aquifer-e2e-users-").expect("a temporary folder can be made");
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("our own folder");
        let checker = build::programs().join("checker");
        let shim = build::binary().with_file_name("libaquifer_shim.so");
        for file in [build::binary().to_owned(), shim, checker] {
            let name = file.file_name().expect("a file");
            std::fs::copy(&file, folder.path().join(name)).expect("a program can be copied");
        }
        let socket = folder.path().join("agent.sock");
        let socket = socket.to_str().expect("a plain path").to_owned();
        let mut words = vec!["--shared-socket", &socket];
        words.extend(options);
        let cluster = up(folder.path(), &words);
        Self { cluster, folder }
    }

    /// The path of a file in the folder.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Creates a folder for one user, in the folder.
    ///
    /// # Panics
    /// If it cannot be created.
    #[must_use]
    pub fn private_folder(&self, name: &str, uid: u32) -> PathBuf {
        let folder = self.path(name);
        std::fs::create_dir(&folder).expect("our own folder");
        chown(&folder, Some(uid), Some(uid)).expect("root may");
        folder
    }

    /// A command as a user without capabilities.
    #[must_use]
    pub fn plain_command(&self, uid: u32, program: &Path) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", &uid.to_string(), "--regid", &uid.to_string(), "--clear-groups"]);
        command.args(["--bounding-set=-all", "--no-new-privs"]).arg(program).current_dir(self.folder.path());
        command
    }

    /// The command `aquifer …` as a user without capabilities.
    #[must_use]
    pub fn command(&self, uid: u32, words: &[&str]) -> Command {
        let mut command = self.plain_command(uid, &self.path("aquifer"));
        let state = format!("{}-{uid}", self.folder.path().display());
        command.env("AQUIFER_AGENT", self.path("agent.sock")).env("AQUIFER_STATE", state).args(words);
        command
    }
}
