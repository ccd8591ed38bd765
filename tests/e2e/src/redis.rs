//! A redis-server, plainly or on the pool, and a client that checks its data.

use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output};

use crate::cluster::text;
use crate::run::{Outcome, Running, mempool_share, plain_command};
use crate::{Cluster, build, eventually};

/// Debian's Python, which has Debian's NumPy.
pub const PYTHON: &str = "/usr/bin/python3";

/// A running redis-server. [`Redis::stop`] must be called.
#[derive(Debug)]
pub struct Redis {
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
        // The server listens before it has loaded its dump.
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

    /// Starts a server plainly.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn plain(folder: &Path) -> Self {
        let port = free_port();
        let arguments = Self::arguments(folder, port);
        Self::start(plain_command(&[]), &arguments, port, None)
    }

    /// Starts a server on the pool.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn paged(cluster: &Cluster, folder: &Path, limit: u64) -> Self {
        let port = free_port();
        let arguments = Self::arguments(folder, port);
        Self::start(cluster.run_command(&limit.to_string(), &[]), &arguments, port, Some(cluster))
    }

    /// Loads or verifies data of the given size, and returns the output of the client.
    ///
    /// # Panics
    /// If data are wrong.
    #[must_use]
    pub fn check(&self, step: &str, bytes: &str) -> String {
        let script = build::sources().join("redis_check.py");
        let output = Command::new(PYTHON)
            .arg(script)
            .args([step, "--port", &self.port.to_string(), "--bytes", bytes])
            .output()
            .expect("python can be started");
        assert!(output.status.success(), "{step} failed: {} {}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    }

    /// Stops the server.
    ///
    /// # Panics
    /// If it does not end.
    #[must_use]
    pub fn stop(self) -> Outcome {
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
