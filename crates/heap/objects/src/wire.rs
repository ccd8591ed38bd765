//! Requests of clients to the service of heaps, and its answers: one message each.
//!
//! The format is in `docs/formats/objects.md`.

use crate::mutation::Mutation;
use crate::pointer::Pointer;

/// The version of the messages.
pub const VERSION: u8 = 3;
/// Bytes before an object's bytes in a message.
pub const HEAD_BYTES: usize = 24;

const OPEN: u8 = 1;
const ALLOCATE: u8 = 2;
const FREE: u8 = 3;
const READ: u8 = 4;
const WRITE: u8 = 5;
const CORRECT: u8 = 6;
const RELEASE: u8 = 7;
const REPORT: u8 = 8;
const COMPACT: u8 = 9;
const SET_LIMIT: u8 = 10;
const CREATE: u8 = 11;
const WRITE_AT: u8 = 12;
const WRITE_IF: u8 = 13;
const REPLACE: u8 = 14;
const ROOT: u8 = 15;
const OPEN_RAW: u8 = 16;

const OPENED: u8 = 129;
const POINTER: u8 = 130;
const BYTES: u8 = 131;
const REFUSED: u8 = 132;
const REPORTED: u8 = 133;
const DONE: u8 = 134;
const OPENED_RAW: u8 = 135;

/// A request of a client or an operator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request<'a> {
    /// Asks for the regions of the tenant's heap, which is created if there is none.
    Open,
    /// Asks for the memory of the tenant's heap, as a device serves it.
    OpenRaw,
    /// Allocates an object of `bytes` bytes, all zeros.
    Allocate {
        /// Size in bytes.
        bytes: u32,
    },
    /// Allocates an object of `bytes` bytes that begins with `first`; the others are zeros.
    Create {
        /// Size in bytes.
        bytes: u32,
        /// The first bytes.
        first: &'a [u8],
    },
    /// Asks for the root object of the tenant's heap, which is allocated if there is none.
    Root {
        /// The size in bytes, if the root is allocated.
        bytes: u32,
    },
    /// Frees an object.
    Free(Pointer),
    /// Reads an object.
    Read(Pointer),
    /// Replaces the first bytes of an object.
    Write(Pointer, &'a [u8]),
    /// Replaces bytes of an object.
    WriteAt {
        /// The object.
        pointer: Pointer,
        /// The first byte that is replaced, a multiple of 8.
        offset: u32,
        /// The new bytes.
        bytes: &'a [u8],
    },
    /// Replaces the first bytes of an object if its first word is `expected`.
    WriteIf {
        /// The object.
        pointer: Pointer,
        /// The value that the first word must have.
        expected: u64,
        /// The new bytes.
        bytes: &'a [u8],
    },
    /// Replaces the first bytes of a large object by those of another one of its size class, which
    /// is freed.
    Replace {
        /// The object.
        pointer: Pointer,
        /// The other object.
        staged: Pointer,
        /// Bytes that are replaced.
        bytes: u32,
    },
    /// Asks for the pointer with the slot where the object is now.
    Correct(Pointer),
    /// Asks for a pointer with the object's present block. The client has replaced all pointers to
    /// the object (§3.3).
    Release(Pointer),
    /// Asks, as an operator, for the report on the heap of the first tenant from `from` on.
    Report {
        /// The least tenant number.
        from: u32,
    },
    /// Does, as an operator, one step of compaction of a tenant's heap.
    Compact {
        /// The tenant.
        tenant: u32,
    },
    /// Changes, as an operator, the memory limit of a tenant's heap.
    SetLimit {
        /// The tenant.
        tenant: u32,
        /// The new limit in bytes.
        bytes: u64,
    },
}

/// The region of the blocks of one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BlockRegion {
    /// The first address.
    pub base: u64,
    /// The key.
    pub key: u32,
    /// The number of the heap on its node.
    pub heap: u16,
    /// The node.
    pub node: u16,
}

