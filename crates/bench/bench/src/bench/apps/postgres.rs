//! PostgreSQL with pgbench: each transaction sorts a table in its backend's private memory, and
//! then does the work of TPC-B.
//!
//! Aquifer does not page shared memory, so shared buffers are small here, and their size is added
//! to the limit on kernel swap.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use aquifer_bench::BenchError;
use aquifer_bench::support::child::{self, ProgramOutcome, Streams, Watched};
use aquifer_bench::support::server;
use rustix::process::Signal;

use super::unprivileged::UnprivilegedUser;
use super::{App, Played, Size, float};

const PROGRAM: &str = "postgres";
/// Folder of Debian's PostgreSQL versions.
const VERSIONS: &str = "/usr/lib/postgresql";
const USER: &str = "bench";
const SHARED_BUFFERS_BYTES: u64 = 4 << 20;
/// Option `work_mem`: more than a sort needs, so that sorts do not use files.
const WORK_MEM: &str = "work_mem=512MB";
/// Number of clients. With several, almost every run on kernel swap fails, because the kernel finds
/// no page to swap out.
const CLIENTS: &str = "1";

/// The script of pgbench. Its report reads data that transactions do not change, so that it is the
/// same in each run.
const SCRIPT: &str = r"\set aid random(1, 100000 * :scale)
\set tid random(1, 10 * :scale)
\set bid random(1, :scale)
\set delta random(-5000, 5000)
BEGIN;
INSERT INTO reports SELECT :aid, md5(string_agg(aid || filler, ','))
  FROM (SELECT aid, filler FROM pgbench_accounts ORDER BY md5(aid::text || :aid)) AS sorted;
UPDATE pgbench_accounts SET abalance = abalance + :delta WHERE aid = :aid;
SELECT abalance FROM pgbench_accounts WHERE aid = :aid;
UPDATE pgbench_tellers SET tbalance = tbalance + :delta WHERE tid = :tid;
UPDATE pgbench_branches SET bbalance = bbalance + :delta WHERE bid = :bid;
INSERT INTO pgbench_history (tid, bid, aid, delta, mtime)
  VALUES (:tid, :bid, :aid, :delta, CURRENT_TIMESTAMP);
END;
";

/// Query of the check: a condition that must hold, and data that must be the same in each run.
const CHECK: &str = "SELECT (SELECT sum(abalance) FROM pgbench_accounts) = (SELECT sum(delta) FROM \
    pgbench_history) \
     AND (SELECT sum(bbalance) FROM pgbench_branches) = (SELECT sum(tbalance) FROM pgbench_tellers), \
     (SELECT count(*) FROM pgbench_history), \
     (SELECT md5(string_agg(aid || ':' || abalance, ',' ORDER BY aid)) FROM pgbench_accounts WHERE \
     abalance <> 0), \
     (SELECT md5(string_agg(aid || digest, ',' ORDER BY aid, digest)) FROM reports)";

/// PostgreSQL's programs, and its data before each run.
#[derive(Debug)]
pub struct Postgres {
    programs: PathBuf,
    program: PathBuf,
    size: Size,
    home: PathBuf,
    folder: PathBuf,
}

impl Postgres {
    /// Creates the data in the home of the unprivileged user; `None` if PostgreSQL is not
    /// installed. Clients write to `folder`.
    ///
    /// # Errors
    /// If the data cannot be created.
    pub fn find(size: Size, user: &UnprivilegedUser, folder: &Path) -> Result<Option<Self>, BenchError> {
        let Some(programs) = find_programs(Path::new(VERSIONS)) else {
            return Ok(None);
        };
        let program = programs.join(PROGRAM);
        let postgres = Self { programs, program, size, home: user.home(), folder: folder.to_owned() };
        postgres.prepare(user)?;
        Ok(Some(postgres))
    }

