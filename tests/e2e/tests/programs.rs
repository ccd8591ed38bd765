//! Real programs of many people's making, in a quarter of their memory.

use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output};

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::compare::assert_within_limit;
use aquifer_tests_e2e::run::{Outcome, Running, mempool_share, plain_command};
use aquifer_tests_e2e::{Case, Cluster, build, compare, eventually};

/// Debian's own: it has Debian's NumPy.
const PYTHON: &str = "/usr/bin/python3";
const REDIS_BYTES: &str = "150M";

fn check_python(script: &str) {
    let script = build::sources().join(script);
    let cluster = Cluster::up(3, "512M");
    let program = [PYTHON, script.to_str().expect("a plain path")];
    compare(&cluster, Case { program: &program, forks: false, unbounded: None });
}

#[test]
fn python_with_numpy() {
    check_python("numpy_check.py");
}

#[test]
fn sqlite_in_memory() {
    check_python("sqlite_check.py");
}

/// One redis-server with a folder of its own.
struct Redis {
    port: u16,
    server: Running,
}

impl Redis {
    fn start(mut command: Command, arguments: &[String], port: u16, share: Option<&Cluster>) -> Self {
        command.args(arguments);
        let mempool =
            share.map_or_else(|| Box::new(|| 0u64) as _, |cluster| mempool_share(cluster.agent_socket()));
        let mut server = Running::start(&mut command, true, mempool);
        let answers = |server: &mut Running| {
            assert!(!server.has_ended(), "redis-server ended while it started");
            TcpStream::connect(("127.0.0.1", port)).ok()
        };
        // It loads its dump after it listens, and tells those who ask meanwhile that it does.
        eventually("redis-server to listen", || answers(&mut server));
        eventually("redis-server to have loaded its dump", || {
            let output = cli(port, &["PING"]);
            (text(&output.stdout).trim() == "PONG").then_some(())
        });
        Self { port, server }
    }

    fn arguments(folder: &Path, port: u16) -> Vec<String> {
        let folder = folder.to_str().expect("a plain path");
        let port = port.to_string();
        let words = [
            "redis-server",
            "--port",
            &port,
            "--bind",
            "127.0.0.1",
            "--dir",
            folder,
            "--dbfilename",
            "dump.rdb",
            "--save",
            "",
            "--appendonly",
            "no",
            "--daemonize",
            "no",
            "--enable-debug-command",
            "local",
        ];
        words.map(str::to_owned).to_vec()
    }

    fn plain(folder: &Path) -> Self {
        let port = free_port();
        let arguments = Self::arguments(folder, port);
        Self::start(plain_command(&[]), &arguments, port, None)
    }

    fn paged(cluster: &Cluster, folder: &Path, limit: u64) -> Self {
        let port = free_port();
        let arguments = Self::arguments(folder, port);
        Self::start(cluster.run_command(&limit.to_string(), &[]), &arguments, port, Some(cluster))
    }

    /// What the checking client prints.
    fn check(&self, step: &str) -> String {
        let script = build::sources().join("redis_check.py");
        let output = Command::new(PYTHON)
            .arg(script)
            .args([step, "--port", &self.port.to_string(), "--bytes", REDIS_BYTES])
            .output()
            .expect("python can be started");
        assert!(output.status.success(), "{step} failed: {} {}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    }

    fn stop(self) -> Outcome {
        let _ = cli(self.port, &["SHUTDOWN", "NOSAVE"]);
        self.server.wait()
    }
}

fn cli(port: u16, words: &[&str]) -> Output {
    let mut command = Command::new("redis-cli");
    command.args(["-p", &port.to_string()]).args(words);
    command.output().expect("redis-cli can be started")
}

fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port is free");
    listener.local_addr().expect("it is bound").port()
}

#[test]
fn redis_with_bgsave() {
    let cluster = Cluster::up(3, "512M");
    let folders = ["plain", "paged"].map(|name| cluster.state().join(name));
    for folder in &folders {
        std::fs::create_dir(folder).expect("a folder can be made");
    }
    let plain = Redis::plain(&folders[0]);
    let expected = plain.check("load");
    let plain = plain.stop();
    plain.assert_success("redis-server, plainly,");

    let limit = plain.peak.anonymous_bytes / 4;
    let paged = Redis::paged(&cluster, &folders[1], limit);
    assert_eq!(paged.check("load"), expected, "what was loaded and read back");
    let paged = paged.stop();
    paged.assert_success("redis-server on the pool");
    assert_within_limit(&paged, limit);
    cluster.assert_all_free();

    let loaded = Redis::plain(&folders[1]);
    assert_eq!(loaded.check("verify"), expected, "what the forked child of the paged server saved");
    loaded.stop().assert_success("redis-server with the dump");
}