/// The service's answer to a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer<'a> {
    /// The regions of the heap, the smallest blocks first.
    Opened(Vec<BlockRegion>),
    /// The memory of the heap, as a device serves it.
    OpenedRaw {
        /// Number of frames of the heap.
        frames: u32,
        /// The bytes of the objects.
        data: BlockRegion,
        /// The names of all blocks.
        names: BlockRegion,
    },
    /// A pointer, and whether it names an old block, which can be released.
    Pointer(Pointer, bool),
    /// A corrected pointer, whether it names an old block, and the object's bytes.
    Bytes(Pointer, bool, &'a [u8]),
    /// Why the request was refused.
    Refused(Refused),
    /// A report, as JSON.
    Report(&'a [u8]),
    /// The request was carried out; for a compaction, with the number of merges.
    Done(u32),
}

/// Why a request was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refused {
    /// There is no such object.
    #[error("there is no such object: it was freed, or the pointer is wrong")]
    NoObject,
    /// The heap has reached its limit.
    #[error("the heap is full")]
    Full,
    /// The object would be larger than any class.
    #[error("the object is too large")]
    TooLarge,
    /// The object is being written or moved: repeat the request.
    #[error("the object is busy")]
    Busy,
    /// The message is not valid.
    #[error("the request is not valid")]
    Invalid,
    /// The first word of the object is not the one that was expected.
    #[error("the object was changed by another client")]
    Changed,
    /// The heap was closed.
    #[error(
        "the heap was closed, because programs of its user took more memory than its limit by reading where \
         it has no objects; an operator opens a new one with «aquifer heap limit»"
    )]
    Closed,
}

impl Refused {
    fn code(self) -> u8 {
        match self {
            Self::NoObject => 1,
            Self::Full => 2,
            Self::TooLarge => 3,
            Self::Busy => 4,
            Self::Invalid => 5,
            Self::Changed => 6,
            Self::Closed => 7,
        }
    }

    fn from_code(code: u8) -> Option<Self> {
        [Self::NoObject, Self::Full, Self::TooLarge, Self::Busy, Self::Invalid, Self::Changed, Self::Closed]
            .into_iter()
            .find(|refused| refused.code() == code)
    }
}

impl<'a> Request<'a> {
    /// Appends the message to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match *self {
            Self::Open => put_head(out, OPEN, 0, [0; 2]),
            Self::OpenRaw => put_head(out, OPEN_RAW, 0, [0; 2]),
            Self::Allocate { bytes } => put_head(out, ALLOCATE, bytes, [0; 2]),
            Self::Create { bytes, first } => {
                put_head(out, CREATE, bytes, [0; 2]);
                out.extend_from_slice(first);
            }
            Self::Root { bytes } => put_head(out, ROOT, bytes, [0; 2]),
            Self::Free(pointer) => put_head(out, FREE, 0, pointer.words()),
            Self::Read(pointer) => put_head(out, READ, 0, pointer.words()),
            Self::Write(pointer, bytes) => {
                put_head(out, WRITE, len(bytes), pointer.words());
                out.extend_from_slice(bytes);
            }
            Self::WriteAt { pointer, offset, bytes } => {
                put_head(out, WRITE_AT, offset, pointer.words());
                out.extend_from_slice(bytes);
            }
            Self::WriteIf { pointer, expected, bytes } => {
                put_head(out, WRITE_IF, len(bytes), pointer.words());
                out.extend_from_slice(&expected.to_le_bytes());
                out.extend_from_slice(bytes);
            }
            Self::Replace { pointer, staged, bytes } => {
                put_head(out, REPLACE, bytes, pointer.words());
                staged.words().iter().for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
            }
            Self::Correct(pointer) => put_head(out, CORRECT, 0, pointer.words()),
            Self::Release(pointer) => put_head(out, RELEASE, 0, pointer.words()),
            Self::Report { from } => put_head(out, REPORT, from, [0; 2]),
            Self::Compact { tenant } => put_head(out, COMPACT, tenant, [0; 2]),
            Self::SetLimit { tenant, bytes } => put_head(out, SET_LIMIT, tenant, [bytes, 0]),
        }
    }

    /// The request in a message; `None` if it is not valid.
    #[must_use]
    pub fn decode(message: &'a [u8]) -> Option<Self> {
        let Head { kind, number, words, flag: false, rest } = Head::of(message)? else { return None };
        let has_number = matches!(kind, ALLOCATE | ROOT | REPORT | COMPACT | SET_LIMIT);
        let is_plain = rest.is_empty() && (number == 0 || has_number);
        let is_any_length = Mutation::AcceptAnyLength.is_active();
        let pointer = || Pointer::from_words(words);
        match kind {
            OPEN if is_plain && words == [0; 2] => Some(Self::Open),
            OPEN_RAW if is_plain && words == [0; 2] => Some(Self::OpenRaw),
            ALLOCATE if is_plain && words == [0; 2] => Some(Self::Allocate { bytes: number }),
            FREE if is_plain => Some(Self::Free(pointer()?)),
            READ if is_plain => Some(Self::Read(pointer()?)),
            CREATE if words == [0; 2] && len(rest) <= number => {
                Some(Self::Create { bytes: number, first: rest })
            }
            ROOT if is_plain && words == [0; 2] => Some(Self::Root { bytes: number }),
            WRITE if len(rest) == number || is_any_length => Some(Self::Write(pointer()?, rest)),
            WRITE_AT if number.is_multiple_of(8) => {
                Some(Self::WriteAt { pointer: pointer()?, offset: number, bytes: rest })
            }
            WRITE_IF => {
                let (expected, bytes) = rest.split_first_chunk::<8>()?;
                let expected = u64::from_le_bytes(*expected);
                (len(bytes) == number).then_some(Self::WriteIf { pointer: pointer()?, expected, bytes })
            }
            REPLACE => {
                let (first, second) = rest.split_first_chunk::<8>()?;
                let words = [u64::from_le_bytes(*first), u64::from_le_bytes(second.try_into().ok()?)];
                let staged = Pointer::from_words(words)?;
                Some(Self::Replace { pointer: pointer()?, staged, bytes: number })
            }
            CORRECT if is_plain => Some(Self::Correct(pointer()?)),
            RELEASE if is_plain => Some(Self::Release(pointer()?)),
            REPORT if is_plain && words == [0; 2] => Some(Self::Report { from: number }),
            COMPACT if is_plain && words == [0; 2] => Some(Self::Compact { tenant: number }),
            SET_LIMIT if is_plain && words[1] == 0 => {
                Some(Self::SetLimit { tenant: number, bytes: words[0] })
            }
            _ => None,
        }
    }
}

