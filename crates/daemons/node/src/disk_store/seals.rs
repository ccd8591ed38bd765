//! The seals of a disk node: the key, and the nonce and the tag of each page.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::SeqCst;

use aquifer_fabric::Memory;
use ring::rand::{SecureRandom, SystemRandom};

/// The first eight bytes.
const MAGIC: u64 = u64::from_le_bytes(*b"AQFRDISK");
/// The version of the format that this code writes, and the only one that it reads.
const VERSION: u64 = 1;
const VERSION_AT: usize = 8;
const DATA_AT: usize = 16;
const PAGES_AT: usize = 24;
const NONCE_AT: usize = 32;
const KEY_AT: usize = 40;
const KEY_BYTES: usize = 32;
/// Offset of the first page's seal.
const SEALS_AT: usize = 4096;
/// Bytes of a page's seal: a nonce and a tag.
const SEAL_BYTES: usize = 24;

/// The seal of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PageSeal {
    /// The number of the write, from 1; 0 if the page was never written, or was cleared.
    pub nonce: u64,
    /// The tag of the encrypted bytes.
    pub tag: [u8; 16],
}

/// The seals of all pages.
#[derive(Debug)]
pub(super) struct Seals {
    memory: Memory,
    data_at: u64,
    pages: u64,
}

impl Seals {
    /// Creates the seals of pages that were never written, with a new key. `data_at` is the offset
    /// of the first page in its region.
    ///
    /// # Errors
    /// If there is no memory, or the system has no random bytes.
    pub fn create(data_at: u64, pages: u64) -> io::Result<Self> {
        let bytes = usize::try_from(pages).ok().and_then(|pages| pages.checked_mul(SEAL_BYTES));
        let bytes = bytes.ok_or(io::ErrorKind::OutOfMemory)?;
        let memory = Memory::create("aquifer-disk-seals", SEALS_AT + bytes)?;
        let mut key = [0; KEY_BYTES];
        SystemRandom::new().fill(&mut key).map_err(io::Error::other)?;
        memory.write(KEY_AT, &key);
        let words = [(NONCE_AT, 1), (PAGES_AT, pages), (DATA_AT, data_at), (VERSION_AT, VERSION), (0, MAGIC)];
        words.into_iter().for_each(|(at, word)| memory.atomic_u64(at).store(word, SeqCst));
        Ok(Self { memory, data_at, pages }.locked())
    }

    /// Opens the seals that an earlier process has left.
    ///
    /// # Errors
    /// If they are not in this format.
    pub fn open(fd: OwnedFd) -> io::Result<Self> {
        let memory = Memory::whole(fd)?;
        let word = |at: usize| if memory.len() < SEALS_AT { 0 } else { memory.load_u64(at) };
        if (word(0), word(VERSION_AT)) != (MAGIC, VERSION) {
            return Err(io::Error::other("these are no seals of a disk node of this version"));
        }
        let (data_at, pages) = (word(DATA_AT), word(PAGES_AT));
        let bytes = usize::try_from(pages).ok().and_then(|pages| pages.checked_mul(SEAL_BYTES));
        if bytes.is_none_or(|bytes| bytes > memory.len() - SEALS_AT) {
            return Err(io::Error::other("the seals of a disk node are too short"));
        }
        Ok(Self { memory, data_at, pages }.locked())
    }

    /// Keeps the key from being swapped to a disk, if this process may lock memory.
    fn locked(self) -> Self {
        if let Err(error) = self.memory.lock_range(0, SEALS_AT) {
            tracing::warn!(%error, "the key of the disk may be swapped; raise the limit of locked memory");
        }
        self
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.memory.fd()
    }

    /// Offset of the first page in its region.
    pub fn data_at(&self) -> u64 {
        self.data_at
    }

    /// The number of pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    pub fn key(&self) -> [u8; KEY_BYTES] {
        let mut key = [0; KEY_BYTES];
        self.memory.read(KEY_AT, &mut key);
        key
    }

    /// Reserves nonces, also against a later process. Returns the first.
    pub fn next_nonces(&self, count: u64) -> u64 {
        self.memory.atomic_u64(NONCE_AT).fetch_add(count, SeqCst)
    }

    /// The seal of a page, whose stripe is locked.
    pub fn get(&self, page: u64) -> PageSeal {
        let mut bytes = [0; SEAL_BYTES];
        self.memory.read(Self::offset(page), &mut bytes);
        let (nonce, tag) = bytes.split_first_chunk().expect("a seal has a nonce");
        PageSeal { nonce: u64::from_le_bytes(*nonce), tag: tag.try_into().expect("the rest is the tag") }
    }

    /// Sets the seal of a page, whose stripe is locked for writing.
    pub fn set(&self, page: u64, seal: PageSeal) {
        let mut bytes = [0; SEAL_BYTES];
        bytes[..8].copy_from_slice(&seal.nonce.to_le_bytes());
        bytes[8..].copy_from_slice(&seal.tag);
        self.memory.write(Self::offset(page), &bytes);
    }

    /// Clears the seal of a page, whose stripe is locked for writing.
    pub fn clear(&self, page: u64) {
        if self.get(page).nonce != 0 {
            self.set(page, PageSeal { nonce: 0, tag: [0; 16] });
        }
    }

    fn offset(page: u64) -> usize {
        SEALS_AT + usize::try_from(page).expect("a page of the store") * SEAL_BYTES
    }
}
