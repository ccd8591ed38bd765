//! Scripts: batches of requests that are sent to a server on one or more connections.

use std::fmt::{self, Display, Formatter};

use crate::connection::End;
use crate::escape::escape;
use crate::random::Random;

/// A cas value in a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cas {
    /// A distinct value that the same server returned earlier in the script, counted back from the
    /// latest; 1 if the server has returned too few.
    Recent(usize),
    /// The greatest number, which no server issues.
    Greatest,
}

/// A part of a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Piece {
    /// Literal bytes.
    Bytes(Vec<u8>),
    /// A cas value in decimal.
    Cas(Cas),
}

/// Bytes that stay together when a script is shrunk: a command with its data, or several commands
/// that depend on each other.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Request {
    /// The parts, in order.
    pub pieces: Vec<Piece>,
}

impl Request {
    /// A request of literal bytes.
    #[must_use]
    pub fn literal(bytes: impl Into<Vec<u8>>) -> Self {
        Self { pieces: vec![Piece::Bytes(bytes.into())] }
    }

    /// Appends literal bytes.
    pub fn push(&mut self, bytes: impl AsRef<[u8]>) {
        if let Some(Piece::Bytes(last)) = self.pieces.last_mut() {
            last.extend_from_slice(bytes.as_ref());
        } else {
            self.pieces.push(Piece::Bytes(bytes.as_ref().to_vec()));
        }
    }

    /// Appends a cas value.
    pub fn push_cas(&mut self, cas: Cas) {
        self.pieces.push(Piece::Cas(cas));
    }

    /// The bytes, with the cas values that one server has returned so far.
    #[must_use]
    pub fn bytes(&self, seen_cas: &[u64]) -> Vec<u8> {
        let recent = |back: usize| seen_cas.iter().rev().nth(back).copied().unwrap_or(1);
        let mut bytes = Vec::new();
        for piece in &self.pieces {
            match piece {
                Piece::Bytes(literal) => bytes.extend_from_slice(literal),
                Piece::Cas(Cas::Recent(back)) => bytes.extend(recent(*back).to_string().into_bytes()),
                Piece::Cas(Cas::Greatest) => bytes.extend(u64::MAX.to_string().into_bytes()),
            }
        }
        bytes
    }
}

impl Display for Request {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        for piece in &self.pieces {
            match piece {
                Piece::Bytes(bytes) => write!(formatter, "{}", escape(bytes))?,
                Piece::Cas(Cas::Recent(back)) => write!(formatter, "<cas {back} back>")?,
                Piece::Cas(Cas::Greatest) => write!(formatter, "{}", u64::MAX)?,
            }
        }
        Ok(())
    }
}

/// The positions at which the bytes of a batch are cut into separate writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cuts {
    /// No cuts: one write.
    None,
    /// Up to 20 random positions, which this seed determines.
    Random(u64),
    /// Each position.
    EachByte,
}

impl Cuts {
    /// Splits bytes into the writes.
    #[must_use]
    pub fn split<'a>(&self, bytes: &'a [u8]) -> Vec<&'a [u8]> {
        const CUTS_MAX: usize = 20;
        match self {
            _ if bytes.is_empty() => Vec::new(),
            Self::None => vec![bytes],
            Self::EachByte => bytes.chunks(1).collect(),
            Self::Random(seed) => {
                let mut random = Random::new(*seed);
                let cuts = random.between(1, CUTS_MAX);
                let mut positions: Vec<usize> = (0..cuts).map(|_| random.below(bytes.len())).collect();
                positions.extend([0, bytes.len()]);
                positions.sort_unstable();
                positions.dedup();
                positions.windows(2).map(|ends| &bytes[ends[0]..ends[1]]).collect()
            }
        }
    }
}

/// Requests that are sent on one connection before any reply is awaited.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Batch {
    /// The number of the connection, which is opened at its first use, and reopened after its end.
    pub connection: usize,
    /// The requests, in order.
    pub requests: Vec<Request>,
    /// The cuts between the writes.
    pub cuts: Cuts,
    /// The means to find the end of the replies.
    pub end: End,
}

impl Batch {
    /// A batch on the first connection, in one write, after which the connection stays open.
    #[must_use]
    pub fn new(requests: Vec<Request>) -> Self {
        Self { connection: 0, requests, cuts: Cuts::None, end: End::Sentinel }
    }
}

/// Batches that are sent in order. The replies to a batch are read before the next one is sent.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Script {
    /// The batches, in order.
    pub batches: Vec<Batch>,
    /// Keys that are deleted before the script starts.
    pub keys: Vec<Key>,
}

impl Script {
    /// The number of requests in all batches.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.batches.iter().map(|batch| batch.requests.len()).sum()
    }
}

impl Display for Script {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        for (number, batch) in self.batches.iter().enumerate() {
            let Batch { connection, cuts, end, .. } = batch;
            writeln!(formatter, "  batch {number}, connection {connection}, cuts {cuts:?}, end {end:?}:")?;
            for request in &batch.requests {
                writeln!(formatter, "    {request}")?;
            }
        }
        Ok(())
    }
}

/// A key in the form of a command's word.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Key {
    /// The word in the command.
    pub word: Vec<u8>,
    /// Whether the word is in base64, which only meta commands with the flag `b` accept.
    pub is_base64: bool,
}

impl Key {
    /// A key that is not encoded.
    #[must_use]
    pub fn plain(word: impl Into<Vec<u8>>) -> Self {
        Self { word: word.into(), is_base64: false }
    }

    /// A key in base64.
    #[must_use]
    pub fn base64(word: impl Into<Vec<u8>>) -> Self {
        Self { word: word.into(), is_base64: true }
    }

    /// The key of the same word with the flag `b` if this one has none, and without it otherwise.
    #[must_use]
    pub fn with_other_encoding(&self) -> Self {
        Self { word: self.word.clone(), is_base64: !self.is_base64 }
    }

    /// A meta command on the key, with flags.
    #[must_use]
    pub fn meta_line(&self, command: &str, flags: &str) -> Vec<u8> {
        let mut line = format!("{command} ").into_bytes();
        line.extend_from_slice(&self.word);
        line.extend_from_slice(if self.is_base64 { b" b" } else { b"" });
        if !flags.is_empty() {
            line.push(b' ');
            line.extend_from_slice(flags.as_bytes());
        }
        line.extend_from_slice(b"\r\n");
        line
    }
}
