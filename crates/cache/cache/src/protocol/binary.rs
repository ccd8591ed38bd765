//! The frames of memcached's binary protocol. All numbers are big-endian.

/// First byte of a request.
pub const REQUEST_MAGIC: u8 = 0x80;
const REPLY_MAGIC: u8 = 0x81;
/// Bytes of a header.
pub const HEADER_BYTES: usize = 24;

/// The header of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestHeader {
    /// The command, one of [`opcode`].
    pub opcode: u8,
    /// Bytes of the key.
    pub key_len: usize,
    /// Bytes of the arguments before the key.
    pub extras_len: usize,
    /// Bytes of arguments, key and value.
    pub body_len: usize,
    /// Bytes that the reply repeats.
    pub opaque: [u8; 4],
    /// A cas number, or 0.
    pub cas: u64,
}

impl RequestHeader {
    /// Reads the header of a request. `None` if the first byte is not [`REQUEST_MAGIC`].
    #[must_use]
    pub fn read(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        if bytes[0] != REQUEST_MAGIC {
            return None;
        }
        Some(Self {
            opcode: bytes[1],
            key_len: usize::from(u16::from_be_bytes([bytes[2], bytes[3]])),
            extras_len: usize::from(bytes[4]),
            body_len: u32::from_be_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]) as usize,
            opaque: [bytes[12], bytes[13], bytes[14], bytes[15]],
            cas: u64::from_be_bytes(bytes[16..].try_into().expect("8 bytes")),
        })
    }
}

/// The status of a reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum Status {
    /// The request has succeeded.
    Success = 0,
    /// The key is missing.
    NotFound = 1,
    /// The key exists, or has another cas number.
    Exists = 2,
    /// The item is too large.
    TooLarge = 3,
    /// The request is not valid.
    Invalid = 4,
    /// The item was not stored.
    NotStored = 5,
    /// The value is not a number.
    NotNumeric = 6,
    /// The client must authenticate first.
    Unauthenticated = 0x20,
    /// The command is not known.
    UnknownCommand = 0x81,
    /// There is no memory.
    NoMemory = 0x82,
    /// The server of the key cannot be reached.
    TemporaryFailure = 0x86,
}

impl Status {
    /// The value of a reply with this status.
    #[must_use]
    pub fn text(self) -> &'static [u8] {
        match self {
            Self::Success => b"",
            Self::NotFound => b"Not found",
            Self::Exists => b"Data exists for key.",
            Self::TooLarge => b"Too large.",
            Self::Invalid => b"Invalid arguments",
            Self::NotStored => b"Not stored.",
            Self::NotNumeric => b"Non-numeric server-side value for incr or decr",
            Self::Unauthenticated => b"Auth failure.",
            Self::UnknownCommand => b"Unknown command",
            Self::NoMemory => b"Out of memory",
            Self::TemporaryFailure => b"Temporary failure",
        }
    }
}

/// The header of a reply.
#[must_use]
pub fn reply_header(
    request: &RequestHeader,
    status: Status,
    cas: u64,
    extras_len: u8,
    key_len: usize,
    body_len: usize,
) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[0] = REPLY_MAGIC;
    bytes[1] = request.opcode;
    bytes[2..4].copy_from_slice(&u16::try_from(key_len).expect("a short key").to_be_bytes());
    bytes[4] = extras_len;
    bytes[6..8].copy_from_slice(&(status as u16).to_be_bytes());
    bytes[8..12].copy_from_slice(&u32::try_from(body_len).expect("an item is shorter").to_be_bytes());
    bytes[12..16].copy_from_slice(&request.opaque);
    bytes[16..].copy_from_slice(&cas.to_be_bytes());
    bytes
}

/// Commands.
pub mod opcode {
    /// Reads an item.
    pub const GET: u8 = 0x00;
    /// Stores an item.
    pub const SET: u8 = 0x01;
    /// Stores an item that is missing.
    pub const ADD: u8 = 0x02;
    /// Stores an item that exists.
    pub const REPLACE: u8 = 0x03;
    /// Deletes an item.
    pub const DELETE: u8 = 0x04;
    /// Increases a counter.
    pub const INCREMENT: u8 = 0x05;
    /// Decreases a counter.
    pub const DECREMENT: u8 = 0x06;
    /// Ends the connection.
    pub const QUIT: u8 = 0x07;
    /// Removes all items.
    pub const FLUSH: u8 = 0x08;
    /// `GET` without a reply if the item is missing.
    pub const GET_QUIET: u8 = 0x09;
    /// Does nothing.
    pub const NOOP: u8 = 0x0a;
    /// Returns the version.
    pub const VERSION: u8 = 0x0b;
    /// `GET` whose reply has the key.
    pub const GET_KEY: u8 = 0x0c;
    /// `GET_KEY` without a reply if the item is missing.
    pub const GET_KEY_QUIET: u8 = 0x0d;
    /// Adds to the end of a value.
    pub const APPEND: u8 = 0x0e;
    /// Adds to the start of a value.
    pub const PREPEND: u8 = 0x0f;
    /// Returns statistics.
    pub const STATS: u8 = 0x10;
    /// The first of the commands from `SET` to `DECREMENT` without a reply if they succeed.
    pub const SET_QUIET: u8 = 0x11;
    /// `DECREMENT` without a reply if it succeeds.
    pub const DECREMENT_QUIET: u8 = 0x16;
    /// `QUIT` without a reply.
    pub const QUIT_QUIET: u8 = 0x17;
    /// `FLUSH` without a reply.
    pub const FLUSH_QUIET: u8 = 0x18;
    /// `APPEND` without a reply if it succeeds.
    pub const APPEND_QUIET: u8 = 0x19;
    /// `PREPEND` without a reply if it succeeds.
    pub const PREPEND_QUIET: u8 = 0x1a;
    /// Sets the verbosity of the log.
    pub const VERBOSITY: u8 = 0x1b;
    /// Sets the expiry of an item.
    pub const TOUCH: u8 = 0x1c;
    /// `GET` and `TOUCH`.
    pub const GET_TOUCH: u8 = 0x1d;
    /// `GET_TOUCH` without a reply if the item is missing.
    pub const GET_TOUCH_QUIET: u8 = 0x1e;
    /// `GET_TOUCH` whose reply has the key.
    pub const GET_KEY_TOUCH: u8 = 0x23;
    /// `GET_KEY_TOUCH` without a reply if the item is missing.
    pub const GET_KEY_TOUCH_QUIET: u8 = 0x24;
}
