//! The ring of a session: memory that a program and its agent share. The program writes requests and the agent answers, in order; what they are about to
//! read or write lies in the data area behind.
//!
//! Both sides use this code over their own mapping ([`Words`]). Neither trusts the other: what is read here is parsed as hostile, and a counter that cannot be
//! right ends the session.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64, fence};

/// First word of a ring.
pub const MAGIC: u32 = 0x4151_5247;
/// Requests under way at once.
pub const SLOTS: u32 = 256;
/// Bytes of the data area.
pub const DATA_BYTES: u32 = 1 << 20;
/// Where it begins.
pub const DATA_AT: usize = 16 << 10;
/// Bytes of the whole ring.
pub const RING_BYTES: usize = DATA_AT + DATA_BYTES as usize;

const MAGIC_AT: usize = 0;
const VERSION_AT: usize = 4;
// What each side writes is in a cache line of its own.
const REQUESTED_AT: usize = 64;
const PROGRAM_SLEEPS_AT: usize = 68;
const ANSWERED_AT: usize = 128;
const AGENT_SLEEPS_AT: usize = 132;
const REQUESTS_AT: usize = 256;
const REQUEST_WORDS: usize = 4;
const ANSWERS_AT: usize = REQUESTS_AT + SLOTS as usize * REQUEST_WORDS * 8;
const ANSWER_WORDS: usize = 2;
const _: () = assert!(ANSWERS_AT + SLOTS as usize * ANSWER_WORDS * 8 <= DATA_AT);

/// Most sections of one [`Request::AllocateStretch`]: 64 GiB.
pub const STRETCH_SECTIONS_MAX: u32 = 1 << 15;

/// Shared memory of [`RING_BYTES`], as words.
pub trait Words {
    /// The 4-byte word at this offset, a multiple of 4.
    fn word_u32(&self, offset: usize) -> &AtomicU32;
    /// The 8-byte word at this offset, a multiple of 8.
    fn word_u64(&self, offset: usize) -> &AtomicU64;
}

/// An extent as programs know it: all that is needed to reach it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ExtentName {
    /// Whose memory it is: the node's number in the cluster.
    pub node: u16,
    /// It has 4 KiB · 2^class bytes.
    pub class: u8,
    /// Opens it to its tenant.
    pub key: u32,
    /// Its address in the node's region.
    pub addr: u64,
}

/// A part of an extent, and of the data area.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// From this byte of the extent on.
    pub offset: u32,
    /// So many bytes, at least 1.
    pub len: u32,
    /// From this byte of the data area on.
    pub data: u32,
}

/// What a program asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    /// An extent of 4 KiB · 2^class.
    Allocate(u8),
    /// So many extents of 2 MiB side by side that one key opens, 2 to [`STRETCH_SECTIONS_MAX`]. The answer names the first.
    AllocateStretch(u32),
    /// Give an extent back that this session was given.
    Free(ExtentName),
    /// Read into the data area.
    Read(ExtentName, Piece),
    /// Write from the data area, which must not change until the answer.
    Write(ExtentName, Piece),
}

/// How a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Status {
    /// As it should.
    Done = 0,
    /// No memory node has room.
    Full = 1,
    /// The user has as much as it may have.
    Quota = 2,
    /// The key does not open it, or the session was not given it.
    Refused = 3,
    /// The memory node is gone, or what was on it.
    NodeGone = 4,
    /// The session holds as many extents as it may.
    TooMany = 5,
    /// The request has an impossible field.
    BadRequest = 6,
    /// The agent could not, for another reason, which is in its log.
    Failed = 7,
}

impl Status {
    const ALL: [Self; 8] = [
        Self::Done,
        Self::Full,
        Self::Quota,
        Self::Refused,
        Self::NodeGone,
        Self::TooMany,
        Self::BadRequest,
        Self::Failed,
    ];
}

/// The answer to a request; the extent is that of [`Request::Allocate`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Answer {
    /// How it ended.
    pub status: Status,
    /// What was given, else zeros.
    pub extent: ExtentName,
}

impl Answer {
    /// Without an extent.
    #[must_use]
    pub const fn of(status: Status) -> Self {
        Self { status, extent: ExtentName { node: 0, class: 0, key: 0, addr: 0 } }
    }
}

