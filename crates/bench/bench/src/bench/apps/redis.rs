//! redis-server.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use aquifer_bench::BenchError;
use aquifer_bench::support::child::{ProgramOutcome, Streams, Watched};
use aquifer_bench::support::random::Access;
use aquifer_bench::support::server;
use rustix::process::Signal;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::resp::{Answer, Client};
use super::store::{self, Store};
use super::{App, Played, find_program};

const PROGRAM: &str = "redis-server";

/// redis with a distribution of keys.
#[derive(Debug)]
pub struct Redis {
    program: PathBuf,
    access: Access,
    keys: usize,
    requests: usize,
    socket: PathBuf,
}

impl Redis {
    /// The program, if it is installed. Its socket is in `folder`.
    pub fn find(access: Access, keys: usize, requests: usize, folder: &Path) -> Option<Self> {
        let program = find_program(PROGRAM)?;
        Some(Self { program, access, keys, requests, socket: folder.join("redis.sock") })
    }

    fn work(&self, server: &server::Server) -> Result<Played, BenchError> {
        // redis pins only its main thread to this processor, so Aquifer's worker is not pinned.
        let processor = first_processor();
        let mut only = CpuSet::new();
        only.set(processor);
        let pinned = sched_setaffinity(None, &only);
        pinned.map_err(|error| BenchError::Server { program: PROGRAM.into(), reason: error.to_string() })?;
        let client = server.connect(PROGRAM, || Client::connect(&self.socket).ok())?;
        Store::new(PROGRAM, client, self.keys).play(self.access, self.requests)
    }
}

impl store::Client for Client {
    fn set(&mut self, pairs: &[(Vec<u8>, Vec<u8>)]) -> io::Result<()> {
        pairs.iter().for_each(|(key, value)| self.add(&[b"SET", key, value]));
        self.send()?;
        pairs.iter().try_for_each(|_| match self.receive(&mut Vec::new())? {
            Answer::Done => Ok(()),
            other => Err(io::Error::other(format!("SET was answered with {other:?}"))),
        })
    }

    fn get(&mut self, keys: &[Vec<u8>], found: &mut dyn FnMut(usize, &[u8])) -> io::Result<()> {
        keys.iter().for_each(|key| self.add(&[b"GET", key]));
        self.send()?;
        let mut value = Vec::new();
        (0..keys.len()).try_for_each(|at| {
            if self.receive(&mut value)? == Answer::Value {
                found(at, &value);
            }
            Ok(())
        })
    }
}

impl App for Redis {
    fn name(&self) -> &'static str {
        match self.access {
            Access::Uniform => "redis, uniform",
            Access::Zipf => "redis, Zipf 0.99",
        }
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
        command.args(["--server_cpulist", &first_processor().to_string()]);
        command.args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"]).arg(&self.socket);
        let streams = Streams { input: None, output };
        server::beside(command, &streams, watched, Signal::TERM, |server| self.work(server))
    }
}

/// The first processor that this process may use.
fn first_processor() -> usize {
    sched_getaffinity(None).ok().and_then(|set| (0..CpuSet::MAX_CPU).find(|&at| set.is_set(at))).unwrap_or(0)
}
