//! A PostgreSQL of Debian's, in a folder of a user without rights, plainly or on the pool.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cluster::text;
use crate::run::{Outcome, Running};
use crate::{House, eventually, processes};

/// Debian's nobody: PostgreSQL wants a user with a name, and not root.
pub const NOBODY: u32 = 65_534;

/// A server. It must be stopped.
#[derive(Debug)]
pub struct Postgres {
    server: Running,
    folder: PathBuf,
}

/// A program of PostgreSQL's newest version here.
fn tool(name: &str) -> PathBuf {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let newest = versions.map(|entry| entry.path().join("bin").join(name)).filter(|path| path.exists()).max();
    newest.expect("there is no PostgreSQL: scripts/install-deps.sh long installs it")
}

fn plain(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

impl Postgres {
    /// Make a database in a new folder, and start a server on the pool that answers when this
    /// returns.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn start(house: &House, limit: &str) -> Self {
        let folder = house.room("postgres", NOBODY);
        let data = folder.join("data");
        let mut make = house.plain_command(NOBODY, &tool("initdb"));
        let made = make.args(["-N", "-A", "trust", "-U", "test", "--locale=C", "-D", plain(&data)]).output();
        let made = made.expect("setpriv can be started");
        assert!(made.status.success(), "initdb: {}", text(&made.stderr));
        let server = tool("postgres");
        let mut words = vec!["run"];
        words.extend(house.cluster.run_options().iter().map(String::as_str));
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
        let mut command = house.command(NOBODY, &words);
        command.env_remove("PGDATA");
        let mut postgres = Self { server: Running::start(&mut command, true, Box::new(|| 0)), folder };
        eventually("PostgreSQL to answer", || {
            assert!(!postgres.server.has_ended(), "PostgreSQL ended while it started");
            postgres.command("pg_isready").output().ok().filter(|output| output.status.success())
        });
        postgres
    }

    /// One of PostgreSQL's clients, which is told where the server is.
    #[must_use]
    pub fn command(&self, client: &str) -> Command {
        let mut command = Command::new(tool(client));
        command.env("PGHOST", &self.folder).env("PGUSER", "test").env("PGDATABASE", "postgres");
        command
    }

    /// What a client says.
    ///
    /// # Panics
    /// If it fails.
    #[must_use]
    pub fn ask(&self, client: &str, words: &[&str]) -> String {
        let output = self.command(client).args(words).output().expect("the client can be started");
        assert!(output.status.success(), "{client} {words:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// The answer to a query.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn query(&self, query: &str) -> String {
        self.ask("psql", &["-X", "-A", "-t", "-q", "-v", "ON_ERROR_STOP=1", "-c", query]).trim().to_owned()
    }

    /// Fill the tables of pgbench.
    ///
    /// # Panics
    /// If that fails.
    pub fn open_books(&self) {
        let _ = self.ask("pgbench", &["-i", "-q", "-s", "2"]);
    }

    /// After so many transactions of pgbench all its books must say the same.
    ///
    /// # Panics
    /// If they do not.
    pub fn assert_books(&self, transactions: usize) {
        let sums = self.query(
            "SELECT count(*), sum(delta) = (SELECT sum(abalance) FROM pgbench_accounts), \
             sum(delta) = (SELECT sum(bbalance) FROM pgbench_branches), \
             sum(delta) = (SELECT sum(tbalance) FROM pgbench_tellers) FROM pgbench_history",
        );
        assert_eq!(sums, format!("{transactions}|t|t|t"));
    }

    /// Stop it.
    ///
    /// # Panics
    /// If it does not end.
    #[must_use]
    pub fn stop(self) -> Outcome {
        processes::signal(self.server.pid(), rustix::process::Signal::INT);
        self.server.wait()
    }
}
