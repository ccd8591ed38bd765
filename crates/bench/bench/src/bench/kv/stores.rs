//! The compared stores, as one client uses them.

use std::io::{Read, Write};

use aquifer_bench::BenchError;
use aquifer_bench::support::procs;
use aquifer_bench::support::random::Random;
use aquifer_kv::KvStore;
use aquifer_objects::client::HeapClient;

use super::cached::Memcached;
use crate::bench::apps::resp::{Answer, Client};

pub const SHARED: &str = "Aquifer, shared memory";
pub const TCP: &str = "Aquifer, TCP";
pub const PLAIN: &str = "Aquifer, TCP plain";
pub const MEMCACHED: &str = "memcached";
pub const MEMCACHED_TLS: &str = "memcached, TLS";
pub const REDIS: &str = "redis";
pub const REDIS_TLS: &str = "redis, TLS";

/// A callback for the index of each key and its value, if it has one.
pub type Found<'a> = &'a mut dyn FnMut(usize, Option<&Vec<u8>>) -> Result<(), BenchError>;

/// A key-value store that is measured.
pub trait ComparedStore {
    /// The name in the report.
    fn name(&self) -> &'static str;

    /// Sets the value of a key.
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), BenchError>;

    /// Reads the value of a key into `out`. Returns false if the key has none.
    fn get(&mut self, key: &[u8], out: &mut Vec<u8>) -> Result<bool, BenchError>;

    /// Reads the values of several keys at once.
    fn get_many(&mut self, keys: &[&[u8]], found: Found<'_>) -> Result<(), BenchError>;

    /// Reads about `count` keys that follow this one; `None` if the store cannot.
    fn scan(&mut self, _key: &[u8], _count: usize) -> Option<Result<(), BenchError>> {
        None
    }

    /// Processor time that the server has used, in ns.
    fn server_cpu_ns(&self) -> u64;
}

/// The value that a version of a key has.
pub fn value(key: usize, version: u64, size: usize) -> Vec<u8> {
    let mut random = Random((key as u64) << 20 | version);
    let words = std::iter::repeat_with(|| random.word()).take(size.div_ceil(8));
    let mut bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    bytes.truncate(size);
    bytes
}

/// Fails if a found value differs from the expected one.
pub fn check(name: &str, found: Option<&Vec<u8>>, expected: &[u8]) -> Result<(), BenchError> {
    match found {
        Some(found) if found == expected => Ok(()),
        _ => Err(BenchError::Wrong {
            program: name.into(),
            context: "a get".into(),
            what: "the value differs from the one that was put".into(),
        }),
    }
}

/// A store of Aquifer.
pub struct AquiferStore {
    pub name: &'static str,
    pub store: KvStore<HeapClient>,
    pub service: u32,
}

fn failed(error: impl std::fmt::Display) -> BenchError {
    BenchError::Heap { reason: error.to_string() }
}

impl ComparedStore for AquiferStore {
    fn name(&self) -> &'static str {
        self.name
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), BenchError> {
        self.store.put(key, value).map_err(failed)
    }

    fn get(&mut self, key: &[u8], out: &mut Vec<u8>) -> Result<bool, BenchError> {
        let found = self.store.get(key).map_err(failed)?;
        let is_there = found.is_some();
        *out = found.unwrap_or_default();
        Ok(is_there)
    }

    fn get_many(&mut self, keys: &[&[u8]], found: Found<'_>) -> Result<(), BenchError> {
        let values = self.store.get_many(keys).map_err(failed)?;
        values.iter().enumerate().try_for_each(|(place, value)| found(place, value.as_ref()))
    }

    fn scan(&mut self, key: &[u8], count: usize) -> Option<Result<(), BenchError>> {
        let mut next = Some(self.store.bucket_of(key));
        let mut left = count;
        while let Some(bucket) = next.filter(|_| left > 0) {
            match self.store.scan(bucket) {
                Ok((items, following)) => {
                    left = left.saturating_sub(items.len());
                    next = following;
                }
                Err(error) => return Some(Err(failed(error))),
            }
        }
        Some(Ok(()))
    }

    fn server_cpu_ns(&self) -> u64 {
        procs::cpu_ns(self.service)
    }
}

/// A store on a memcached server.
pub struct MemcachedStore<S: Read + Write> {
    pub name: &'static str,
    pub client: Memcached<S>,
    pub server: u32,
}

impl<S: Read + Write> ComparedStore for MemcachedStore<S> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), BenchError> {
        self.client.set(key, value).map_err(|error| server_error("memcached", error))
    }

    fn get(&mut self, key: &[u8], out: &mut Vec<u8>) -> Result<bool, BenchError> {
        let mut is_there = false;
        let mut take = |_: &[u8], value: &[u8]| {
            is_there = true;
            out.clear();
            out.extend_from_slice(value);
        };
        self.client.get(&[key], &mut take).map_err(|error| server_error("memcached", error))?;
        Ok(is_there)
    }

    fn get_many(&mut self, keys: &[&[u8]], found: Found<'_>) -> Result<(), BenchError> {
        let mut values: Vec<(Vec<u8>, Vec<u8>)> = Vec::with_capacity(keys.len());
        let mut take = |key: &[u8], value: &[u8]| values.push((key.to_vec(), value.to_vec()));
        self.client.get(keys, &mut take).map_err(|error| server_error("memcached", error))?;
        // memcached returns the values in the order of the keys, without those that have no value.
        let mut values = values.into_iter().peekable();
        for (place, key) in keys.iter().enumerate() {
            let value = values.next_if(|(of, _)| of == key).map(|(_, value)| value);
            found(place, value.as_ref())?;
        }
        Ok(())
    }

    fn server_cpu_ns(&self) -> u64 {
        procs::cpu_ns(self.server)
    }
}

/// A store on a redis server.
pub struct RedisStore<S: Read + Write> {
    pub name: &'static str,
    pub client: Client<S>,
    pub server: u32,
}

impl<S: Read + Write> ComparedStore for RedisStore<S> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), BenchError> {
        self.client.add(&[b"SET", key, value]);
        let mut answer = || {
            self.client.send()?;
            self.client.receive(&mut Vec::new())
        };
        answer().map(drop).map_err(|error| server_error("redis", error))
    }

    fn get(&mut self, key: &[u8], out: &mut Vec<u8>) -> Result<bool, BenchError> {
        self.client.add(&[b"GET", key]);
        let mut answer = || {
            self.client.send()?;
            self.client.receive(out)
        };
        answer().map(|answer| answer == Answer::Value).map_err(|error| server_error("redis", error))
    }

    fn get_many(&mut self, keys: &[&[u8]], found: Found<'_>) -> Result<(), BenchError> {
        keys.iter().for_each(|key| self.client.add(&[b"GET".as_slice(), key]));
        self.client.send().map_err(|error| server_error("redis", error))?;
        let mut value = Vec::new();
        for place in 0..keys.len() {
            let answer = self.client.receive(&mut value).map_err(|error| server_error("redis", error))?;
            found(place, Some(&value).filter(|_| answer == Answer::Value))?;
        }
        Ok(())
    }

    fn server_cpu_ns(&self) -> u64 {
        procs::cpu_ns(self.server)
    }
}

fn server_error(program: &str, error: std::io::Error) -> BenchError {
    BenchError::Server { program: program.into(), reason: error.to_string() }
}
