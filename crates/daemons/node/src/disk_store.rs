//! The pages of a disk node: one file, encrypted under a key that exists only in memory.
//!
//! The file is preallocated and has no name, so nothing of it is left when the last process has
//! closed it. Each page of 4 KiB is encrypted by AES-256-GCM under its own nonce. The key, the
//! nonces and the tags are in the *seals*: shared memory, which a keeper holds together with the
//! file. A page whose bytes are not those that were written last, after a failure of the disk or of
//! this process, is an error of its reader.
//!
//! Format of the seals: `docs/formats/ipc.md`, "Disk nodes".

mod seals;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use aquifer_fabric::{PageStore, WorkError};
use parking_lot::RwLock;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use rustix::fs::FallocateFlags;

use seals::{PageSeal, Seals};

/// Bytes of a page, which is encrypted by itself.
const PAGE_BYTES: usize = 4096;
/// Pages that one lock covers, and the most that one system call reads or writes.
const STRIPE_PAGES: u64 = 64;
/// Number of locks.
const LOCKS: usize = 1024;

/// The pages of a disk node.
#[derive(Debug)]
pub(crate) struct DiskStore {
    file: File,
    seals: Seals,
    key: LessSafeKey,
    /// The lock of a stripe is held while its pages are read or written.
    locks: Box<[RwLock<()>]>,
    errors: AtomicU64,
}

/// A part of an access, inside one stripe.
struct StripePart {
    first: u64,
    pages: u64,
}

impl DiskStore {
    /// Creates the file in a directory, for `bytes` of a region from `data_at` on.
    ///
    /// # Errors
    /// If the file system has less room, or cannot reserve it.
    pub fn create(directory: &Path, data_at: u64, bytes: u64) -> io::Result<Self> {
        let file = tempfile::tempfile_in(directory)?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes)?;
        let seals = Seals::create(data_at, bytes / PAGE_BYTES as u64)?;
        Self::with(file, seals)
    }

    /// Opens the file and the seals that an earlier process has left.
    ///
    /// # Errors
    /// If they do not belong to a disk node, or the file is too short.
    pub fn open(file: OwnedFd, seals: OwnedFd) -> io::Result<Self> {
        let (file, seals) = (File::from(file), Seals::open(seals)?);
        if file.metadata()?.len() < seals.pages() * PAGE_BYTES as u64 {
            return Err(io::Error::other("the file of a disk node is too short"));
        }
        Self::with(file, seals)
    }

    fn with(file: File, seals: Seals) -> io::Result<Self> {
        let key = UnboundKey::new(&AES_256_GCM, &seals.key()).map_err(io::Error::other)?;
        let locks = (0..LOCKS).map(|_| RwLock::default()).collect();
        Ok(Self { file, seals, key: LessSafeKey::new(key), locks, errors: AtomicU64::new(0) })
    }

    /// The file and the seals, for a keeper.
    pub fn fds(&self) -> [BorrowedFd<'_>; 2] {
        [self.file.as_fd(), self.seals.fd()]
    }

    /// Number of accesses that failed because of the disk.
    pub fn errors(&self) -> u64 {
        self.errors.load(Relaxed)
    }

    /// The whole pages of an access.
    fn pages_of(&self, offset: u64, len: usize) -> Result<StripePart, WorkError> {
        let page = PAGE_BYTES as u64;
        let at = offset.checked_sub(self.seals.data_at()).ok_or(WorkError::RemoteAccess)?;
        if !at.is_multiple_of(page) || !len.is_multiple_of(PAGE_BYTES) {
            return Err(WorkError::Misaligned);
        }
        let (first, pages) = (at / page, len as u64 / page);
        let is_inside = first.checked_add(pages).is_some_and(|end| end <= self.seals.pages());
        if is_inside { Ok(StripePart { first, pages }) } else { Err(WorkError::RemoteAccess) }
    }

    fn lock(&self, part: &StripePart) -> &RwLock<()> {
        &self.locks[usize::try_from(part.first / STRIPE_PAGES).unwrap_or(0) % LOCKS]
    }

    /// Counts an error of the disk. Logs the first, the second, the fourth, and so on.
    fn fail(&self, what: &str, part: &StripePart, error: &dyn std::fmt::Display) -> WorkError {
        let first = part.first;
        let errors = self.errors.fetch_add(1, Relaxed) + 1;
        if errors.is_power_of_two() {
            tracing::warn!(page = first, errors, %error, "{what}");
        }
        WorkError::Storage
    }

    fn read_part(&self, part: &StripePart, out: &mut [u8]) -> Result<(), WorkError> {
        let _shared = self.lock(part).read();
        let seals: Vec<PageSeal> = (0..part.pages).map(|page| self.seals.get(part.first + page)).collect();
        if seals.iter().all(|seal| seal.nonce == 0) {
            out.fill(0);
            return Ok(());
        }
        let at = part.first * PAGE_BYTES as u64;
        let read = self.file.read_exact_at(out, at);
        read.map_err(|error| self.fail("cannot read from the disk", part, &error))?;
        for ((page, seal), bytes) in (part.first..).zip(seals).zip(out.chunks_exact_mut(PAGE_BYTES)) {
            if seal.nonce == 0 {
                bytes.fill(0);
                continue;
            }
            let opened =
                self.key.open_in_place_separate_tag(nonce(seal), aad(page), seal.tag.into(), bytes, 0..);
            let error = "it is not what was written, or the node was killed while it was written";
            opened.map_err(|_| self.fail("a page on the disk is damaged", part, &error))?;
        }
        Ok(())
    }

    fn write_part(&self, part: &StripePart, bytes: &mut [u8]) -> Result<(), WorkError> {
        let _exclusive = self.lock(part).write();
        let first_nonce = self.seals.next_nonces(part.pages);
        let mut seals = Vec::new();
        for (page, bytes) in (0..part.pages).zip(bytes.chunks_exact_mut(PAGE_BYTES)) {
            let mut seal = PageSeal { nonce: first_nonce + page, tag: [0; 16] };
            let tag = self
                .key
                .seal_in_place_separate_tag(nonce(seal), aad(part.first + page), bytes)
                .expect("a page is short enough");
            seal.tag.copy_from_slice(tag.as_ref());
            seals.push(seal);
        }
        let at = part.first * PAGE_BYTES as u64;
        let written = self.file.write_all_at(bytes, at);
        written.map_err(|error| self.fail("cannot write to the disk", part, &error))?;
        (part.first..).zip(seals).for_each(|(page, seal)| self.seals.set(page, seal));
        Ok(())
    }

    /// Calls `access` for each stripe of a range, with the bytes there.
    fn each_part(
        &self,
        offset: u64,
        bytes: &mut [u8],
        access: impl Fn(&StripePart, &mut [u8]) -> Result<(), WorkError>,
    ) -> Result<(), WorkError> {
        let StripePart { mut first, mut pages } = self.pages_of(offset, bytes.len())?;
        let mut rest = bytes;
        while pages > 0 {
            let part = StripePart { first, pages: pages.min(STRIPE_PAGES - first % STRIPE_PAGES) };
            let part_bytes = usize::try_from(part.pages).expect("at most a stripe") * PAGE_BYTES;
            let (part_of, later) = rest.split_at_mut(part_bytes);
            access(&part, part_of)?;
            (first, pages, rest) = (first + part.pages, pages - part.pages, later);
        }
        Ok(())
    }
}

