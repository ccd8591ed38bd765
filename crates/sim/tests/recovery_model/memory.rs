//! A node's words and logs, as small as they can be: one section of two spans of two chunks.

pub const SPANS: usize = 2;
pub const CHUNKS: usize = 2;
/// Hosts, and also threads of hosts.
pub const HOSTS: usize = 3;

pub const SPAN_NUMBERS: [u8; SPANS] = [0, 1];
pub const CHUNK_NUMBERS: [u8; CHUNKS] = [0, 1];
pub const HOST_NUMBERS: [Host; HOSTS] = [0, 1, 2];

pub type Host = u8;

/// What a section says of a span; marks of contention are left out.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Code {
    Empty,
    Open,
    Whole,
}

/// The record in a span's word.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum SpanLog {
    /// Closed, and its section has been told; or never used.
    Ready,
    Alloc(Host, u8),
    Free,
    /// Closed; its section may not have been told.
    Close(Host),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Span {
    pub bits: u8,
    pub log: SpanLog,
    pub stamp: u8,
}

/// One span, or both.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Group {
    pub first: u8,
    pub is_pair: bool,
}

impl Group {
    pub fn spans(self) -> std::ops::Range<usize> {
        let first = usize::from(self.first);
        first..first + 1 + usize::from(self.is_pair)
    }
}

/// What a section's record says of who holds what.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Holding {
    /// A span was opened.
    Open(Host, u8),
    Alloc(Host, Group),
}

impl Holding {
    pub fn first(self) -> usize {
        match self {
            Self::Open(_, span) => span.into(),
            Self::Alloc(_, group) => group.first.into(),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Section {
    pub codes: [Code; SPANS],
    /// Nothing, if the last change gave something back.
    pub log: Option<Holding>,
    pub stamp: u8,
}

/// A full log record. Each that is written differs from all that were there before: it has a nonce.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Entry<T> {
    pub what: Option<T>,
    pub nonce: u8,
}

impl<T> Entry<T> {
    pub const EMPTY: Self = Self { what: None, nonce: 0 };

    pub fn write(&mut self, what: T) {
        *self = Self { what: Some(what), nonce: self.nonce + 1 };
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Memory {
    pub section: Section,
    pub spans: [Span; SPANS],
    /// Whose a chunk is.
    pub chunk_logs: [[Entry<Host>; CHUNKS]; SPANS],
    /// What the section's record was that began at a span.
    pub span_logs: [Entry<Holding>; SPANS],
}

impl Memory {
    pub const NEW: Self = Self {
        section: Section { codes: [Code::Empty; SPANS], log: None, stamp: 0 },
        spans: [Span { bits: 0, log: SpanLog::Ready, stamp: 0 }; SPANS],
        chunk_logs: [[Entry::EMPTY; CHUNKS]; SPANS],
        span_logs: [Entry::EMPTY; SPANS],
    };
}

impl Span {
    pub fn is_closed(self) -> bool {
        self.bits == 0
    }

    pub fn has(self, chunk: u8) -> bool {
        self.bits >> chunk & 1 == 1
    }

    pub fn take(self, chunk: u8, host: Host) -> Self {
        Self { bits: self.bits | 1 << chunk, log: SpanLog::Alloc(host, chunk), stamp: self.stamp + 1 }
    }

    pub fn give(self, chunk: u8, host: Host) -> Self {
        let bits = self.bits & !(1 << chunk);
        let log = if bits == 0 { SpanLog::Close(host) } else { SpanLog::Free };
        Self { bits, log, stamp: self.stamp + 1 }
    }

    /// Whoever ends its life says so.
    pub fn sign(self, host: Host) -> Self {
        Self { log: SpanLog::Close(host), stamp: self.stamp + 1, ..self }
    }

    pub fn mark(self) -> Self {
        Self { log: SpanLog::Ready, stamp: self.stamp + 1, ..self }
    }
}

impl Section {
    pub fn with(mut self, group: Group, code: Code, log: Option<Holding>) -> Self {
        group.spans().for_each(|span| self.codes[span] = code);
        Self { log, stamp: self.stamp + 1, ..self }
    }

    pub fn is_empty(self, group: Group) -> bool {
        group.spans().all(|span| self.codes[span] == Code::Empty)
    }
}