/// The other side broke the ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Broken;

impl std::fmt::Display for Broken {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "the ring's memory was damaged by the other side")
    }
}

impl std::error::Error for Broken {}

const ALLOCATE: u8 = 1;
const FREE: u8 = 2;
const READ: u8 = 3;
const WRITE: u8 = 4;
const ALLOCATE_STRETCH: u8 = 5;

fn name_word(kind: u8, name: &ExtentName) -> u64 {
    u64::from(kind) | u64::from(name.class) << 8 | u64::from(name.node) << 16 | u64::from(name.key) << 32
}

#[expect(clippy::cast_possible_truncation, reason = "each field is its bits of the word")]
fn parse_name(word: u64, addr: u64) -> ExtentName {
    ExtentName { node: (word >> 16) as u16, class: (word >> 8) as u8, key: (word >> 32) as u32, addr }
}

impl Request {
    fn words(&self) -> [u64; REQUEST_WORDS] {
        let moving = |kind, name: &ExtentName, piece: &Piece| {
            let place = u64::from(piece.offset) | u64::from(piece.len) << 32;
            [name_word(kind, name), name.addr, place, u64::from(piece.data)]
        };
        match self {
            Self::Allocate(class) => [u64::from(ALLOCATE) | u64::from(*class) << 8, 0, 0, 0],
            Self::AllocateStretch(sections) => {
                [u64::from(ALLOCATE_STRETCH) | u64::from(*sections) << 32, 0, 0, 0]
            }
            Self::Free(name) => [name_word(FREE, name), name.addr, 0, 0],
            Self::Read(name, piece) => moving(READ, name, piece),
            Self::Write(name, piece) => moving(WRITE, name, piece),
        }
    }

    /// Parse a request; `None` if a field is impossible. Whether the extent is one, and the piece inside it, others must judge.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "each field is its bits of the word")]
    pub fn parse(words: [u64; REQUEST_WORDS]) -> Option<Self> {
        let [first, addr, place, data] = words;
        let name = parse_name(first, addr);
        let piece = || {
            let piece = Piece { offset: place as u32, len: (place >> 32) as u32, data: data as u32 };
            let end = u64::from(piece.data) + u64::from(piece.len);
            let is_inside = data >> 32 == 0 && piece.len > 0 && end <= u64::from(DATA_BYTES);
            is_inside.then_some(piece)
        };
        match first as u8 {
            ALLOCATE if first >> 16 == 0 && [addr, place, data] == [0; 3] => Some(Self::Allocate(name.class)),
            ALLOCATE_STRETCH if first as u32 >> 8 == 0 && [addr, place, data] == [0; 3] => {
                (2..=STRETCH_SECTIONS_MAX).contains(&name.key).then_some(Self::AllocateStretch(name.key))
            }
            FREE if [place, data] == [0; 2] => Some(Self::Free(name)),
            READ => Some(Self::Read(name, piece()?)),
            WRITE => Some(Self::Write(name, piece()?)),
            _ => None,
        }
    }
}

impl Answer {
    fn words(&self) -> [u64; ANSWER_WORDS] {
        [name_word(self.status as u8, &self.extent), self.extent.addr]
    }

    #[expect(clippy::cast_possible_truncation, reason = "the status is the lowest byte")]
    fn parse([first, addr]: [u64; ANSWER_WORDS]) -> Result<Self, Broken> {
        let status = *Status::ALL.get(usize::from(first as u8)).ok_or(Broken)?;
        Ok(Self { status, extent: parse_name(first, addr) })
    }
}

/// A ring in shared memory. Counters run on for ever, and wrap; request `n` is in slot `n` modulo [`SLOTS`].
#[derive(Debug)]
pub struct Ring<W>(W);

impl<W: Words> Ring<W> {
    /// A ring in fresh memory, all zeros: for the agent.
    pub fn initialise(words: W) -> Self {
        words.word_u32(VERSION_AT).store(u32::from(crate::VERSION), Relaxed);
        words.word_u32(MAGIC_AT).store(MAGIC, Release);
        Self(words)
    }