impl PageStore for DiskStore {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), WorkError> {
        let page = PAGE_BYTES as u64;
        let skipped = usize::try_from(offset % page).expect("less than a page");
        if skipped == 0 && out.len().is_multiple_of(PAGE_BYTES) {
            return self.each_part(offset, out, |part, bytes| self.read_part(part, bytes));
        }
        let mut pages = vec![0; (skipped + out.len()).next_multiple_of(PAGE_BYTES)];
        self.each_part(offset - offset % page, &mut pages, |part, bytes| self.read_part(part, bytes))?;
        out.copy_from_slice(&pages[skipped..skipped + out.len()]);
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &mut [u8]) -> Result<(), WorkError> {
        self.each_part(offset, bytes, |part, bytes| self.write_part(part, bytes))
    }

    fn clear(&self, range: Range<u64>) {
        let len = usize::try_from(range.end - range.start).expect("a range of this store");
        let StripePart { first, pages } = self.pages_of(range.start, len).expect("a range of this store");
        for page in first..first + pages {
            let _exclusive = self.lock(&StripePart { first: page, pages: 1 }).write();
            self.seals.clear(page);
        }
    }
}

/// The nonce of a page's bytes. No two writes have the same.
fn nonce(seal: PageSeal) -> Nonce {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&seal.nonce.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

/// The page's number, so that the bytes of one page are not those of another.
fn aad(page: u64) -> Aad<[u8; 8]> {
    Aad::from(page.to_le_bytes())
}
