//! The ring of a session: memory through which a program requests extents, and reads and writes
//! them.
//!
//! The program writes requests, and the agent answers them in order. Data to read or write is in
//! the data area behind the slots. The layout is in `docs/formats/ipc.md`.
//!
//! Both sides use this code over their own mapping ([`RingWords`]).
//! Neither side trusts the other: all input is parsed as hostile, and an impossible counter ends
//! the session.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64, fence};

use crate::mutation::Mutation;

/// Version of the layout of a ring.
pub const RING_VERSION: u16 = 21;
/// First word of a ring.
pub const MAGIC: u32 = 0x4151_5247;
/// Maximum number of requests in flight.
pub const SLOTS: u32 = 256;
/// Size of the data area.
pub const DATA_BYTES: u32 = 1 << 20;
/// Offset of the data area.
pub const DATA_AT: usize = 16 << 10;
/// Size of the ring, data area included.
pub const RING_BYTES: usize = DATA_AT + DATA_BYTES as usize;

const MAGIC_AT: usize = 0;
const VERSION_AT: usize = 4;
// Words that different sides write are in different cache lines.
const REQUESTED_AT: usize = 64;
const PROGRAM_SLEEPS_AT: usize = 68;
const ANSWERED_AT: usize = 128;
const AGENT_SLEEPS_AT: usize = 132;
const REQUESTS_AT: usize = 256;
const REQUEST_WORDS: usize = 4;
const ANSWERS_AT: usize = REQUESTS_AT + SLOTS as usize * REQUEST_WORDS * 8;
const ANSWER_WORDS: usize = 2;
const _: () = assert!(ANSWERS_AT + SLOTS as usize * ANSWER_WORDS * 8 <= DATA_AT);

/// Maximum number of sections in a stretch: 64 GiB.
pub const STRETCH_SECTIONS_MAX: u32 = 1 << 15;

/// Shared memory of [`RING_BYTES`], accessed as atomic words.
pub trait RingWords {
    /// The 4-byte word at an offset, which must be a multiple of 4.
    fn word_u32(&self, offset: usize) -> &AtomicU32;
    /// The 8-byte word at an offset, which must be a multiple of 8.
    fn word_u64(&self, offset: usize) -> &AtomicU64;
}

/// The name of an extent for programs: the fields that an access needs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ExtentName {
    /// Number of the memory node.
    pub node: u16,
    /// Size class: the extent has 4 KiB · 2^class bytes.
    pub class: u8,
    /// Key that opens the extent to its tenant.
    pub key: u32,
    /// Address in the node's region.
    pub addr: u64,
}

/// A range of an extent, and the range of the data area that it is copied from or to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TransferRange {
    /// First byte in the extent.
    pub offset: u32,
    /// Number of bytes, at least 1.
    pub len: u32,
    /// First byte in the data area.
    pub data: u32,
}

/// A request of a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RingRequest {
    /// Allocates an extent of this size class.
    Allocate(u8),
    /// Allocates this number of neighbouring sections under one key, 2 to
    /// [`STRETCH_SECTIONS_MAX`]. The answer names the first.
    AllocateStretch(u32),
    /// Frees an extent that this session allocated.
    Free(ExtentName),
    /// Reads into the data area.
    Read(ExtentName, TransferRange),
    /// Writes from the data area, which must not change until the answer.
    Write(ExtentName, TransferRange),
}

/// Result of a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum RingStatus {
    /// The request succeeded.
    Done = 0,
    /// No memory node has room.
    Full = 1,
    /// The user's quota is used up.
    Quota = 2,
    /// The key does not open the extent, or the session did not allocate it.
    Refused = 3,
    /// The memory node is gone, or was gone and may have lost the extent.
    NodeGone = 4,
    /// The session has the maximum number of extents.
    TooMany = 5,
    /// A field of the request has an invalid value.
    BadRequest = 6,
    /// The agent failed; its log has the reason.
    Failed = 7,
    /// The key was not tried, because the session or its user has tried too many wrong keys.
    ///
    /// In the ring it is [`Self::Refused`] with a cause, which earlier programs ignore.
    KeyNotTried = 8,
}

impl RingStatus {
    /// The values of an answer's first byte.
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

/// The answer to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingAnswer {
    /// Result of the request.
    pub status: RingStatus,
    /// The allocated extent; zeros for other requests and after a failure.
    pub extent: ExtentName,
}

impl RingAnswer {
    /// An answer without an extent.
    #[must_use]
    pub const fn without_extent(status: RingStatus) -> Self {
        Self { status, extent: ExtentName { node: 0, class: 0, key: 0, addr: 0 } }
    }
}

/// The other side wrote impossible values into the ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CorruptRing;