    /// The ring that somebody else has made.
    ///
    /// # Errors
    /// If it is none of this version.
    pub fn open(words: W) -> Result<Self, Broken> {
        let is_ours = words.word_u32(MAGIC_AT).load(Acquire) == MAGIC
            && words.word_u32(VERSION_AT).load(Relaxed) == u32::from(crate::VERSION);
        if is_ours { Ok(Self(words)) } else { Err(Broken) }
    }

    /// The memory.
    pub fn words(&self) -> &W {
        &self.0
    }

    /// How many requests were answered.
    pub fn answered(&self) -> u32 {
        self.0.word_u32(ANSWERED_AT).load(Acquire)
    }

    /// How many were made, of which so many were taken or answered.
    ///
    /// # Errors
    /// If more are under way than there are slots.
    pub fn requested(&self, taken: u32) -> Result<u32, Broken> {
        let requested = self.0.word_u32(REQUESTED_AT).load(Acquire);
        if requested.wrapping_sub(taken) <= SLOTS { Ok(requested) } else { Err(Broken) }
    }

    /// Program: write request `number`, not yet to be seen.
    pub fn put_request(&self, number: u32, request: &Request) {
        self.put(REQUESTS_AT, number, &request.words());
    }

    /// Agent: read request `number`, once: it may change under the reader. `None` if it is impossible.
    pub fn request(&self, number: u32) -> Option<Request> {
        Request::parse(self.get(REQUESTS_AT, number))
    }

    /// Agent: write the answer to request `number`, not yet to be seen.
    pub fn put_answer(&self, number: u32, answer: &Answer) {
        self.put(ANSWERS_AT, number, &answer.words());
    }

    /// Program: read the answer to request `number`.
    ///
    /// # Errors
    /// If it is none.
    pub fn answer(&self, number: u32) -> Result<Answer, Broken> {
        Answer::parse(self.get(ANSWERS_AT, number))
    }

    /// Program: requests up to `number`, which is not one of them, are there to be seen. Returns whether the agent must be woken.
    pub fn publish_requests(&self, number: u32) -> bool {
        self.publish(REQUESTED_AT, AGENT_SLEEPS_AT, number)
    }

    /// Agent: the same for answers.
    pub fn publish_answers(&self, number: u32) -> bool {
        self.publish(ANSWERED_AT, PROGRAM_SLEEPS_AT, number)
    }

    /// Program: it will sleep until there are more answers than `seen`; false if there are already.
    pub fn program_may_sleep(&self, seen: u32) -> bool {
        self.may_sleep(PROGRAM_SLEEPS_AT, ANSWERED_AT, seen)
    }

    /// Agent: it will sleep until there are more requests than `seen`; false if there are already.
    pub fn agent_may_sleep(&self, seen: u32) -> bool {
        self.may_sleep(AGENT_SLEEPS_AT, REQUESTED_AT, seen)
    }

    /// Either the sleeper sees what is published, or who publishes sees that he sleeps: both write, then look.
    fn publish(&self, counter_at: usize, sleeper_at: usize, number: u32) -> bool {
        self.0.word_u32(counter_at).store(number, Release);
        fence(SeqCst);
        let sleeps = self.0.word_u32(sleeper_at);
        // Whoever wakes him does so once.
        sleeps.load(Relaxed) != 0 && sleeps.swap(0, Relaxed) != 0
    }

    fn may_sleep(&self, sleeper_at: usize, counter_at: usize, seen: u32) -> bool {
        let sleeps = self.0.word_u32(sleeper_at);
        sleeps.store(1, Relaxed);
        fence(SeqCst);
        let may = self.0.word_u32(counter_at).load(Acquire) == seen;
        if !may {
            sleeps.store(0, Relaxed);
        }
        may
    }

    fn put<const N: usize>(&self, base: usize, number: u32, words: &[u64; N]) {
        for (at, word) in slot(base, number, N).zip(words) {
            self.0.word_u64(at).store(*word, Relaxed);
        }
    }

    fn get<const N: usize>(&self, base: usize, number: u32) -> [u64; N] {
        let mut words = [0; N];
        for (at, word) in slot(base, number, N).zip(&mut words) {
            *word = self.0.word_u64(at).load(Relaxed);
        }
        words
    }
}