impl<'a> Answer<'a> {
    /// Appends the message to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Opened(regions) => {
                let count = u32::try_from(regions.len()).expect("there are few block sizes");
                put_head(out, OPENED, count, [0; 2]);
                regions.iter().for_each(|region| put_region(out, region));
            }
            Self::OpenedRaw { frames, data, names } => {
                put_head(out, OPENED_RAW, *frames, [0; 2]);
                [data, names].into_iter().for_each(|region| put_region(out, region));
            }
            Self::Pointer(pointer, is_old) => put_flagged(out, POINTER, 0, pointer.words(), *is_old),
            Self::Bytes(pointer, is_old, bytes) => {
                put_flagged(out, BYTES, len(bytes), pointer.words(), *is_old);
                out.extend_from_slice(bytes);
            }
            Self::Refused(refused) => put_head(out, REFUSED, refused.code().into(), [0; 2]),
            Self::Report(json) => {
                put_head(out, REPORTED, len(json), [0; 2]);
                out.extend_from_slice(json);
            }
            Self::Done(number) => put_head(out, DONE, *number, [0; 2]),
        }
    }

    /// The answer in a message; `None` if it is not valid.
    #[must_use]
    pub fn decode(message: &'a [u8]) -> Option<Self> {
        let Head { kind, number, words, flag, rest } = Head::of(message)?;
        let is_without_pointer = !flag && words == [0; 2];
        match kind {
            OPENED if rest.len() == number as usize * 16 && is_without_pointer => {
                Some(Self::Opened(rest.chunks_exact(16).map(block_region).collect::<Option<_>>()?))
            }
            OPENED_RAW if rest.len() == 32 && is_without_pointer => {
                let (data, names) = rest.split_at(16);
                Some(Self::OpenedRaw {
                    frames: number,
                    data: block_region(data)?,
                    names: block_region(names)?,
                })
            }
            POINTER if rest.is_empty() && number == 0 => {
                Some(Self::Pointer(Pointer::from_words(words)?, flag))
            }
            BYTES if len(rest) == number => Some(Self::Bytes(Pointer::from_words(words)?, flag, rest)),
            REFUSED if rest.is_empty() && is_without_pointer => {
                Some(Self::Refused(Refused::from_code(u8::try_from(number).ok()?)?))
            }
            REPORTED if len(rest) == number && is_without_pointer => Some(Self::Report(rest)),
            DONE if rest.is_empty() && is_without_pointer => Some(Self::Done(number)),
            _ => None,
        }
    }
}

/// The first bytes of each message.
struct Head<'a> {
    kind: u8,
    flag: bool,
    number: u32,
    words: [u64; 2],
    rest: &'a [u8],
}