impl std::fmt::Display for CorruptRing {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "the other side wrote invalid values into the session's ring")
    }
}

impl std::error::Error for CorruptRing {}

const ALLOCATE: u8 = 1;
const FREE: u8 = 2;
const READ: u8 = 3;
const WRITE: u8 = 4;
const ALLOCATE_STRETCH: u8 = 5;

/// Cause of [`RingStatus::Refused`] in an answer, instead of a size class, if the key was not
/// tried. Otherwise the cause is 0.
const CAUSE_NOT_TRIED: u8 = 1;
/// An answer whose key was not tried.
const NOT_TRIED_WORDS: [u64; ANSWER_WORDS] = [RingStatus::Refused as u64 | (CAUSE_NOT_TRIED as u64) << 8, 0];

fn name_word(kind: u8, name: &ExtentName) -> u64 {
    u64::from(kind) | u64::from(name.class) << 8 | u64::from(name.node) << 16 | u64::from(name.key) << 32
}

#[expect(clippy::cast_possible_truncation, reason = "each field is its bits of the word")]
fn parse_name(word: u64, addr: u64) -> ExtentName {
    ExtentName { node: (word >> 16) as u16, class: (word >> 8) as u8, key: (word >> 32) as u32, addr }
}

impl RingRequest {
    fn words(&self) -> [u64; REQUEST_WORDS] {
        let transfer = |kind, name: &ExtentName, range: &TransferRange| {
            let offset_and_len = u64::from(range.offset) | u64::from(range.len) << 32;
            [name_word(kind, name), name.addr, offset_and_len, u64::from(range.data)]
        };
        match self {
            Self::Allocate(class) => [u64::from(ALLOCATE) | u64::from(*class) << 8, 0, 0, 0],
            Self::AllocateStretch(sections) => {
                [u64::from(ALLOCATE_STRETCH) | u64::from(*sections) << 32, 0, 0, 0]
            }
            Self::Free(name) => [name_word(FREE, name), name.addr, 0, 0],
            Self::Read(name, range) => transfer(READ, name, range),
            Self::Write(name, range) => transfer(WRITE, name, range),
        }
    }

    /// Parses a request; `None` if a field has an invalid value.
    ///
    /// Does not check that the extent exists or that the range is inside it.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "each field is its bits of the word")]
    pub fn parse(words: [u64; REQUEST_WORDS]) -> Option<Self> {
        let [first, addr, offset_and_len, data] = words;
        let name = parse_name(first, addr);
        let range = || {
            let (offset, len) = (offset_and_len as u32, (offset_and_len >> 32) as u32);
            let range = TransferRange { offset, len, data: data as u32 };
            let end = u64::from(range.data) + u64::from(range.len);
            let ends_inside = end <= u64::from(DATA_BYTES) || Mutation::IgnoreDataEnd.is_active();
            let is_inside = data >> 32 == 0 && range.len > 0 && ends_inside;
            is_inside.then_some(range)
        };
        let has_only_first = [addr, offset_and_len, data] == [0; 3];
        match first as u8 {
            ALLOCATE if first >> 16 == 0 && has_only_first => Some(Self::Allocate(name.class)),
            ALLOCATE_STRETCH if first as u32 >> 8 == 0 && has_only_first => {
                (2..=STRETCH_SECTIONS_MAX).contains(&name.key).then_some(Self::AllocateStretch(name.key))
            }
            FREE if [offset_and_len, data] == [0; 2] => Some(Self::Free(name)),
            READ => Some(Self::Read(name, range()?)),
            WRITE => Some(Self::Write(name, range()?)),
            _ => None,
        }
    }
}

impl RingAnswer {
    fn words(&self) -> [u64; ANSWER_WORDS] {
        match self.status {
            RingStatus::KeyNotTried => NOT_TRIED_WORDS,
            status => [name_word(status as u8, &self.extent), self.extent.addr],
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "the status is the lowest byte")]
    fn parse(words: [u64; ANSWER_WORDS]) -> Result<Self, CorruptRing> {
        if words == NOT_TRIED_WORDS {
            return Ok(Self::without_extent(RingStatus::KeyNotTried));
        }
        let [first, addr] = words;
        let status = *RingStatus::ALL.get(usize::from(first as u8)).ok_or(CorruptRing)?;
        Ok(Self { status, extent: parse_name(first, addr) })
    }
}

/// A ring in shared memory. Counters wrap; request `n` is in slot `n` modulo [`SLOTS`].
#[derive(Debug)]
pub struct SessionRing<W>(W);

impl<W: RingWords> SessionRing<W> {
    /// Initialises a ring in zeroed memory. For the agent.
    pub fn initialise(words: W) -> Self {
        words.word_u32(VERSION_AT).store(u32::from(RING_VERSION), Relaxed);
        words.word_u32(MAGIC_AT).store(MAGIC, Release);
        Self(words)
    }