    fn prepare(&self, user: &UnprivilegedUser) -> Result<(), BenchError> {
        let plain = |program: &Path| user.command(program, |first| Ok::<_, BenchError>(Command::new(first)));
        let mut initdb = plain(&self.programs.join("initdb"))?;
        initdb.args(["--auth=trust", "--no-sync", "--locale=C", "--encoding=UTF8", "--username", USER]);
        initdb.arg("--pgdata").arg(self.template());
        self.client(initdb)?;
        let script = self.script();
        std::fs::write(&script, SCRIPT).map_err(BenchError::io("write", &script))?;
        let mut command = plain(&self.program)?;
        self.arrange(&mut command, &self.template());
        let output = self.folder.join("server");
        let streams = Streams { input: None, output: &output };
        let (outcome, done) = server::beside(command, &streams, Watched::All, Signal::INT, |server| {
            self.reach(server)?;
            let scale = self.size.postgres_scale.to_string();
            self.client(self.on_socket("pgbench", &["--initialize", "--quiet", "--scale", &scale]))?;
            let table = "CREATE TABLE reports (aid int, digest text)";
            self.client(self.on_socket("psql", &["--quiet", "--command", table]))
        })?;
        done.map(drop).map_err(|error| explain(error, &outcome))
    }

    /// The folder of the initial data, from which each run starts.
    fn template(&self) -> PathBuf {
        self.home.join("template")
    }

    fn script(&self) -> PathBuf {
        self.folder.join("transaction.sql")
    }

    /// Arguments of the server, without synchronous writes: the disk is not measured.
    fn arrange(&self, command: &mut Command, data: &Path) {
        command.arg("-D").arg(data).arg("-k").arg(&self.home);
        let buffers = format!("shared_buffers={}MB", SHARED_BUFFERS_BYTES >> 20);
        for setting in [
            "listen_addresses=",
            &buffers,
            WORK_MEM,
            "max_connections=10",
            "max_parallel_workers_per_gather=0",
            "huge_pages=off",
            "jit=off",
            "autovacuum=off",
            "fsync=off",
            "synchronous_commit=off",
            "full_page_writes=off",
        ] {
            command.args(["-c", setting]);
        }
    }

    fn reach(&self, server: &server::Server) -> Result<(), BenchError> {
        let asks =
            || self.on_socket("pg_isready", &["--quiet"]).status().is_ok_and(|status| status.success());
        server.connect(PROGRAM, || asks().then_some(()))
    }

    fn on_socket(&self, program: &str, words: &[&str]) -> Command {
        let mut command = Command::new(self.programs.join(program));
        command.arg("--host").arg(&self.home).args(["--username", USER]).args(words);
        command.env("PGDATABASE", "postgres");
        command
    }

    /// Runs a client that must succeed; returns its output and its time.
    fn client(&self, command: Command) -> Result<(String, f64), BenchError> {
        let program = PathBuf::from(command.get_program()).display().to_string();
        let output = self.folder.join("client");
        let outcome = child::run(command, &Streams { input: None, output: &output }, Watched::All, |_| {})?;
        let text = std::fs::read_to_string(&output).map_err(BenchError::io("read", &output))?;
        if !outcome.status.success() {
            return Err(BenchError::Server {
                program,
                reason: format!("{}: {}{}", outcome.status, outcome.message, text.trim_end()),
            });
        }
        Ok((text, outcome.elapsed.as_secs_f64()))
    }