fn slot(base: usize, number: u32, words: usize) -> impl Iterator<Item = usize> {
    let first = base + (number % SLOTS) as usize * words * 8;
    (first..).step_by(8)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A ring's words without its data area.
    struct Heap(Vec<AtomicU64>);

    impl Words for Heap {
        fn word_u32(&self, offset: usize) -> &AtomicU32 {
            // SAFETY: half of a word that lives as long as `self`; only atomics touch it.
            unsafe { AtomicU32::from_ptr(self.0[offset / 8].as_ptr().cast::<u32>().add(offset % 8 / 4)) }
        }

        fn word_u64(&self, offset: usize) -> &AtomicU64 {
            &self.0[offset / 8]
        }
    }

    fn ring() -> Ring<Heap> {
        Ring::initialise(Heap((0..DATA_AT / 8).map(|_| AtomicU64::new(0)).collect()))
    }

    prop_compose! {
        fn name()(node: u16, class: u8, key: u32, addr: u64) -> ExtentName {
            ExtentName { node, class, key, addr }
        }
    }

    prop_compose! {
        fn piece()(offset: u32, data in 0..DATA_BYTES, part: u32) -> Piece {
            Piece { offset, len: 1 + part % (DATA_BYTES - data), data }
        }
    }

    fn any_request() -> impl Strategy<Value = Request> {
        prop_oneof![
            any::<u8>().prop_map(Request::Allocate),
            (2..=STRETCH_SECTIONS_MAX).prop_map(Request::AllocateStretch),
            name().prop_map(Request::Free),
            (name(), piece()).prop_map(|(name, piece)| Request::Read(name, piece)),
            (name(), piece()).prop_map(|(name, piece)| Request::Write(name, piece)),
        ]
    }

    proptest! {
        #[test]
        fn requests_and_answers_arrive_as_they_were(number: u32, request in any_request(), name in name(), status in 0..8usize) {
            let ring = ring();
            ring.put_request(number, &request);
            prop_assert_eq!(ring.request(number), Some(request));
            let answer = Answer { status: Status::ALL[status], extent: name };
            ring.put_answer(number, &answer);
            prop_assert_eq!(ring.answer(number), Ok(answer));
        }

        #[test]
        fn what_is_parsed_stays_inside_the_data_area(words: [u64; 4], kind in 0..7u64) {
            let words = [words[0] & !0xff | kind, words[1], words[2], words[3] % (2 << 20)];
            match Request::parse(words) {
                Some(Request::Read(_, piece) | Request::Write(_, piece)) => {
                    prop_assert!(piece.len > 0 && u64::from(piece.data) + u64::from(piece.len) <= u64::from(DATA_BYTES));
                }
                Some(request) => prop_assert_eq!(request.words(), words),
                None => {}
            }
        }
    }

    #[test]
    fn a_counter_that_cannot_be_right_breaks_the_ring() {
        let ring = ring();
        for (requested, taken) in [(257, 0), (0, 1), (5, 6), (100, u32::MAX - 200)] {
            ring.0.word_u32(REQUESTED_AT).store(requested, Relaxed);
            assert_eq!(ring.requested(taken), Err(Broken), "{requested} of which {taken}");
        }
        for (requested, taken) in [(256, 0), (0, 0), (100, u32::MAX - 100)] {
            ring.0.word_u32(REQUESTED_AT).store(requested, Relaxed);
            assert_eq!(ring.requested(taken), Ok(requested));
        }
        ring.put(ANSWERS_AT, 0, &[8, 0]);
        assert_eq!(ring.answer(0), Err(Broken), "no such status");
    }

    #[test]
    fn who_sleeps_is_woken_once() {
        let ring = ring();
        assert!(!ring.publish_requests(1), "nobody sleeps");
        assert!(!ring.agent_may_sleep(0), "there is something");
        assert!(ring.agent_may_sleep(1));
        assert!(ring.publish_requests(2));
        assert!(!ring.publish_requests(3));
        assert!(ring.program_may_sleep(0));
        assert!(ring.publish_answers(1));
    }

    #[test]
    fn only_a_ring_of_this_version_is_one() {
        let ring = ring();
        ring.0.word_u32(VERSION_AT).store(1, Relaxed);
        assert!(Ring::open(ring.0).is_err());
        assert!(Ring::open(Heap((0..DATA_AT / 8).map(|_| AtomicU64::new(0)).collect())).is_err());
    }
}