    /// Opens a ring that the agent has initialised. For the program.
    ///
    /// # Errors
    /// If magic or version differ.
    pub fn open(words: W) -> Result<Self, CorruptRing> {
        let is_ours = words.word_u32(MAGIC_AT).load(Acquire) == MAGIC
            && words.word_u32(VERSION_AT).load(Relaxed) == u32::from(RING_VERSION);
        if is_ours { Ok(Self(words)) } else { Err(CorruptRing) }
    }

    /// The memory of the ring.
    pub fn words(&self) -> &W {
        &self.0
    }

    /// Number of answered requests.
    pub fn answered(&self) -> u32 {
        self.0.word_u32(ANSWERED_AT).load(Acquire)
    }

    /// Number of published requests, of which the first `answered` are answered.
    ///
    /// # Errors
    /// If more requests are in flight than there are slots.
    pub fn requested(&self, answered: u32) -> Result<u32, CorruptRing> {
        let requested = self.0.word_u32(REQUESTED_AT).load(Acquire);
        if requested.wrapping_sub(answered) <= SLOTS { Ok(requested) } else { Err(CorruptRing) }
    }

    /// Program: writes request `number` without publishing it.
    pub fn put_request(&self, number: u32, request: &RingRequest) {
        self.put(REQUESTS_AT, number, &request.words());
    }

    /// Agent: reads request `number`; `None` if it is invalid.
    ///
    /// Must be called once for each request, because the program can change the slot at any time.
    pub fn request(&self, number: u32) -> Option<RingRequest> {
        RingRequest::parse(self.get(REQUESTS_AT, number))
    }

    /// Agent: writes the answer to request `number` without publishing it.
    pub fn put_answer(&self, number: u32, answer: &RingAnswer) {
        self.put(ANSWERS_AT, number, &answer.words());
    }

    /// Program: reads the answer to request `number`.
    ///
    /// # Errors
    /// If the status is unknown.
    pub fn answer(&self, number: u32) -> Result<RingAnswer, CorruptRing> {
        RingAnswer::parse(self.get(ANSWERS_AT, number))
    }

    /// Program: publishes all requests below `number`. Returns whether the agent must be woken.
    pub fn publish_requests(&self, number: u32) -> bool {
        self.publish(REQUESTED_AT, AGENT_SLEEPS_AT, number)
    }

    /// Agent: publishes the answers to all requests below `number`. Returns whether the program
    /// must be woken.
    pub fn publish_answers(&self, number: u32) -> bool {
        self.publish(ANSWERED_AT, PROGRAM_SLEEPS_AT, number)
    }

    /// Program: announces that it sleeps until more than `seen` requests are answered. Returns
    /// false if it must not sleep, because they already are.
    pub fn begin_program_sleep(&self, seen: u32) -> bool {
        self.begin_sleep(PROGRAM_SLEEPS_AT, ANSWERED_AT, seen)
    }

    /// Agent: announces that it sleeps until more than `seen` requests are published. Returns false
    /// if it must not sleep, because they already are.
    pub fn begin_agent_sleep(&self, seen: u32) -> bool {
        self.begin_sleep(AGENT_SLEEPS_AT, REQUESTED_AT, seen)
    }

    /// Stores the counter, then reads the sleep flag.
    ///
    /// [`Self::begin_sleep`] stores the flag, then reads the counter. The fences order each pair,
    /// so at least one side sees the other's store and no wakeup is lost.
    fn publish(&self, counter_at: usize, sleep_flag_at: usize, number: u32) -> bool {
        self.0.word_u32(counter_at).store(number, Release);
        fence(SeqCst);
        let sleep_flag = self.0.word_u32(sleep_flag_at);
        // The swap makes sure that one sleep causes one wakeup.
        sleep_flag.load(Relaxed) != 0 && sleep_flag.swap(0, Relaxed) != 0
    }

