//! Messages between the two ends of a check. The other end is not trusted.

use aquifer_fabric::Key;
#[cfg(doc)]
use aquifer_fabric_verbs::RemapMethod;

/// A request to the lending end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    /// Answer at once.
    Echo,
    /// Bind a read-only window.
    Open,
    /// Revoke a window.
    Close(Key),
    /// Remap the movable region.
    Move,
}

/// Answer to [`Request::Move`]. With key 0 the memory cannot be remapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Moved {
    /// Key of the movable region.
    pub key: Key,
    /// Start of the region.
    pub addr: u64,
    /// Value of each byte there.
    pub byte: u8,
    /// Index of the method in [`RemapMethod::ALL`].
    pub how: u8,
}

/// Answer to the other requests: a window. With key 0 none could be bound.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Opened {
    /// Key of the window.
    pub key: Key,
    /// Start of the window.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
}

/// Length of every message: a byte for the kind, and a window.
pub const MESSAGE_BYTES: usize = 32;
const ECHO: u8 = 1;
const OPEN: u8 = 2;
const CLOSE: u8 = 3;
const MOVE: u8 = 4;

impl Request {
    /// Encodes a message.
    pub fn bytes(self) -> [u8; MESSAGE_BYTES] {
        let (kind, key) = match self {
            Self::Echo => (ECHO, Key(0)),
            Self::Open => (OPEN, Key(0)),
            Self::Close(key) => (CLOSE, key),
            Self::Move => (MOVE, Key(0)),
        };
        let mut bytes = Opened { key, addr: 0, len: 0 }.bytes();
        bytes[0] = kind;
        bytes
    }

    /// Parses a request; `None` if the message is not a valid one.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let window = Opened::parse(bytes)?;
        match bytes[0] {
            ECHO => Some(Self::Echo),
            OPEN => Some(Self::Open),
            CLOSE => Some(Self::Close(window.key)),
            MOVE => Some(Self::Move),
            _ => None,
        }
    }
}

impl Opened {
    /// Encodes a message.
    pub fn bytes(self) -> [u8; MESSAGE_BYTES] {
        let mut bytes = [0; MESSAGE_BYTES];
        bytes[4..8].copy_from_slice(&self.key.0.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.addr.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    /// Parses an answer; `None` if the message is too short or too long.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let key = u32::from_le_bytes(bytes.get(4..8)?.try_into().ok()?);
        Some(Self { key: Key(key), addr: word(8)?, len: word(16)? }).filter(|_| bytes.len() == MESSAGE_BYTES)
    }
}

impl Moved {
    /// Encodes a message.
    pub fn bytes(self) -> [u8; MESSAGE_BYTES] {
        let mut bytes = Opened { key: self.key, addr: self.addr, len: 0 }.bytes();
        (bytes[0], bytes[1]) = (self.how, self.byte);
        bytes
    }

    /// Parses an answer; `None` if the message is too short or too long.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let Opened { key, addr, .. } = Opened::parse(bytes)?;
        Some(Self { key, addr, byte: bytes[1], how: bytes[0] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_messages_are_parsed_and_others_are_refused() {
        for request in [Request::Echo, Request::Open, Request::Close(Key(0x1234_5678)), Request::Move] {
            assert_eq!(Request::parse(&request.bytes()), Some(request));
        }
        let opened = Opened { key: Key(7), addr: 1 << 40, len: 4096 };
        assert_eq!(Opened::parse(&opened.bytes()), Some(opened));
        let moved = Moved { key: Key(8), addr: 1 << 41, byte: 2, how: 1 };
        assert_eq!(Moved::parse(&moved.bytes()), Some(moved));
        for bytes in [&[][..], &[1; 7], &[9; MESSAGE_BYTES], &[1; MESSAGE_BYTES + 1]] {
            assert_eq!(Request::parse(bytes), None);
        }
    }
}
