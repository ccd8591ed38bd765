//! The words of slots under a scheduler that switches threads at every access: writers, a merge
//! that moves the object, a new object in the slot that it leaves, and readers.
//!
//! Each valid read must be one version of the object, and no older than what another read or write
//! has returned before it began.

use std::panic::catch_unwind;

use aquifer_mutation::Mutations as _;
use aquifer_objects::Mutation;
use aquifer_objects::header::{Header, Lock, ObjectNumber};
use aquifer_objects::slot::{self, ReadVerdict, Words, verdict};
use shuttle::sync::Arc;
use shuttle::sync::atomic::{AtomicU64, Ordering::SeqCst, fence};
use shuttle::thread;

const SCHEDULES: usize = 10_000;
const PAYLOAD_WORDS: usize = 3;
const PAYLOAD: u64 = PAYLOAD_WORDS as u64;
const SLOT: u64 = PAYLOAD + 1;
/// The word with the slot of the object: the block's name.
const NAME: u64 = 0;
const SLOTS: u64 = 1;
const WRITES: u64 = 2;
const READS: usize = 3;

/// The memory of a heap with two slots, and its name.
#[derive(Clone)]
struct SharedWords {
    words: Arc<Vec<AtomicU64>>,
    /// The latest version that a read or a write has returned.
    latest: Arc<AtomicU64>,
}

impl Words for SharedWords {
    fn load(&mut self, at: u64) -> u64 {
        self.words[usize::try_from(at).expect("small")].load(SeqCst)
    }

    fn store(&mut self, at: u64, word: u64) {
        self.words[usize::try_from(at).expect("small")].store(word, SeqCst);
    }

    fn compare_swap(&mut self, at: u64, old: u64, new: u64) -> bool {
        let word = &self.words[usize::try_from(at).expect("small")];
        word.compare_exchange(old, new, SeqCst, SeqCst).is_ok()
    }
}

fn number() -> ObjectNumber {
    ObjectNumber::new(7).expect("not 0")
}

fn other() -> ObjectNumber {
    ObjectNumber::new(8).expect("not 0")
}

fn place(slot: u64) -> u64 {
    SLOTS + slot * SLOT
}

impl SharedWords {
    fn new() -> Self {
        let words = (0..SLOTS + 2 * SLOT).map(|_| AtomicU64::new(0)).collect();
        let mut shared = Self { words: Arc::new(words), latest: Arc::new(AtomicU64::new(0)) };
        slot::create(&mut shared, place(0), number(), &[1; PAYLOAD_WORDS]);
        shared
    }

    /// Writes versions, each larger than the one before: the lock orders the writers.
    fn write_some(&mut self) {
        for _ in 0..WRITES {
            // The name may be out of date: then the object is elsewhere.
            let at = place(self.load(NAME));
            if let Ok(header) = slot::lock(self, at, number(), Lock::Writing) {
                let next = self.load(at + 1) + 1;
                slot::write(self, at, header, 0, &[next; PAYLOAD_WORDS]);
                self.latest.fetch_max(next, SeqCst);
            }
        }
    }

    /// Moves the object to the other slot, and allocates another object in its first one.
    fn merge(&mut self) {
        while slot::lock(self, place(0), number(), Lock::Moving).is_err() {
            thread::yield_now();
        }
        slot::copy(self, place(0), place(1), SLOT);
        self.store(NAME, 1);
        slot::free(self, place(0));
        slot::create(self, place(0), other(), &[u64::MAX; PAYLOAD_WORDS]);
    }

    /// Frees the object, and allocates another one in its slot.
    fn free(&mut self) {
        while slot::lock(self, place(0), number(), Lock::Writing).is_err() {
            thread::yield_now();
        }
        slot::free(self, place(0));
        slot::create(self, place(0), other(), &[u64::MAX; PAYLOAD_WORDS]);
    }

    fn header(&mut self, at: u64) -> Header {
        Header::from_word(self.load(at))
    }

    fn payload(&mut self, at: u64) -> Vec<u64> {
        (1..SLOT).map(|word| self.load(at + word)).collect()
    }

    /// Reads as in shared memory: translates once, and checks the translation at the end.
    fn read_some(&mut self) {
        for _ in 0..READS {
            let known = self.latest.load(SeqCst);
            let name = self.load(NAME);
            let (before, bytes) = (self.header(place(name)), self.payload(place(name)));
            fence(SeqCst);
            let after = self.header(place(name));
            let is_there = self.load(NAME) == name;
            if verdict(number(), before, after) == ReadVerdict::Valid && is_there {
                self.check(&bytes, known);
            }
        }
    }

    /// Reads as over a network: the target translates for each of the three operations.
    fn read_remotely(&mut self) {
        for _ in 0..READS {
            let known = self.latest.load(SeqCst);
            let at = place(self.load(NAME));
            let before = self.header(at);
            let at = place(self.load(NAME));
            let bytes = self.payload(at);
            let at = place(self.load(NAME));
            let after = self.header(at);
            if verdict(number(), before, after) == ReadVerdict::Valid {
                self.check(&bytes, known);
            }
        }
    }

    fn check(&self, bytes: &[u64], known: u64) {
        assert!(bytes.iter().all(|word| *word == bytes[0]), "torn: {bytes:?}");
        assert!(bytes[0] >= known && bytes[0] != u64::MAX, "{} after {known}", bytes[0]);
        self.latest.fetch_max(bytes[0], SeqCst);
    }
}

fn play() {
    play_with(SharedWords::merge);
    play_with(SharedWords::free);
}

fn play_with(change: fn(&mut SharedWords)) {
    let shared = SharedWords::new();
    let work: [fn(&mut SharedWords); 5] = [
        SharedWords::write_some,
        SharedWords::write_some,
        change,
        SharedWords::read_some,
        SharedWords::read_remotely,
    ];
    let threads = work.map(|work| {
        let mut shared = shared.clone();
        thread::spawn(move || work(&mut shared))
    });
    threads.into_iter().for_each(|thread| thread.join().expect("no check has failed"));
}

#[test]
fn valid_reads_are_whole_and_never_go_back() {
    shuttle::check_random(play, SCHEDULES);
    shuttle::check_pct(play, SCHEDULES, 3);
}

#[test]
fn each_broken_step_is_detected() {
    let mutations = [
        Mutation::WriteUnlocked,
        Mutation::KeepVersion,
        Mutation::KeepFreed,
        Mutation::TrustAddress,
        Mutation::TrustFirstHeader,
    ];
    for mutation in mutations {
        let play = move || mutation.while_active(play);
        let is_noticed = catch_unwind(|| shuttle::check_random(play, 20 * SCHEDULES)).is_err()
            || catch_unwind(|| shuttle::check_pct(play, 20 * SCHEDULES, 3)).is_err();
        assert!(is_noticed, "{mutation:?} is not detected");
    }
}