    fn work(&self, server: &server::Server) -> Result<Played, BenchError> {
        self.reach(server)?;
        let log =
            tempfile::tempdir_in(&self.folder).map_err(BenchError::io("make a folder in", &self.folder))?;
        let mut prefix = std::ffi::OsString::from("--log-prefix=");
        prefix.push(log.path().join("latency"));
        let words = ["--no-vacuum", "--log", "--random-seed=1", "--client", CLIENTS];
        let mut pgbench = self.on_socket("pgbench", &words);
        pgbench.arg(prefix).arg("--transactions").arg(self.size.postgres_transactions.to_string());
        pgbench
            .args(["--define", &format!("scale={}", self.size.postgres_scale), "--file"])
            .arg(self.script());
        let (_, seconds) = self.client(pgbench)?;
        let mut latencies_us = Vec::new();
        for entry in std::fs::read_dir(log.path()).map_err(BenchError::io("list", log.path()))?.flatten() {
            let text = std::fs::read_to_string(entry.path()).map_err(BenchError::io("read", log.path()))?;
            latencies_us.extend(text.lines().filter_map(parse_latency_us));
        }
        let words = ["--no-align", "--tuples-only", "--command", CHECK];
        let (digest, _) = self.client(self.on_socket("psql", &words))?;
        if !digest.starts_with("t|") || latencies_us.is_empty() {
            return Err(BenchError::Wrong {
                program: PROGRAM.into(),
                context: "its tables after pgbench".into(),
                what: format!("accounts, tellers, branches and history do not sum up: {digest}"),
            });
        }
        Ok(Played::new(seconds, latencies_us, digest))
    }
}

impl App for Postgres {
    fn name(&self) -> &'static str {
        "PostgreSQL, pgbench"
    }

    fn program(&self) -> &Path {
        &self.program
    }

    fn refuses_root(&self) -> bool {
        true
    }

    fn shared_bytes(&self) -> u64 {
        SHARED_BUFFERS_BYTES
    }

    fn play(
        &self,
        mut command: Command,
        watched: Watched,
        output: &Path,
    ) -> Result<(ProgramOutcome, Result<Played, BenchError>), BenchError> {
        let data = self.home.join("data");
        if data.exists() {
            std::fs::remove_dir_all(&data).map_err(BenchError::io("remove", &data))?;
        }
        let mut copy = Command::new("cp");
        copy.arg("-a").arg(self.template()).arg(&data);
        self.client(copy)?;
        self.arrange(&mut command, &data);
        let streams = Streams { input: None, output };
        server::beside(command, &streams, watched, Signal::INT, |server| self.work(server))
    }
}

/// An error of a client, with the output of the server.
fn explain(error: BenchError, outcome: &ProgramOutcome) -> BenchError {
    match error {
        BenchError::Server { program, reason } => {
            BenchError::Server { program, reason: format!("{reason}; the server said: {}", outcome.message) }
        }
        other => other,
    }
}

/// Folder of the programs of the newest installed version.
fn find_programs(versions: &Path) -> Option<PathBuf> {
    let folders = std::fs::read_dir(versions).ok()?.flatten();
    let version = |name: &OsStr| name.to_str()?.parse::<u32>().ok();
    let known = folders.filter_map(|entry| Some((version(&entry.file_name())?, entry.path().join("bin"))));
    let whole = |programs: &Path| {
        ["initdb", "pgbench", "psql", PROGRAM].iter().all(|name| programs.join(name).exists())
    };
    known.filter(|(_, programs)| whole(programs)).max().map(|(_, programs)| programs)
}

/// The latency in a line of pgbench's log: the third word.
fn parse_latency_us(line: &str) -> Option<f64> {
    line.split_ascii_whitespace().nth(2)?.parse().ok().map(float)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latency_is_the_third_word_of_a_log_line() {
        assert_eq!(parse_latency_us("0 1 4821 0 1499414498 34501"), Some(4821.0));
        for line in ["", "0 1", "0 1 skipped 0 1 2", "0 1 failed 0 1 2"] {
            assert_eq!(parse_latency_us(line), None, "{line}");
        }
    }

    #[test]
    fn the_newest_complete_version_is_chosen() {
        let folder = tempfile::tempdir().unwrap();
        for (version, programs) in [
            ("9", &["initdb", "pgbench", "psql", "postgres"][..]),
            ("15", &["initdb", "pgbench", "psql", "postgres"]),
            ("17", &["psql"]),
        ] {
            let bin = folder.path().join(version).join("bin");
            std::fs::create_dir_all(&bin).unwrap();
            for program in programs {
                std::fs::write(bin.join(program), "").unwrap();
            }
        }
        assert_eq!(find_programs(folder.path()), Some(folder.path().join("15").join("bin")));
        assert_eq!(find_programs(&folder.path().join("none")), None);
    }
}
