//! PostgreSQL on the pool, as an unprivileged user.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cluster::text;
use crate::run::{Outcome, Running};
use crate::{SharedCluster, eventually, processes};

/// Debian's unprivileged user: PostgreSQL refuses root, and users without a name.
pub const UNPRIVILEGED_UID: u32 = 65_534;

/// A running server. [`Postgres::stop`] must be called.
#[derive(Debug)]
pub struct Postgres {
    server: Running,
    folder: PathBuf,
}

/// Path of a program of the newest installed PostgreSQL.
fn tool(name: &str) -> PathBuf {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let newest = versions.map(|entry| entry.path().join("bin").join(name)).filter(|path| path.exists()).max();
    newest.expect("PostgreSQL is not installed: scripts/install-deps.sh long installs it")
}

fn plain(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

impl Postgres {
    /// Creates a database in a new folder, starts a server on the pool, and waits until it answers.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn start(cluster: &SharedCluster, limit: &str) -> Self {
        let folder = cluster.private_folder("postgres", UNPRIVILEGED_UID);
        let data = folder.join("data");
        let mut make = cluster.plain_command(UNPRIVILEGED_UID, &tool("initdb"));
        let made = make.args(["-N", "-A", "trust", "-U", "test", "--locale=C", "-D", plain(&data)]).output();
        let made = made.expect("setpriv can be started");
        assert!(made.status.success(), "initdb: {}", text(&made.stderr));
        let server = tool("postgres");
        let mut words = vec!["run"];
        words.extend(cluster.cluster.run_options().iter().map(String::as_str));
        words.extend([
            "--local",
            limit,
            "--",
            plain(&server),
            "-D",
            plain(&data),
            "-k",
            plain(&folder),
            "-c",
            "listen_addresses=",
            "-c",
            "shared_buffers=16MB",
            "-c",
            "jit=off",
            "-c",
            "fsync=off",
            "-c",
            "max_parallel_workers_per_gather=0",
        ]);
        let mut command = cluster.command(UNPRIVILEGED_UID, &words);
        command.env_remove("PGDATA");
        let mut postgres = Self { server: Running::start(&mut command, true, Box::new(|| 0)), folder };
        eventually("PostgreSQL to answer", || {
            assert!(!postgres.server.has_ended(), "PostgreSQL ended while it started");
            postgres.command("pg_isready").output().ok().filter(|output| output.status.success())
        });
        postgres
    }

    /// The command of a PostgreSQL client that connects to the server.
    #[must_use]
    pub fn command(&self, client: &str) -> Command {
        let mut command = Command::new(tool(client));
        command.env("PGHOST", &self.folder).env("PGUSER", "test").env("PGDATABASE", "postgres");
        command
    }

    /// Runs a client and returns its output.
    ///
    /// # Panics
    /// If the client fails.
    #[must_use]
    pub fn ask(&self, client: &str, words: &[&str]) -> String {
        let output = self.command(client).args(words).output().expect("the client can be started");
        assert!(output.status.success(), "{client} {words:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// Runs a query and returns its result.
    ///
    /// # Panics
    /// If it fails.
    #[must_use]
    pub fn query(&self, query: &str) -> String {
        self.ask("psql", &["-X", "-A", "-t", "-q", "-v", "ON_ERROR_STOP=1", "-c", query]).trim().to_owned()
    }

    /// Fills the tables of pgbench.
    ///
    /// # Panics
    /// If that fails.
    pub fn fill_tables(&self) {
        let _ = self.ask("pgbench", &["-i", "-q", "-s", "2"]);
    }

    /// Asserts that the balances of pgbench's tables agree after this number of transactions.
    ///
    /// # Panics
    /// If the balances do not agree.
    pub fn assert_balances(&self, transactions: usize) {
        let sums = self.query(
            "SELECT count(*), sum(delta) = (SELECT sum(abalance) FROM pgbench_accounts), \
             sum(delta) = (SELECT sum(bbalance) FROM pgbench_branches), \
             sum(delta) = (SELECT sum(tbalance) FROM pgbench_tellers) FROM pgbench_history",
        );
        assert_eq!(sums, format!("{transactions}|t|t|t"));
    }

    /// Stops the server.
    ///
    /// # Panics
    /// If it does not end.
    #[must_use]
    pub fn stop(self) -> Outcome {
        processes::signal(self.server.pid(), rustix::process::Signal::INT);
        self.server.wait()
    }
}
