//! redis-server with a client that waits for each answer: nine GETs for each SET, of values that
//! can be checked.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use aquifer_bench::BenchError;
use aquifer_bench::support::child::{ProgramOutcome, Streams, Watched};
use aquifer_bench::support::random::{Access, Draw, Random};
use aquifer_bench::support::{interrupt, server};
use rustix::process::Signal;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::resp::{Answer, Client};
use super::{App, Played, Size, find_program};

const PROGRAM: &str = "redis-server";
/// Length of a value. With its overhead, redis allocates 1 KiB.
const VALUE_BYTES: usize = 1000;
/// One of this many requests is a SET.
const SET_ONCE_IN: usize = 10;
/// Commands in flight while the server is filled and checked.
const BATCH: usize = 128;

/// redis with a distribution of keys.
#[derive(Debug)]
pub struct Redis {
    program: PathBuf,
    access: Access,
    size: Size,
    socket: PathBuf,
}

impl Redis {
    /// The program, if it is installed. Its socket is in `folder`.
    pub fn find(access: Access, size: Size, folder: &Path) -> Option<Self> {
        Some(Self { program: find_program(PROGRAM)?, access, size, socket: folder.join("redis.sock") })
    }

    fn work(&self, server: &server::Server) -> Result<Played, BenchError> {
        // redis pins only its main thread to this processor, so Aquifer's worker is not pinned.
        let processor = first_processor();
        let mut only = CpuSet::new();
        only.set(processor);
        sched_setaffinity(None, &only).map_err(|error| failed(error.into()))?;
        let client = server.connect(PROGRAM, || Client::connect(&self.socket).ok())?;
        let mut store = Store { client, versions: vec![0; self.size.redis_keys], found: Vec::new() };
        store.fill()?;
        let mut draw = Draw::new(self.access, self.size.redis_keys);
        let mut latencies_us = Vec::with_capacity(self.size.redis_requests);
        let start = Instant::now();
        for _ in 0..self.size.redis_requests {
            let (key, write) = (draw.key(), draw.once_in(SET_ONCE_IN));
            latencies_us.push(if write { store.set(key)? } else { store.get(key)? });
        }
        let seconds = start.elapsed().as_secs_f64();
        store.check_all()?;
        let sets: u64 = store.versions.iter().copied().map(u64::from).sum();
        Ok(Played::new(
            seconds,
            latencies_us,
            format!("{} values, {sets} of them anew", store.versions.len()),
        ))
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

/// The server's keys and their expected versions.
struct Store {
    client: Client,
    versions: Vec<u32>,
    found: Vec<u8>,
}

impl Store {
    fn fill(&mut self) -> Result<(), BenchError> {
        for start in (0..self.versions.len()).step_by(BATCH) {
            interrupt::check()?;
            let end = (start + BATCH).min(self.versions.len());
            for key in start..end {
                self.client.add(&[b"SET", &name(key), &value(key, 0)]);
            }
            self.client.send().map_err(failed)?;
            for key in start..end {
                self.expect_done(key)?;
            }
        }
        Ok(())
    }

    /// Sends a command; returns its latency in µs.
    fn set(&mut self, key: usize) -> Result<f64, BenchError> {
        self.versions[key] += 1;
        self.client.add(&[b"SET", &name(key), &value(key, self.versions[key])]);
        let start = Instant::now();
        self.client.send().map_err(failed)?;
        self.expect_done(key)?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    }

    /// Sends a command; returns its latency in µs.
    fn get(&mut self, key: usize) -> Result<f64, BenchError> {
        interrupt::check()?;
        self.client.add(&[b"GET", &name(key)]);
        let start = Instant::now();
        self.client.send().map_err(failed)?;
        let answer = self.client.receive(&mut self.found).map_err(failed)?;
        let latency_us = start.elapsed().as_secs_f64() * 1e6;
        self.check(key, answer)?;
        Ok(latency_us)
    }

    fn check_all(&mut self) -> Result<(), BenchError> {
        for start in (0..self.versions.len()).step_by(BATCH) {
            interrupt::check()?;
            let end = (start + BATCH).min(self.versions.len());
            for key in start..end {
                self.client.add(&[b"GET", &name(key)]);
            }
            self.client.send().map_err(failed)?;
            for key in start..end {
                let answer = self.client.receive(&mut self.found).map_err(failed)?;
                self.check(key, answer)?;
            }
        }
        Ok(())
    }

    fn check(&self, key: usize, answer: Answer) -> Result<(), BenchError> {
        let version = self.versions[key];
        if answer == Answer::Value && self.found == value(key, version) {
            return Ok(());
        }
        Err(wrong(format!("key {key} does not hold its version {version}: {answer:?}")))
    }

    fn expect_done(&mut self, key: usize) -> Result<(), BenchError> {
        match self.client.receive(&mut self.found).map_err(failed)? {
            Answer::Done => Ok(()),
            other => Err(wrong(format!("SET of key {key} was answered with {other:?}"))),
        }
    }
}

fn failed(error: std::io::Error) -> BenchError {
    BenchError::Server { program: PROGRAM.into(), reason: error.to_string() }
}

fn wrong(what: String) -> BenchError {
    BenchError::Wrong { program: PROGRAM.into(), context: "a value over its socket".into(), what }
}

fn name(key: usize) -> Vec<u8> {
    format!("key:{key}").into_bytes()
}

/// The value of a key and version. Half of it is random, so that it compresses like real data.
fn value(key: usize, version: u32) -> Vec<u8> {
    let words = VALUE_BYTES / 8;
    let head = [key as u64, u64::from(version)];
    let mut random = Random(head[0] << 32 | head[1]);
    let noise = std::iter::repeat_with(|| random.word()).take(words / 2);
    let words = head.into_iter().chain(noise).chain(std::iter::repeat(head[0])).take(words);
    words.flat_map(u64::to_le_bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_different_keys_or_versions_differ() {
        let values: Vec<Vec<u8>> =
            [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(key, version)| value(key, version)).to_vec();
        for (at, one) in values.iter().enumerate() {
            assert_eq!(one.len(), VALUE_BYTES);
            assert!(values[..at].iter().all(|other| other[..500] != one[..500]));
        }
        assert_eq!(value(7, 3), value(7, 3));
    }
}
