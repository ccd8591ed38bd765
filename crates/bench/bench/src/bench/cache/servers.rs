//! The servers: processes on free ports of this machine.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use aquifer_bench::BenchError;
use aquifer_bench::support::cluster::aquifer_program;
use aquifer_bench::support::{folder, interrupt, procs};
use aquifer_fabric::tcp;
use tempfile::TempDir;

use super::processors::{Place, Processors};
use crate::bench::apps::find_program;

pub const AQUIFER: &str = "Aquifer";
pub const MEMCACHED: &str = "memcached";
pub const POGOCACHE: &str = "pogocache";

/// Time within which a server must accept connections, and answer `stats`.
const TIMEOUT: Duration = Duration::from_secs(30);
const RETRY_PAUSE: Duration = Duration::from_millis(10);
/// Lines of a server's log in an error.
const LOG_LINES_MAX: usize = 10;

/// A program that can be measured.
#[derive(Clone, Debug)]
pub struct Program {
    /// The program's name in tables.
    pub name: &'static str,
    path: PathBuf,
}

/// The installed programs, and the settings that all servers share.
#[derive(Debug)]
pub struct Programs {
    /// The programs. Aquifer is the first.
    pub all: Vec<Program>,
    processors: Processors,
    logs: TempDir,
}

/// Settings of a server.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Option `-m`.
    pub memory_mib: u32,
    /// Option `-t`.
    pub threads: u32,
    /// Whether items have a cas value; false means option `-C`.
    pub has_cas: bool,
    pub place: Place,
}

impl Settings {
    /// Settings of a server with one thread on its own processor.
    pub const fn with_memory(memory_mib: u32) -> Self {
        Self { memory_mib, threads: 1, has_cas: true, place: Place::Own }
    }
}

impl Programs {
    /// Aquifer, memcached if it is installed, and a program of pogocache if there is one.
    ///
    /// # Errors
    /// If the path of `aquifer` is not known, or there is no folder for logs.
    pub fn find(processors: Processors, pogocache: Option<&Path>) -> Result<Self, BenchError> {
        let mut all = vec![Program { name: AQUIFER, path: aquifer_program()? }];
        all.extend(find_program("memcached").map(|path| Program { name: MEMCACHED, path }));
        all.extend(pogocache.map(|path| Program { name: POGOCACHE, path: path.to_owned() }));
        Ok(Self { all, processors, logs: folder::temporary()? })
    }

    /// The programs with all of memcached's options and statistics.
    pub fn compatible(&self) -> impl Iterator<Item = &Program> {
        self.all.iter().filter(|program| program.name != POGOCACHE)
    }

    /// Whether memcached is installed.
    pub fn has_memcached(&self) -> bool {
        self.all.iter().any(|program| program.name == MEMCACHED)
    }

    /// Starts a server and waits until it accepts connections.
    ///
    /// # Errors
    /// If the server cannot be started, or does not accept connections in time.
    pub fn start(&self, program: &Program, settings: Settings) -> Result<Server, BenchError> {
        self.start_with(program, settings, &[])
    }

    /// Like [`Self::start`], with more options.
    ///
    /// # Errors
    /// Those of [`Self::start`].
    pub fn start_with(
        &self,
        program: &Program,
        settings: Settings,
        options: &[OsString],
    ) -> Result<Server, BenchError> {
        let port = free_port()?;
        let log = self.logs.path().join(format!("{port}.log"));
        let output = File::create(&log).map_err(BenchError::io("create", &log))?;
        let error = output.try_clone().map_err(BenchError::io("open", &log))?;
        let mut command = Command::new(&program.path);
        command.args(arguments(program.name, settings, port)).args(options).current_dir(self.logs.path());
        // Sockets of servers go with the folder.
        command.env("XDG_RUNTIME_DIR", self.logs.path());
        command.stdin(Stdio::null()).stdout(output).stderr(error);
        let spawn = || command.spawn().map_err(BenchError::io("start", &program.path));
        let child = self.processors.start_on(settings.place, spawn)?;
        let mut server = Server { name: program.name, child, port, log };
        match server.wait_until_it_accepts() {
            Ok(()) => Ok(server),
            Err(reason) => {
                interrupt::check()?;
                Err(server.error(format!("{reason}: {}", server.log_end())))
            }
        }
    }
}

fn arguments(name: &str, settings: Settings, port: u16) -> Vec<String> {
    let Settings { memory_mib, threads, has_cas, .. } = settings;
    if name == POGOCACHE {
        let words = format!("-h 127.0.0.1 -p {port} --threads {threads} --maxmemory {memory_mib}mb");
        return words.split(' ').map(str::to_owned).collect();
    }
    let mut words = format!("-l 127.0.0.1 -p {port} -U 0 -m {memory_mib} -t {threads}");
    if !has_cas {
        words += " -C";
    }
    if name == MEMCACHED && rustix::process::geteuid().is_root() {
        words += " -u daemon";
    }
    let command = (name == AQUIFER).then_some("cache");
    command.into_iter().chain(words.split(' ')).map(str::to_owned).collect()
}