impl<'a> Head<'a> {
    fn of(message: &'a [u8]) -> Option<Self> {
        let (head, rest) = message.split_at_checked(HEAD_BYTES)?;
        let [kind, VERSION, flag @ (0 | 1), 0, tail @ ..] = head else { return None };
        let (number, words) = tail.split_first_chunk::<4>()?;
        let (first, second) = words.split_first_chunk::<8>()?;
        Some(Self {
            kind: *kind,
            flag: *flag == 1,
            number: u32::from_le_bytes(*number),
            words: [u64::from_le_bytes(*first), u64::from_le_bytes(second.try_into().ok()?)],
            rest,
        })
    }
}

fn put_head(out: &mut Vec<u8>, kind: u8, number: u32, words: [u64; 2]) {
    put_flagged(out, kind, number, words, false);
}

fn put_flagged(out: &mut Vec<u8>, kind: u8, number: u32, words: [u64; 2], flag: bool) {
    out.extend_from_slice(&[kind, VERSION, u8::from(flag), 0]);
    out.extend_from_slice(&number.to_le_bytes());
    words.iter().for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
}

fn put_region(out: &mut Vec<u8>, region: &BlockRegion) {
    let BlockRegion { base, key, heap, node } = region;
    out.extend_from_slice(&base.to_le_bytes());
    out.extend_from_slice(&key.to_le_bytes());
    out.extend_from_slice(&heap.to_le_bytes());
    out.extend_from_slice(&node.to_le_bytes());
}

fn block_region(bytes: &[u8]) -> Option<BlockRegion> {
    let (base, rest) = bytes.split_first_chunk::<8>()?;
    let (key, rest) = rest.split_first_chunk::<4>()?;
    let (heap, rest) = rest.split_first_chunk::<2>()?;
    Some(BlockRegion {
        base: u64::from_le_bytes(*base),
        key: u32::from_le_bytes(*key),
        heap: u16::from_le_bytes(*heap),
        node: u16::from_le_bytes(rest.try_into().ok()?),
    })
}

fn len(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).expect("a message is short")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::class::ClassId;
    use crate::header::ObjectNumber;

    fn pointer() -> Pointer {
        let number = ObjectNumber::new(77).unwrap();
        Pointer { node: 3, heap: 4, class: ClassId(5), address: 0x1000, number }
    }

    #[test]
    fn messages_are_read_as_they_were_written() {
        let requests = [
            Request::Open,
            Request::OpenRaw,
            Request::Allocate { bytes: 100 },
            Request::Free(pointer()),
            Request::Read(pointer()),
            Request::Write(pointer(), b"bytes"),
            Request::WriteIf { pointer: pointer(), expected: 7, bytes: b"bytes" },
            Request::Replace { pointer: pointer(), staged: pointer(), bytes: 5 },
            Request::Root { bytes: 5 },
            Request::Correct(pointer()),
            Request::Release(pointer()),
        ];
        for request in requests {
            let mut message = Vec::new();
            request.encode(&mut message);
            assert_eq!(Request::decode(&message), Some(request));
            assert_eq!(Request::decode(&message[..message.len() - 1]), None, "a part of {request:?}");
        }
        // These requests are valid with any number of bytes.
        let requests = [
            Request::Create { bytes: 100, first: b"bytes" },
            Request::WriteAt { pointer: pointer(), offset: 8, bytes: b"bytes" },
        ];
        for request in requests {
            let mut message = Vec::new();
            request.encode(&mut message);
            assert_eq!(Request::decode(&message), Some(request));
        }
        let region = BlockRegion { base: 1 << 40, key: 7, heap: 8, node: 9 };
        let answers = [
            Answer::Opened(vec![region; 16]),
            Answer::Pointer(pointer(), true),
            Answer::Bytes(pointer(), false, b"bytes"),
            Answer::Refused(Refused::Busy),
        ];
        for answer in answers {
            let mut message = Vec::new();
            answer.encode(&mut message);
            assert_eq!(Answer::decode(&message), Some(answer.clone()));
            message.push(0);
            assert_eq!(Answer::decode(&message), None, "a byte more than {answer:?}");
        }
    }

    proptest! {
        #[test]
        fn other_bytes_are_refused_or_read_back_alike(message in prop::collection::vec(any::<u8>(), 0..60)) {
            let mut again = Vec::new();
            if let Some(request) = Request::decode(&message) {
                request.encode(&mut again);
                prop_assert_eq!(&again, &message);
            }
            again.clear();
            if let Some(answer) = Answer::decode(&message) {
                answer.encode(&mut again);
                prop_assert_eq!(&again, &message);
            }
        }
    }
}
