//! memcached.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use aquifer_bench::BenchError;
use aquifer_bench::support::child::{ProgramOutcome, Streams, Watched};
use aquifer_bench::support::random::Access;
use aquifer_bench::support::server;
use rustix::process::Signal;

use super::store::{self, Store};
use super::{App, Played, Size, find_program};
use crate::bench::kv::cached;

const PROGRAM: &str = "memcached";
/// Option `-m`: no item is evicted.
const MEMORY_MIB: &str = "1024";

/// memcached with keys by Zipf's law.
#[derive(Debug)]
pub struct Memcached {
    program: PathBuf,
    size: Size,
    socket: PathBuf,
}

impl Memcached {
    /// The program, if it is installed. Its socket is in `folder`.
    pub fn find(size: Size, folder: &Path) -> Option<Self> {
        Some(Self { program: find_program(PROGRAM)?, size, socket: folder.join("memcached.sock") })
    }

    fn work(&self, server: &server::Server) -> Result<Played, BenchError> {
        let stream = server.connect(PROGRAM, || UnixStream::connect(&self.socket).ok())?;
        let client = cached::Memcached::over(stream);
        Store::new(PROGRAM, client, self.size.redis_keys).play(Access::Zipf, self.size.redis_requests)
    }
}

impl store::Client for cached::Memcached<UnixStream> {
    fn set(&mut self, pairs: &[(Vec<u8>, Vec<u8>)]) -> io::Result<()> {
        pairs.iter().try_for_each(|(key, value)| Self::set(self, key, value))
    }

    fn get(&mut self, keys: &[Vec<u8>], found: &mut dyn FnMut(usize, &[u8])) -> io::Result<()> {
        let names: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        let mut next = 0;
        // Values are in the order of their keys.
        Self::get(self, &names, &mut |name, value| {
            if let Some(skipped) = names[next..].iter().position(|key| *key == name) {
                found(next + skipped, value);
                next += skipped + 1;
            }
        })
    }
}

impl App for Memcached {
    fn name(&self) -> &'static str {
        "memcached, Zipf 0.99"
    }

    fn program(&self) -> &Path {
        &self.program
    }

    fn play(
        &self,
        mut command: Command,
        watched: Watched,
        output: &Path,
    ) -> Result<(ProgramOutcome, Result<Played, BenchError>), BenchError> {
        // It does not replace the socket of the run before.
        let _ = std::fs::remove_file(&self.socket);
        command.args(["-u", "root", "-t", "1", "-m", MEMORY_MIB, "-s"]).arg(&self.socket);
        server::beside(command, &Streams { input: None, output }, watched, Signal::TERM, |server| {
            self.work(server)
        })
    }
}