fn free_port() -> Result<u16, BenchError> {
    let listener = TcpListener::bind("127.0.0.1:0");
    let address = listener.and_then(|listener| listener.local_addr());
    address.map(|address| address.port()).map_err(BenchError::io("find a port at", Path::new("127.0.0.1")))
}

/// A server, which is killed when this is dropped.
#[derive(Debug)]
pub struct Server {
    /// The name of the program.
    pub name: &'static str,
    child: Child,
    port: u16,
    log: PathBuf,
}

impl Drop for Server {
    fn drop(&mut self) {
        // Errors mean that the process has ended before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn wait_until_it_accepts(&mut self) -> Result<(), String> {
        let began = Instant::now();
        while self.connect().is_err() {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(format!("the server ended before it accepted connections ({status})"));
            }
            if interrupt::is_requested() || began.elapsed() > TIMEOUT {
                return Err(format!("the server accepts no connections after {} s", TIMEOUT.as_secs()));
            }
            std::thread::sleep(RETRY_PAUSE);
        }
        Ok(())
    }

    /// Connects to the server.
    ///
    /// # Errors
    /// If the server does not accept the connection.
    pub fn connect(&self) -> std::io::Result<TcpStream> {
        let stream = tcp::connect_unpaced(SocketAddr::from(([127, 0, 0, 1], self.port)), TIMEOUT)?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// The exit status and the end of the log; `None` if the server runs.
    pub fn ending(&mut self) -> Option<String> {
        let status = self.child.try_wait().ok().flatten()?;
        Some(format!("it ended ({status}): {}", self.log_end()))
    }

    /// The last lines of the server's log.
    fn log_end(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.trim().lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES_MAX)..].join("\n")
    }

    /// The TCP port for clients.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Processor time that the server has used, in ns.
    pub fn cpu_ns(&self) -> u64 {
        procs::cpu_ns(self.child.id())
    }

    /// Resident anonymous and shared memory in bytes, without program and libraries.
    pub fn memory_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        parse_memory_bytes(&status.unwrap_or_default())
    }

    /// The numeric statistics.
    ///
    /// # Errors
    /// If the server does not answer.
    pub fn statistics(&self) -> Result<HashMap<String, u64>, BenchError> {
        let read = || -> std::io::Result<HashMap<String, u64>> {
            let mut stream = self.connect()?;
            stream.set_read_timeout(Some(TIMEOUT))?;
            stream.write_all(b"stats\r\n")?;
            let mut numbers = HashMap::new();
            for line in BufReader::new(stream).lines() {
                let line = line?;
                if line == "END" {
                    return Ok(numbers);
                }
                numbers.extend(parse_statistic(&line));
            }
            Err(std::io::ErrorKind::UnexpectedEof.into())
        };
        read().map_err(|error| self.error(format!("no reply to stats: {error}")))
    }

    /// An error of this server.
    pub fn error(&self, reason: String) -> BenchError {
        BenchError::Server { program: self.name.into(), reason }
    }
}

fn parse_statistic(line: &str) -> Option<(String, u64)> {
    let (name, value) = line.strip_prefix("STAT ")?.split_once(' ')?;
    Some((name.to_owned(), value.parse().ok()?))
}

fn parse_memory_bytes(status: &str) -> u64 {
    let kib = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    };
    (kib("RssAnon:").unwrap_or(0) + kib("RssShmem:").unwrap_or(0)) << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_program_has_its_options() {
        let settings = Settings { has_cas: false, threads: 2, ..Settings::with_memory(64) };
        let line = |name| arguments(name, settings, 7).join(" ");
        assert_eq!(line(AQUIFER), "cache -l 127.0.0.1 -p 7 -U 0 -m 64 -t 2 -C");
        assert!(line(MEMCACHED).starts_with("-l 127.0.0.1 -p 7 -U 0 -m 64 -t 2 -C"));
        assert_eq!(line(POGOCACHE), "-h 127.0.0.1 -p 7 --threads 2 --maxmemory 64mb");
    }

    #[test]
    fn statistics_and_memory_are_read() {
        assert_eq!(parse_statistic("STAT cmd_get 12"), Some(("cmd_get".into(), 12)));
        assert_eq!(parse_statistic("STAT version 1.6.18"), None);
        let status = "VmRSS:\t 9 kB\nRssAnon:\t 2 kB\nRssFile:\t 4 kB\nRssShmem:\t 3 kB\n";
        assert_eq!(parse_memory_bytes(status), 5 << 10);
        assert_eq!(parse_memory_bytes(""), 0);
    }
}
