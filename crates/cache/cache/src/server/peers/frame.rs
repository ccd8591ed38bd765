//! The frames between servers: requests that are forwarded, and their replies.
//!
//! `docs/formats/cache-peers.md` has the bytes. Frames come from servers that have proven that they
//! hold the cluster key; a malformed frame ends the connection.

use aquifer_mutation::mutations;

use crate::commands::Protocol;
use crate::commands::elsewhere::Task;
use crate::store::presence::Place;

/// Bytes of the description of an entry: kind, partition, length.
const ENTRY_BYTES: usize = 1 + 4 + 4;
/// Bytes of an answer before the lengths of the replies.
pub const ANSWER_HEAD_BYTES: usize = 4 + 8 + 8 + 2 + 2 + 1 + 4 + 2 + 8;
/// Bytes of the length of a reply.
pub const REPLY_LEN_BYTES: usize = 4;
/// Bytes that are received at a time.
pub const LINK_INPUT_BYTES: usize = 64 << 10;
/// Most entries of a frame.
pub const ENTRIES_MAX: usize = 64;
/// Longest frame and longest answer, in bytes after the length.
pub const FRAME_BYTES_MAX: usize = (1 << 31) - 1;

/// Offset in a frame of the time until which it may be served.
const SERVE_UNTIL_OFFSET: usize = 4 + 8;

const KIND_TEXT: u8 = 0;
const KIND_BINARY: u8 = 1;
const KIND_FLUSH: u8 = 2;
const KIND_CANCEL_FLUSH: u8 = 3;
const KIND_DELETE: u8 = 4;

const END_DONE: u8 = 0;
const END_AGAIN: u8 = 1;
const END_MOVED: u8 = 2;
const END_MALFORMED: u8 = 3;
const END_LATE: u8 = 4;
const END_UNAVAILABLE: u8 = 5;

mutations! {
    /// Checks of frames that their fuzz target leaves out on purpose.
    pub enum Mutation {
        /// Bytes after the last entry are accepted.
        AcceptRest,
    }
}

/// The error of a frame or answer that violates the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Malformed;

