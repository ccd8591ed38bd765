//! A client that checks the reply to each of its requests.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The expected state of a key.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Known {
    value: String,
    /// The cas number, if it was seen.
    cas: Option<u64>,
}

/// A client with keys of its own.
pub struct Checker {
    stream: BufReader<TcpStream>,
    name: String,
    keys: usize,
    known: BTreeMap<String, Known>,
    random: u64,
    writes: u64,
}

/// The expected reply to a request of a batch.
enum Expected {
    Stored(String),
    Value { key: String, value: Option<String>, returns_cas: bool },
    Values(Vec<(String, Option<String>)>),
    Number(u64),
    Exists,
    Deleted(bool),
}

impl Checker {
    pub fn new(stream: TcpStream, name: &str, keys: usize) -> Self {
        let random =
            name.bytes().fold(0x9E37_79B9, |seed: u64, byte| seed.wrapping_mul(31) + u64::from(byte));
        let (stream, name) = (BufReader::new(stream), name.to_owned());
        Self { stream, name, keys, known: BTreeMap::new(), random, writes: 0 }
    }

    fn random(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random % below as u64).unwrap()
    }

    fn key(&mut self) -> String {
        let number = self.random(self.keys);
        format!("{}-{number}", self.name)
    }

    /// The value of a key after the requests so far, which take effect in their order.
    fn value_of(&self, key: &str) -> Option<String> {
        self.known.get(key).map(|known| known.value.clone())
    }

    /// Sends batches of `batch` requests and checks the replies, until `stops`. Adds the number of
    /// requests to `requests`.
    pub fn run(&mut self, batch: usize, stops: &AtomicBool, requests: &AtomicU64) {
        while !stops.load(Ordering::Relaxed) {
            self.check_batch(batch);
            requests.fetch_add(batch as u64, Ordering::Relaxed);
        }
        self.check_all();
    }

    fn check_batch(&mut self, batch: usize) {
        let (mut sent, mut expected) = (String::new(), Vec::new());
        for _ in 0..batch {
            let next = self.request(&mut sent);
            expected.extend(next);
        }
        // A command with a reply, in case that the last one is a `noreply`.
        sent += "mn\r\n";
        self.stream.get_mut().write_all(sent.as_bytes()).unwrap();
        for reply in expected {
            self.check(reply);
        }
        assert_eq!(self.line(), "MN");
    }

    /// Adds a request; returns the expected reply.
    fn request(&mut self, sent: &mut String) -> Option<Expected> {
        let key = self.key();
        let number = format!("n{key}");
        self.writes += 1;
        match self.random(16) {
            0..=5 => {
                let len = self.random(300);
                let value = format!("{}:{}", self.writes, "v".repeat(len));
                *sent += &format!("set {key} 7 0 {}\r\n{value}\r\n", value.len());
                self.known.insert(key.clone(), Known { value, cas: None });
                Some(Expected::Stored(key))
            }
            6 => {
                let value = format!("{}:quiet", self.writes);
                *sent += &format!("set {key} 7 0 {} noreply\r\n{value}\r\n", value.len());
                self.known.insert(key, Known { value, cas: None });
                None
            }
            7..=9 => {
                *sent += &format!("get {key}\r\n");
                Some(Expected::Value { value: self.value_of(&key), key, returns_cas: false })
            }
            10 => {
                *sent += &format!("gets {key}\r\n");
                Some(Expected::Value { value: self.value_of(&key), key, returns_cas: true })
            }
            11 => {
                let keys: Vec<String> = (0..10).map(|_| self.key()).collect();
                *sent += &format!("get {}\r\n", keys.join(" "));
                Some(Expected::Values(
                    keys.into_iter().map(|key| (key.clone(), self.value_of(&key))).collect(),
                ))
            }
            12 => {
                let known = self.known.get(&number).map_or(0, |known| known.value.trim().parse().unwrap());
                if known == 0 {
                    *sent += &format!("set {number} 7 0 1\r\n1\r\n");
                    self.known.insert(number.clone(), Known { value: "1".to_owned(), cas: None });
                    return Some(Expected::Stored(number));
                }
                *sent += &format!("incr {number} 1\r\n");
                self.known.insert(number, Known { value: (known + 1).to_string(), cas: None });
                Some(Expected::Number(known + 1))
            }
            13 => match self.known.get(&key).and_then(|known| known.cas) {
                Some(cas) => {
                    let value = format!("{}:cas", self.writes);
                    *sent += &format!("cas {key} 7 0 {} {cas}\r\n{value}\r\n", value.len());
                    self.known.insert(key.clone(), Known { value, cas: None });
                    Some(Expected::Stored(key))
                }
                None if self.known.contains_key(&key) => {
                    *sent += &format!("cas {key} 7 0 1 1\r\nx\r\n");
                    Some(Expected::Exists)
                }
                None => None,
            },
            14 => {
                *sent += &format!("delete {key}\r\n");
                Some(Expected::Deleted(self.known.remove(&key).is_some()))
            }
            _ => {
                // Appends, which reads and writes.
                let known = self.known.get_mut(&key)?;
                if known.value.len() > 2000 {
                    return None;
                }
                known.value.push_str("+a");
                known.cas = None;
                *sent += &format!("append {key} 0 0 2\r\n+a\r\n");
                Some(Expected::Stored(key))
            }
        }
    }

    fn check(&mut self, expected: Expected) {
        match expected {
            Expected::Stored(key) => assert_eq!(self.line(), "STORED", "{key}"),
            Expected::Exists => assert_eq!(self.line(), "EXISTS"),
            Expected::Deleted(was_there) => {
                assert_eq!(self.line(), if was_there { "DELETED" } else { "NOT_FOUND" });
            }
            Expected::Number(number) => assert_eq!(self.line(), number.to_string()),
            Expected::Value { key, value, returns_cas } => {
                let found = self.values();
                let values: Vec<&str> = found.iter().map(|(_, value, _)| value.as_str()).collect();
                assert_eq!(values, value.iter().collect::<Vec<_>>(), "{key}");
                if returns_cas
                    && let (Some((_, value, Some(cas))), Some(known)) =
                        (found.first(), self.known.get_mut(&key))
                    && *value == known.value
                {
                    // Later requests of the batch have not changed the value.
                    known.cas = Some(*cas);
                }
            }
            Expected::Values(expected) => {
                let found = self.values().into_iter().map(|(key, value, _)| (key, value));
                let expected = expected.into_iter().filter_map(|(key, value)| Some((key, value?)));
                assert_eq!(found.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
            }
        }
    }

    /// Reads values until the end.
    fn values(&mut self) -> Vec<(String, String, Option<u64>)> {
        let mut values = Vec::new();
        loop {
            let line = self.line();
            if line == "END" {
                return values;
            }
            let words: Vec<&str> = line.split(' ').collect();
            assert!(words.len() >= 4 && words[0] == "VALUE" && words[2] == "7", "{line}");
            let len: usize = words[3].parse().unwrap();
            let cas = words.get(4).map(|cas| cas.parse().unwrap());
            let mut value = vec![0; len + 2];
            self.stream.read_exact(&mut value).unwrap();
            assert!(value.ends_with(b"\r\n"));
            value.truncate(len);
            values.push((words[1].to_owned(), String::from_utf8(value).unwrap(), cas));
        }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.stream.read_line(&mut line).unwrap();
        assert!(line.ends_with("\r\n"), "{line}");
        line.truncate(line.len() - 2);
        line
    }

    /// Reads all keys back and checks their values.
    pub fn check_all(&mut self) {
        let known: Vec<(String, Known)> =
            self.known.iter().map(|(key, known)| (key.clone(), known.clone())).collect();
        for (key, known) in known {
            self.stream.get_mut().write_all(format!("gets {key}\r\n").as_bytes()).unwrap();
            let found = self.values();
            let [(_, value, _)] = &found[..] else { panic!("{key} is lost: {found:?}, not {known:?}") };
            assert_eq!(*value, known.value, "{key}");
        }
        for number in 0..self.keys {
            let key = format!("{}-{number}", self.name);
            if !self.known.contains_key(&key) {
                self.stream.get_mut().write_all(format!("get {key}\r\n").as_bytes()).unwrap();
                assert_eq!(self.values(), [], "{key} was deleted");
            }
        }
    }
}
