//! A server with keys, whose values can be checked, and the load on it: nine GETs for each SET, by
//! a client that waits for each answer.

use std::io;
use std::time::Instant;

use aquifer_bench::BenchError;
use aquifer_bench::support::interrupt;
use aquifer_bench::support::random::{Access, Draw, Random};

use super::Played;

/// Length of a value. With its overhead, a server allocates 1 KiB.
pub const VALUE_BYTES: usize = 1000;
/// One of this many requests is a SET.
const SET_ONCE_IN: usize = 10;
/// Keys that are set or read at once while the server is filled and checked.
const BATCH: usize = 128;

/// A connection to a server.
pub trait Client {
    /// Sets the values of keys.
    ///
    /// # Errors
    /// If the connection breaks, or the server refuses.
    fn set(&mut self, pairs: &[(Vec<u8>, Vec<u8>)]) -> io::Result<()>;

    /// Reads the values of keys. Calls `found` with the index of each key that has a value, and the
    /// value.
    ///
    /// # Errors
    /// If the connection breaks, or an answer is not valid.
    fn get(&mut self, keys: &[Vec<u8>], found: &mut dyn FnMut(usize, &[u8])) -> io::Result<()>;
}

/// A server's keys and their expected versions.
pub struct Store<C> {
    program: &'static str,
    client: C,
    versions: Vec<u32>,
}

impl<C: Client> Store<C> {
    /// The store of a server without keys.
    pub fn new(program: &'static str, client: C, keys: usize) -> Self {
        Self { program, client, versions: vec![0; keys] }
    }

    /// Sets all keys, sends the measured requests, and checks all values.
    ///
    /// # Errors
    /// If the server fails or returns a wrong value, or a signal asks to stop.
    pub fn play(&mut self, access: Access, requests: usize) -> Result<Played, BenchError> {
        self.fill()?;
        let mut draw = Draw::new(access, self.versions.len());
        let mut latencies_us = Vec::with_capacity(requests);
        let start = Instant::now();
        for _ in 0..requests {
            let (key, write) = (draw.key(), draw.once_in(SET_ONCE_IN));
            latencies_us.push(if write { self.set(key)? } else { self.get(key)? });
        }
        let seconds = start.elapsed().as_secs_f64();
        self.check_all()?;
        let sets: u64 = self.versions.iter().copied().map(u64::from).sum();
        let digest = format!("{} values, {sets} of them anew", self.versions.len());
        Ok(Played::new(seconds, latencies_us, digest))
    }

    fn fill(&mut self) -> Result<(), BenchError> {
        for start in (0..self.versions.len()).step_by(BATCH) {
            interrupt::check()?;
            let keys = start..(start + BATCH).min(self.versions.len());
            let pairs: Vec<_> = keys.map(|key| (name(key), value(key, 0))).collect();
            self.client.set(&pairs).map_err(|error| self.failed(&error))?;
        }
        Ok(())
    }

    /// Sets a key to its next version; returns the latency in µs.
    fn set(&mut self, key: usize) -> Result<f64, BenchError> {
        self.versions[key] += 1;
        let pair = [(name(key), value(key, self.versions[key]))];
        let start = Instant::now();
        self.client.set(&pair).map_err(|error| self.failed(&error))?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    }

    /// Reads a key and checks its value; returns the latency in µs.
    fn get(&mut self, key: usize) -> Result<f64, BenchError> {
        interrupt::check()?;
        let start = Instant::now();
        self.check(key..key + 1)?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    }

    fn check_all(&mut self) -> Result<(), BenchError> {
        for start in (0..self.versions.len()).step_by(BATCH) {
            interrupt::check()?;
            self.check(start..(start + BATCH).min(self.versions.len()))?;
        }
        Ok(())
    }

    /// Reads keys, and checks that each has the value of its version.
    fn check(&mut self, keys: std::ops::Range<usize>) -> Result<(), BenchError> {
        let names: Vec<_> = keys.clone().map(name).collect();
        let (first, versions) = (keys.start, &self.versions);
        let mut right = 0;
        let outcome = self.client.get(&names, &mut |at, found| {
            right += usize::from(found == value(first + at, versions[first + at]));
        });
        outcome.map_err(|error| self.failed(&error))?;
        if right == keys.len() {
            return Ok(());
        }
        let what = format!("{} of the keys {keys:?} do not hold their versions", keys.len() - right);
        Err(BenchError::Wrong {
            program: self.program.into(),
            context: "a value over its socket".into(),
            what,
        })
    }

    fn failed(&self, error: &io::Error) -> BenchError {
        BenchError::Server { program: self.program.into(), reason: error.to_string() }
    }
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
