//! The words of a slot: how objects are written, moved and freed, and how a reader knows that it
//! has read one version of them (§3.2.3).
//!
//! A reader loads the header, then the bytes, then the header again, in this order. The rules for
//! every change of a slot are:
//!
//! - Bytes change only while the header is locked, or names no object. Workers lock by
//!   compare-and-swap, so an object that is moved is not written meanwhile.
//! - Each change, also a move, ends with another version. So a reader detects that the memory was
//!   freed and reused during the read, and that it has read both places of a moved object.

use crate::header::{Header, Lock, ObjectNumber};
use crate::mutation::Mutation;

/// The memory of a heap, in words. Readers see stores in the order in which they are made.
pub trait Words {
    /// Loads a word.
    fn load(&mut self, at: u64) -> u64;

    /// Stores a word, after all stores before it.
    fn store(&mut self, at: u64, word: u64);

    /// Replaces a word if it is `old`. Returns whether it was.
    fn compare_swap(&mut self, at: u64, old: u64, new: u64) -> bool;
}

impl<W: Words> Words for &mut W {
    fn load(&mut self, at: u64) -> u64 {
        (**self).load(at)
    }

    fn store(&mut self, at: u64, word: u64) {
        (**self).store(at, word);
    }

    fn compare_swap(&mut self, at: u64, old: u64, new: u64) -> bool {
        (**self).compare_swap(at, old, new)
    }
}

/// Why an object cannot be locked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LockRefused {
    /// The object is locked already.
    Busy,
    /// The slot has another object, or none: the object was moved or freed.
    Elsewhere,
}

/// Writes the first version of a new object into a free slot.
pub fn create(words: &mut impl Words, at: u64, number: ObjectNumber, payload: &[u64]) {
    store_payload(words, at, payload);
    words.store(at, Header::new(number, Lock::Open).word());
}

/// Locks an object. Returns the header from before the lock.
///
/// # Errors
/// If another worker has locked the object, or the object is not there.
pub fn lock(
    words: &mut impl Words,
    at: u64,
    number: ObjectNumber,
    lock: Lock,
) -> Result<Header, LockRefused> {
    loop {
        let header = Header::from_word(words.load(at));
        if header.number() != Some(number) {
            return Err(LockRefused::Elsewhere);
        }
        if !header.is_open() {
            return Err(LockRefused::Busy);
        }
        if words.compare_swap(at, header.word(), header.with_lock(lock).word()) {
            return Ok(header);
        }
    }
}

/// Replaces words of an object that was locked when it had `header`, and unlocks it. `first` is the
/// first word after the header that is replaced.
pub fn write(words: &mut impl Words, at: u64, header: Header, first: u64, payload: &[u64]) {
    if Mutation::WriteUnlocked.is_active() {
        words.store(at, header.word());
    }
    store_payload(words, at + first, payload);
    words.store(at, header.next_version().word());
}

/// Copies an object of `len` words, its header included, into a free slot, and unlocks it there.
/// The object must be locked for a move.
pub fn copy(words: &mut impl Words, from: u64, to: u64, len: u64) {
    let header = Header::from_word(words.load(from));
    let moved =
        if Mutation::KeepVersion.is_active() { header.with_lock(Lock::Open) } else { header.next_version() };
    for word in 1..len {
        let bytes = words.load(from + word);
        words.store(to + word, bytes);
    }
    words.store(to, moved.word());
}

/// Frees the slot of an object that is locked.
pub fn free(words: &mut impl Words, at: u64) {
    if Mutation::KeepFreed.is_active() {
        let header = Header::from_word(words.load(at));
        return words.store(at, header.with_lock(Lock::Open).word());
    }
    words.store(at, Header::FREE.word());
}

fn store_payload(words: &mut impl Words, at: u64, payload: &[u64]) {
    for (word, bytes) in (at + 1..).zip(payload) {
        words.store(word, *bytes);
    }
}

/// The outcome of a direct read at the address of a pointer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadVerdict {
    /// The bytes are those of one version of the object.
    Valid,
    /// The object is being written or moved, or was meanwhile: read again, after a pause.
    Busy,
    /// The object is not there: the pointer must be corrected (§3.2.2).
    Elsewhere,
}

/// The outcome of a direct read, from the headers before and after the bytes.
#[must_use]
pub fn verdict(number: ObjectNumber, before: Header, after: Header) -> ReadVerdict {
    if before.number() != Some(number) && !Mutation::TrustAddress.is_active() {
        ReadVerdict::Elsewhere
    } else if !before.is_open() || before != after && !Mutation::TrustFirstHeader.is_active() {
        ReadVerdict::Busy
    } else {
        ReadVerdict::Valid
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Words for Vec<u64> {
        fn load(&mut self, at: u64) -> u64 {
            self[usize::try_from(at).unwrap()]
        }

        fn store(&mut self, at: u64, word: u64) {
            self[usize::try_from(at).unwrap()] = word;
        }

        fn compare_swap(&mut self, at: u64, old: u64, new: u64) -> bool {
            let is_old = self.load(at) == old;
            if is_old {
                self.store(at, new);
            }
            is_old
        }
    }

    #[test]
    fn an_object_is_created_written_moved_and_freed() {
        let number = ObjectNumber::new(77).unwrap();
        let mut words = vec![0; 16];
        let header = |words: &[u64], at: usize| Header::from_word(words[at]);
        create(&mut words, 4, number, &[1, 2, 3]);
        let first = header(&words, 4);
        assert_eq!(verdict(number, first, first), ReadVerdict::Valid);
        assert_eq!(lock(&mut words, 4, number, Lock::Writing), Ok(first));
        assert_eq!(lock(&mut words, 4, number, Lock::Moving), Err(LockRefused::Busy));
        write(&mut words, 4, first, 0, &[4, 5]);
        assert_eq!(words[5..8], [4, 5, 3], "a shorter payload leaves the rest");
        assert_eq!(verdict(number, first, header(&words, 4)), ReadVerdict::Busy);
        lock(&mut words, 4, number, Lock::Moving).unwrap();
        let locked = header(&words, 4);
        assert_eq!(verdict(number, locked, locked), ReadVerdict::Busy);
        copy(&mut words, 4, 10, 4);
        assert_eq!(words[11..14], [4, 5, 3]);
        assert_eq!(header(&words, 10).version(), locked.version() + 1);
        free(&mut words, 10);
        assert_eq!(verdict(number, header(&words, 10), locked), ReadVerdict::Elsewhere);
        assert_eq!(lock(&mut words, 10, number, Lock::Writing), Err(LockRefused::Elsewhere));
    }
}
