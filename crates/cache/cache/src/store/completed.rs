//! Complete memory of a partition: no store uses it, and a store can adopt it.

use std::sync::atomic::Ordering;

use super::hash::HashSecret;
use super::layout::{Layout, MAGIC, header};
use super::memory::Memory;

/// The properties in which a store must agree with the store that completed the memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// The layout.
    pub layout: Layout,
    /// The partition's number.
    pub partition: usize,
    /// The number of partitions.
    pub partitions: usize,
    /// Whether items have cas numbers.
    pub has_cas: bool,
    /// The secret of the hash of keys.
    pub hash_secret: HashSecret,
}

/// The state of a partition that is not in its run table and index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completed {
    /// The last cas number.
    pub cas: u64,
    /// The number of items.
    pub items: u64,
    /// The second of the cache's clock.
    pub now_s: u32,
    /// The second since 1970 at the same moment.
    pub unix_s: i64,
}

/// The lowest bit of the version in the first word.
const VERSION_SHIFT: u32 = 56;

/// The number of words of the header that the checksum covers.
const CHECKSUM_WORDS: usize = header::CHECKSUM / 8;

impl Completed {
    /// Marks the memory as complete.
    pub fn write(&self, memory: &Memory, identity: &Identity) {
        for (offset, word) in identity.words().into_iter().chain(self.words()) {
            memory.word(offset).store(word, Ordering::Relaxed);
        }
        memory.word(header::CHECKSUM).store(checksum(memory), Ordering::Release);
    }

    /// Reads the state from complete memory, and marks the memory as in use. Returns `None` if the
    /// memory is not complete, or if a store with another identity has completed it.
    pub fn adopt(memory: &Memory, identity: &Identity) -> Option<Self> {
        let load = |offset: usize| load(memory, offset);
        let is_same = identity.words().into_iter().all(|(offset, word)| load(offset) == word);
        if !is_same || load(header::CHECKSUM) != checksum(memory) {
            return None;
        }
        let completed = Self {
            cas: load(header::CAS),
            items: load(header::ITEMS),
            now_s: u32::try_from(load(header::SECOND)).ok()?,
            unix_s: load(header::UNIX_SECOND).cast_signed(),
        };
        memory.word(header::MAGIC).store(0, Ordering::Release);
        Some(completed)
    }

    fn words(&self) -> [(usize, u64); 4] {
        [
            (header::CAS, self.cas),
            (header::ITEMS, self.items),
            (header::SECOND, u64::from(self.now_s)),
            (header::UNIX_SECOND, self.unix_s.cast_unsigned()),
        ]
    }
}

impl Identity {
    fn words(&self) -> [(usize, u64); 7] {
        let HashSecret([first, second]) = self.hash_secret;
        [
            (header::MAGIC, MAGIC),
            (header::RUNS, self.layout.runs as u64),
            (header::BUCKETS_MAX, self.layout.buckets_max() as u64),
            (header::PARTITION, self.partition as u64 | (self.partitions as u64) << 32),
            (header::HAS_CAS, u64::from(self.has_cas)),
            (header::HASH_SECRET, first),
            (header::HASH_SECRET + 8, second),
        ]
    }
}

/// The secret in complete memory; `None` if the memory is not complete.
pub fn hash_secret(memory: &Memory) -> Option<HashSecret> {
    let is_complete =
        load(memory, header::MAGIC) == MAGIC && load(memory, header::CHECKSUM) == checksum(memory);
    let word = |number: usize| load(memory, header::HASH_SECRET + number * 8);
    is_complete.then(|| HashSecret([word(0), word(1)]))
}

/// The version of memory that a store of another version of the format has completed.
pub fn other_version(memory: &Memory) -> Option<u8> {
    let first = load(memory, header::MAGIC);
    let [.., version] = first.to_le_bytes();
    let is_other = (first ^ MAGIC) << (u64::BITS - VERSION_SHIFT) == 0 && first != MAGIC;
    is_other.then_some(version)
}

fn load(memory: &Memory, offset: usize) -> u64 {
    memory.word(offset).load(Ordering::Acquire)
}

fn checksum(memory: &Memory) -> u64 {
    let mut bytes = [0; header::CHECKSUM];
    for (word, bytes) in (0..CHECKSUM_WORDS).zip(bytes.chunks_exact_mut(8)) {
        bytes.copy_from_slice(&memory.word(word * 8).load(Ordering::Acquire).to_le_bytes());
    }
    xxhash_rust::xxh3::xxh3_64(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_header() {
        let hash_secret = HashSecret([11, 12]);
        let layout = Layout::for_limit(1 << 20);
        let identity = Identity { layout, partition: 3, partitions: 128, has_cas: true, hash_secret };
        let memory = Memory::create("test", identity.layout.bytes()).unwrap();
        assert_eq!(Completed::adopt(&memory, &identity), None);
        let completed = Completed { cas: 1003, items: 7, now_s: 100, unix_s: 1_700_000_000 };
        completed.write(&memory, &identity);
        let words: Vec<u64> = (0..15).map(|at| memory.word(at * 8).load(Ordering::Relaxed)).collect();
        let header = [MAGIC, 66, 8192, 3 | 128 << 32, 1, 1003, 7, 100, 0, 0, 0, 1_700_000_000];
        let expected = [&header[..], &[11, 12, 0x75af_6384_8431_a3d4]].concat();
        assert_eq!(words, expected, "{:#018x}", words[14]);
        assert_eq!((super::hash_secret(&memory), other_version(&memory)), (Some(hash_secret), None));
        for other in [
            Identity { partition: 4, ..identity },
            Identity { hash_secret: HashSecret([11, 13]), ..identity },
        ] {
            assert_eq!(Completed::adopt(&memory, &other), None);
        }
        assert_eq!(Completed::adopt(&memory, &identity), Some(completed));
        assert_eq!(Completed::adopt(&memory, &identity), None, "the memory is in use");
        assert_eq!((super::hash_secret(&memory), other_version(&memory)), (None, None));
    }

    #[test]
    fn an_earlier_version_is_recognised_and_not_adopted() {
        let memory = Memory::create("test", Layout::for_limit(1 << 20).bytes()).unwrap();
        memory.word(header::MAGIC).store(u64::from_le_bytes(*b"AQCACHE\x01"), Ordering::Relaxed);
        assert_eq!((hash_secret(&memory), other_version(&memory)), (None, Some(1)));
    }

    #[test]
    fn a_damaged_header_is_not_adopted() {
        let hash_secret = HashSecret([11, 12]);
        let layout = Layout::for_limit(1 << 20);
        let identity = Identity { layout, partition: 0, partitions: 1, has_cas: false, hash_secret };
        let memory = Memory::create("test", identity.layout.bytes()).unwrap();
        Completed { cas: 0, items: 7, now_s: 100, unix_s: 0 }.write(&memory, &identity);
        memory.word(header::ITEMS).store(8, Ordering::Relaxed);
        assert_eq!(Completed::adopt(&memory, &identity), None);
    }
}