/// Appends a frame. [`set_serve_until`] sets the time until which it may be served. If it `waits`,
/// the receiver waits for partitions that are about to arrive or to leave.
///
/// # Panics
/// If there are more than [`ENTRIES_MAX`] entries, or more than [`FRAME_BYTES_MAX`] bytes.
pub fn push_frame(out: &mut Vec<u8>, number: u64, waits: bool, entries: &[(usize, Task<'_>)]) {
    assert!(entries.len() <= ENTRIES_MAX, "{} entries in a frame", entries.len());
    let start = out.len();
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&number.to_le_bytes());
    out.extend_from_slice(&[0; 8]);
    out.push(u8::from(waits));
    out.extend_from_slice(&u16::try_from(entries.len()).expect("few entries").to_le_bytes());
    let mut seconds = Vec::new();
    for (partition, task) in entries {
        let (kind, len) = match task {
            Task::Request(Protocol::Text, bytes) => (KIND_TEXT, bytes.len()),
            Task::Request(Protocol::Binary, bytes) => (KIND_BINARY, bytes.len()),
            Task::Flush(_) => (KIND_FLUSH, 4),
            Task::CancelFlush => (KIND_CANCEL_FLUSH, 0),
            Task::Delete(key) => (KIND_DELETE, key.len()),
        };
        out.push(kind);
        out.extend_from_slice(&u32::try_from(*partition).expect("at most 65,536").to_le_bytes());
        out.extend_from_slice(&u32::try_from(len).expect("requests are shorter").to_le_bytes());
    }
    for (_, task) in entries {
        let bytes = match task {
            Task::Request(_, bytes) | Task::Delete(bytes) => bytes,
            Task::Flush(after_s) => {
                seconds.clear();
                seconds.extend_from_slice(&after_s.to_le_bytes());
                &seconds[..]
            }
            Task::CancelFlush => &[],
        };
        out.extend_from_slice(bytes);
    }
    set_len(out, start);
}

/// Sets the time until which a frame may be served, in microseconds of the receiver's clock.
pub fn set_serve_until(frame: &mut [u8], until_us: u64) {
    frame[SERVE_UNTIL_OFFSET..SERVE_UNTIL_OFFSET + 8].copy_from_slice(&until_us.to_le_bytes());
}

fn set_len(out: &mut [u8], start: usize) {
    let len = out.len() - start - 4;
    assert!(len <= FRAME_BYTES_MAX, "a frame of {len} bytes");
    out[start..start + 4].copy_from_slice(&u32::try_from(len).expect("below 2 GiB").to_le_bytes());
}

/// The length of the frame or answer at the start of the input; `None` if it is not complete.
///
/// # Errors
/// If the length exceeds [`FRAME_BYTES_MAX`].
pub fn complete_len(input: &[u8]) -> Result<Option<usize>, Malformed> {
    let Some(len) = input.first_chunk::<4>() else { return Ok(None) };
    let len = u32::from_le_bytes(*len) as usize;
    if len > FRAME_BYTES_MAX {
        return Err(Malformed);
    }
    Ok((input.len() >= 4 + len).then_some(4 + len))
}

/// A frame that was received.
#[derive(Clone, Debug)]
pub struct Frame<'a> {
    /// The number of the frame, which the answer repeats.
    pub number: u64,
    /// The time after which no entry of the frame may be executed, in microseconds since the start
    /// of the receiver's machine.
    pub until_us: u64,
    /// Whether the receiver waits for partitions that are about to arrive or to leave.
    pub waits: bool,
    /// Partitions, and the task in each.
    pub entries: Vec<(usize, Task<'a>)>,
}

impl<'a> Frame<'a> {
    /// Reads a complete frame.
    ///
    /// # Errors
    /// If the bytes violate the protocol.
    pub fn read(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut reader = Reader(bytes);
        reader.next(4)?;
        let (number, until_us) = (reader.u64()?, reader.u64()?);
        let waits = match reader.u8()? {
            0 => false,
            1 => true,
            _ => return Err(Malformed),
        };
        let count = usize::from(reader.u16()?);
        if count > ENTRIES_MAX {
            return Err(Malformed);
        }
        let mut descriptions = Reader(reader.next(count * ENTRY_BYTES)?);
        let mut entries = Vec::with_capacity(count);
        for _ in 0..count {
            let (kind, partition) = (descriptions.u8()?, descriptions.u32()? as usize);
            let bytes = reader.next(descriptions.u32()? as usize)?;
            let task = match kind {
                KIND_TEXT => Task::Request(Protocol::Text, bytes),
                KIND_BINARY => Task::Request(Protocol::Binary, bytes),
                KIND_FLUSH => Task::Flush(u32::from_le_bytes(bytes.try_into().map_err(|_| Malformed)?)),
                KIND_CANCEL_FLUSH if bytes.is_empty() => Task::CancelFlush,
                KIND_DELETE => Task::Delete(bytes),
                _ => return Err(Malformed),
            };
            if matches!(task, Task::Request(_, []) | Task::Delete([])) {
                return Err(Malformed);
            }
            entries.push((partition, task));
        }
        let is_whole = reader.0.is_empty() || Mutation::AcceptRest.is_active();
        if is_whole { Ok(Self { number, until_us, waits, entries }) } else { Err(Malformed) }
    }
}

/// The reason why an answer ends after its last reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AnswerEnd {
    /// All entries were executed.
    Done,
    /// The remaining entries must be sent again.
    Again,
    /// The partition of the next entry is at this place, not on the server that answers.
    Moved(usize, Place),
    /// The next entry is invalid.
    Malformed,
    /// The time of the frame passed before the remaining entries were executed.
    Late,
    /// The server may not answer for the partition of the next entry at present, and has stopped
    /// waiting.
    Unavailable,
}

/// Encodes the part of an answer before the replies, with the clock of the server that answers.
/// `done` entries were executed. `lens` has the length of a reply for each entry of the frame.
pub fn answer_head(
    (number, clock_us): (u64, u64),
    done: usize,
    end: AnswerEnd,
    lens: &[u32],
    replies: usize,
) -> Vec<u8> {
    let mut head = Vec::with_capacity(ANSWER_HEAD_BYTES + lens.len() * REPLY_LEN_BYTES);
    let total = ANSWER_HEAD_BYTES - 4 + lens.len() * REPLY_LEN_BYTES + replies;
    let (kind, partition, place) = match end {
        AnswerEnd::Done => (END_DONE, 0, None),
        AnswerEnd::Again => (END_AGAIN, 0, None),
        AnswerEnd::Moved(partition, place) => (END_MOVED, partition, Some(place)),
        AnswerEnd::Malformed => (END_MALFORMED, 0, None),
        AnswerEnd::Late => (END_LATE, 0, None),
        AnswerEnd::Unavailable => (END_UNAVAILABLE, 0, None),
    };
    let Place { server, generation } = place.unwrap_or(Place { server: 0, generation: 0 });
    head.extend_from_slice(&u32::try_from(total).expect("below 2 GiB").to_le_bytes());
    head.extend_from_slice(&number.to_le_bytes());
    head.extend_from_slice(&clock_us.to_le_bytes());
    head.extend_from_slice(&u16::try_from(lens.len()).expect("few entries").to_le_bytes());
    head.extend_from_slice(&u16::try_from(done).expect("few entries").to_le_bytes());
    head.push(kind);
    head.extend_from_slice(&u32::try_from(partition).expect("at most 65,536").to_le_bytes());
    head.extend_from_slice(&server.to_le_bytes());
    head.extend_from_slice(&generation.to_le_bytes());
    for len in lens {
        head.extend_from_slice(&len.to_le_bytes());
    }
    head
}