    fn begin_sleep(&self, sleep_flag_at: usize, counter_at: usize, seen: u32) -> bool {
        let sleep_flag = self.0.word_u32(sleep_flag_at);
        sleep_flag.store(1, Relaxed);
        fence(SeqCst);
        let may_sleep = self.0.word_u32(counter_at).load(Acquire) == seen;
        if !may_sleep {
            sleep_flag.store(0, Relaxed);
        }
        may_sleep
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
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The words of a ring on the heap, without the data area.
    pub(crate) struct HeapWords(Vec<AtomicU64>);

    impl HeapWords {
        /// Zeroed memory.
        pub(crate) fn new() -> Self {
            Self((0..DATA_AT / 8).map(|_| AtomicU64::new(0)).collect())
        }

        /// A copy of the memory.
        pub(crate) fn to_bytes(&self) -> Vec<u8> {
            self.0.iter().flat_map(|word| word.load(Relaxed).to_le_bytes()).collect()
        }
    }

    impl RingWords for HeapWords {
        fn word_u32(&self, offset: usize) -> &AtomicU32 {
            // SAFETY: half of an aligned word that lives as long as `self`, and is only
            // accessed atomically.
            unsafe { AtomicU32::from_ptr(self.0[offset / 8].as_ptr().cast::<u32>().add(offset % 8 / 4)) }
        }

        fn word_u64(&self, offset: usize) -> &AtomicU64 {
            &self.0[offset / 8]
        }
    }

    fn ring() -> SessionRing<HeapWords> {
        SessionRing::initialise(HeapWords::new())
    }

    prop_compose! {
        fn name()(node: u16, class: u8, key: u32, addr: u64) -> ExtentName {
            ExtentName { node, class, key, addr }
        }
    }

    prop_compose! {
        fn range()(offset: u32, data in 0..DATA_BYTES, part: u32) -> TransferRange {
            TransferRange { offset, len: 1 + part % (DATA_BYTES - data), data }
        }
    }

    fn any_request() -> impl Strategy<Value = RingRequest> {
        prop_oneof![
            any::<u8>().prop_map(RingRequest::Allocate),
            (2..=STRETCH_SECTIONS_MAX).prop_map(RingRequest::AllocateStretch),
            name().prop_map(RingRequest::Free),
            (name(), range()).prop_map(|(name, range)| RingRequest::Read(name, range)),
            (name(), range()).prop_map(|(name, range)| RingRequest::Write(name, range)),
        ]
    }

    proptest! {
        #[test]
        fn requests_and_answers_are_read_as_written(
            number: u32,
            request in any_request(),
            name in name(),
            status in 0..=RingStatus::ALL.len(),
        ) {
            let ring = ring();
            ring.put_request(number, &request);
            prop_assert_eq!(ring.request(number), Some(request));
            let status = RingStatus::ALL.get(status).copied().unwrap_or(RingStatus::KeyNotTried);
            let answer = match status {
                RingStatus::Done => RingAnswer { status, extent: name },
                status => RingAnswer::without_extent(status),
            };
            ring.put_answer(number, &answer);
            prop_assert_eq!(ring.answer(number), Ok(answer));
        }

        #[test]
        fn parsed_ranges_are_inside_the_data_area(words: [u64; 4], kind in 0..7u64) {
            let words = [words[0] & !0xff | kind, words[1], words[2], words[3] % (2 << 20)];
            match RingRequest::parse(words) {
                Some(RingRequest::Read(_, range) | RingRequest::Write(_, range)) => {
                    let end = u64::from(range.data) + u64::from(range.len);
                    prop_assert!(range.len > 0 && end <= u64::from(DATA_BYTES));
                }
                Some(request) => prop_assert_eq!(request.words(), words),
                None => {}
            }
        }
    }

    #[test]
    fn an_impossible_counter_or_status_is_an_error() {
        let ring = ring();
        for (requested, answered) in [(257, 0), (0, 1), (5, 6), (100, u32::MAX - 200)] {
            ring.0.word_u32(REQUESTED_AT).store(requested, Relaxed);
            assert_eq!(
                ring.requested(answered),
                Err(CorruptRing),
                "{requested} requested, {answered} answered"
            );
        }
        for (requested, answered) in [(256, 0), (0, 0), (100, u32::MAX - 100)] {
            ring.0.word_u32(REQUESTED_AT).store(requested, Relaxed);
            assert_eq!(ring.requested(answered), Ok(requested));
        }
        ring.put(ANSWERS_AT, 0, &[8, 0]);
        assert_eq!(ring.answer(0), Err(CorruptRing), "the status is unknown");
    }

    #[test]
    fn a_sleeping_side_is_woken_once() {
        let ring = ring();
        assert!(!ring.publish_requests(1), "the agent does not sleep");
        assert!(!ring.begin_agent_sleep(0), "a request is published");
        assert!(ring.begin_agent_sleep(1));
        assert!(ring.publish_requests(2));
        assert!(!ring.publish_requests(3));
        assert!(ring.begin_program_sleep(0));
        assert!(ring.publish_answers(1));
    }

    #[test]
    fn a_ring_of_another_version_is_not_opened() {
        let ring = ring();
        ring.0.word_u32(VERSION_AT).store(1, Relaxed);
        assert!(SessionRing::open(ring.0).is_err());
        assert!(SessionRing::open(HeapWords::new()).is_err());
    }
}