/// An answer that was received.
#[derive(Clone, Debug)]
pub struct Answer<'a> {
    /// The number of the frame.
    pub number: u64,
    /// The clock of the server that has answered, in microseconds since the start of its machine.
    pub clock_us: u64,
    /// The replies to the executed entries.
    pub replies: Vec<&'a [u8]>,
    /// The reason why no more entries were executed.
    pub end: AnswerEnd,
}

impl<'a> Answer<'a> {
    /// Reads a complete answer.
    ///
    /// # Errors
    /// If the bytes violate the protocol.
    pub fn read(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut reader = Reader(bytes);
        reader.next(4)?;
        let (number, clock_us) = (reader.u64()?, reader.u64()?);
        let (count, done) = (usize::from(reader.u16()?), usize::from(reader.u16()?));
        let kind = reader.u8()?;
        let partition = reader.u32()? as usize;
        let place = Place { server: reader.u16()?, generation: reader.u64()? };
        let end = match kind {
            END_DONE if done == count => AnswerEnd::Done,
            END_AGAIN => AnswerEnd::Again,
            END_MOVED => AnswerEnd::Moved(partition, place),
            END_MALFORMED => AnswerEnd::Malformed,
            END_LATE => AnswerEnd::Late,
            END_UNAVAILABLE => AnswerEnd::Unavailable,
            _ => return Err(Malformed),
        };
        if done > count || count > ENTRIES_MAX {
            return Err(Malformed);
        }
        let mut lens = Reader(reader.next(count * REPLY_LEN_BYTES)?);
        let mut replies = Vec::with_capacity(done);
        for _ in 0..done {
            replies.push(reader.next(lens.u32()? as usize)?);
        }
        if reader.0.is_empty() { Ok(Self { number, clock_us, replies, end }) } else { Err(Malformed) }
    }
}

/// Reads fields from the start of bytes.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn next(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (field, rest) = self.0.split_at_checked(len).ok_or(Malformed)?;
        self.0 = rest;
        Ok(field)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        Ok(self.next(N)?.try_into().expect("as many bytes"))
    }

    fn u8(&mut self) -> Result<u8, Malformed> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_frame() {
        let tasks = [
            (1, Task::Request(Protocol::Text, b"get a\r\n")),
            (2, Task::Flush(9)),
            (3, Task::CancelFlush),
            (4, Task::Delete(b"k")),
        ];
        let mut bytes = Vec::new();
        push_frame(&mut bytes, 7, true, &tasks);
        set_serve_until(&mut bytes, 9);
        let mut expected = vec![67, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 1, 4, 0];
        for (kind, partition, len) in [(0, 1, 7), (2, 2, 4), (3, 3, 0), (4, 4, 1)] {
            expected.extend([kind, partition, 0, 0, 0, len, 0, 0, 0]);
        }
        expected.extend(b"get a\r\n\x09\x00\x00\x00k");
        assert_eq!(bytes, expected);
        assert_eq!(complete_len(&bytes), Ok(Some(bytes.len())));
        assert_eq!(complete_len(&bytes[..bytes.len() - 1]), Ok(None));
        let frame = Frame::read(&bytes).unwrap();
        assert_eq!((frame.number, frame.until_us, frame.waits, &frame.entries[..]), (7, 9, true, &tasks[..]));
        for len in 0..bytes.len() {
            assert!(Frame::read(&bytes[..len]).is_err());
        }
        // With these lengths the byte of the key belongs to the cancelled flush: neither is valid.
        (bytes[46], bytes[55]) = (1, 0);
        assert!(Frame::read(&bytes).is_err());
    }

    #[test]
    fn golden_answer() {
        let place = Place { server: 3, generation: 5 };
        let head = answer_head((7, 8), 1, AnswerEnd::Moved(9, place), &[4, 0], 4);
        let bytes = [&head[..], b"END\n"].concat();
        let mut expected = vec![47, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0];
        expected.extend([2, 0, 1, 0, 2, 9, 0, 0, 0, 3, 0]);
        expected.extend([5, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend(b"END\n");
        assert_eq!(bytes, expected);
        let answer = Answer::read(&bytes).unwrap();
        assert_eq!((answer.number, answer.clock_us, &answer.replies[..]), (7, 8, &[&b"END\n"[..]][..]));
        assert_eq!(answer.end, AnswerEnd::Moved(9, place));
        for len in 0..bytes.len() {
            assert!(Answer::read(&bytes[..len]).is_err());
        }
    }
}
