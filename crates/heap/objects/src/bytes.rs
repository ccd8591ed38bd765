//! The memory of a heap: the bytes of its objects, the translation tables of its block addresses,
//! and its records.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};

use aquifer_fabric::unit_map::UnitMap;
use aquifer_fabric::{Access, Key, Memory, Region, Registration, Scope, Target, TargetError};

use crate::class::{BLOCK_ORDERS, FRAME_BYTES};
use crate::layout::{FORMAT, FRAME_WORDS, HeapWords, Layout, NAMES, RECORDS};
use crate::slot::Words;
use crate::space::addresses_max;

/// The memory of one heap, in three parts.
#[derive(Debug)]
pub struct HeapBytes {
    layout: Layout,
    data: Arc<Memory>,
    names: Arc<Memory>,
    records: Arc<Memory>,
    /// Whether a device has pinned the memory, so that its pages stay.
    is_pinned: bool,
}

impl HeapBytes {
    /// Creates the memory of a heap of `frames` frames. No page is allocated yet.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn create(frames: u32) -> io::Result<Self> {
        let layout = Layout::new(frames);
        // Programs of this machine map these two.
        let create = |name, words| Memory::create_revocable(name, to_bytes(words)?).map(Arc::new);
        Ok(Self {
            layout,
            data: create("aquifer-heap", u64::from(frames) * FRAME_WORDS)?,
            names: create("aquifer-heap-names", layout.name_words())?,
            records: Arc::new(Memory::create("aquifer-heap-records", to_bytes(layout.record_words())?)?),
            is_pinned: false,
        })
    }

    /// Opens the memory of a heap of an earlier process, in the order of [`Self::fds`].
    ///
    /// # Errors
    /// If the descriptors are not those of a heap's memory.
    pub fn open(fds: [OwnedFd; 3]) -> io::Result<Self> {
        let [data, names, records] = fds.map(|fd| Memory::whole_revocable(fd).map(Arc::new));
        let (data, names, records) = (data?, names?, records?);
        let frames = u32::try_from(data.len() as u64 / FRAME_BYTES).map_err(io::Error::other)?;
        let layout = Layout::new(frames);
        let lengths = [data.len(), names.len(), records.len()];
        let expected = [u64::from(frames) * FRAME_WORDS, layout.name_words(), layout.record_words()];
        let is_heap = lengths.iter().zip(expected).all(|(len, words)| *len as u64 == words * 8);
        if frames == 0 || !is_heap || records.load_u64(0) != FORMAT {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "this is not the memory of a heap"));
        }
        Ok(Self { layout, data, names, records, is_pinned: false })
    }

    /// The descriptors: data, names, records.
    #[must_use]
    pub fn fds(&self) -> [BorrowedFd<'_>; 3] {
        [self.data.fd(), self.names.fd(), self.records.fd()]
    }

    /// The bytes of objects and the names, open for reading only.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn read_only_fds(&self) -> io::Result<[OwnedFd; 2]> {
        Ok([self.data.read_only_fd()?, self.names.read_only_fd()?])
    }

    /// Empties the memory: an access by a program that has mapped it is SIGBUS. All regions must
    /// have been deregistered.
    ///
    /// # Errors
    /// If a part of this process still uses the memory, or the system refuses.
    pub fn revoke(self) -> io::Result<()> {
        let revoke = |memory| match Arc::try_unwrap(memory) {
            Ok(memory) => Memory::revoke(memory),
            Err(_) => Err(io::Error::other("a region still uses the memory")),
        };
        revoke(self.data)?;
        revoke(self.names)
    }

    /// The places of the words in the memory.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Registers the blocks of each size for READ, with the keys that they had before, if any.
    /// Appends their regions to `regions`.
    ///
    /// # Errors
    /// If the target refuses; then `regions` has what was registered before.
    pub fn register(
        &self,
        target: &dyn Target,
        scope: Scope,
        keys: Option<[Key; BLOCK_ORDERS]>,
        regions: &mut Vec<Region>,
    ) -> Result<(), TargetError> {
        for order in 0..BLOCK_ORDERS {
            let map = UnitMap {
                words: Arc::clone(&self.names),
                at: usize::try_from(self.layout.names_before(order) * 8).expect("the names are mapped"),
                units: addresses_max(self.layout.frames_max(), u8::try_from(order).expect("a small order")),
                unit_bytes: FRAME_BYTES << order,
            };
            let plain = Registration::plain(Arc::clone(&self.data), Access::READ, scope);
            let key = keys.map(|keys| keys[order]);
            regions.push(target.register_as(Registration { map: Some(map), key, ..plain })?);
        }
        Ok(())
    }

    /// Registers the memory as it is for READ, for a target that cannot translate addresses.
    /// Appends the regions of the bytes of objects and of the names to `regions`. Their pages stay
    /// from now on.
    ///
    /// # Errors
    /// If the target refuses; then `regions` has what was registered before.
    pub fn register_raw(
        &mut self,
        target: &dyn Target,
        scope: Scope,
        regions: &mut Vec<Region>,
    ) -> Result<(), TargetError> {
        self.is_pinned = true;
        for memory in [&self.data, &self.names] {
            regions.push(target.register(Arc::clone(memory), Access::READ, scope)?);
        }
        Ok(())
    }

    /// Bytes of memory that the objects take, and bytes that the names and records take.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn allocated_bytes(&self) -> io::Result<(u64, u64)> {
        let tables = self.names.allocated_bytes()? + self.records.allocated_bytes()?;
        Ok((self.data.allocated_bytes()?, tables))
    }

    /// Copies the bytes of an object after its header. The object must be locked.
    pub fn read(&self, at: u64, out: &mut [u8]) {
        self.data.read(byte(at) + 8, out);
    }

    fn place(&self, at: u64) -> (&Memory, usize) {
        let memory = match at & !(NAMES - 1) {
            0 => &self.data,
            NAMES => &self.names,
            _ => &self.records,
        };
        (memory, byte(at & (NAMES - 1)))
    }
}

const _: () = assert!(RECORDS & (NAMES - 1) == 0);

fn byte(word: u64) -> usize {
    usize::try_from(word * 8).expect("the memory is mapped")
}

fn to_bytes(words: u64) -> io::Result<usize> {
    usize::try_from(words * 8).map_err(io::Error::other)
}

impl Words for HeapBytes {
    fn load(&mut self, at: u64) -> u64 {
        let (memory, at) = self.place(at);
        memory.atomic_u64(at).load(Acquire)
    }

    fn store(&mut self, at: u64, word: u64) {
        let (memory, at) = self.place(at);
        memory.atomic_u64(at).store(word, Release);
    }

    fn compare_swap(&mut self, at: u64, old: u64, new: u64) -> bool {
        let (memory, at) = self.place(at);
        // Later stores must not be visible before the lock: the fence orders them behind it.
        let swapped = memory.atomic_u64(at).compare_exchange(old, new, AcqRel, Acquire).is_ok();
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        swapped
    }
}

impl HeapWords for HeapBytes {
    fn discard(&mut self, at: u64, words: u64) {
        let (memory, at) = self.place(at);
        let bytes = byte(words);
        if !self.is_pinned && at.is_multiple_of(4096) && bytes.is_multiple_of(4096) {
            match memory.punch(at, bytes) {
                Ok(()) => return,
                Err(error) => {
                    tracing::warn!(%error, bytes, "cannot return memory of a heap to the system");
                }
            }
        }
        for at in (at..at + bytes).step_by(8) {
            memory.atomic_u64(at).store(0, Release);
        }
    }

    fn peek(&mut self, at: u64, out: &mut [u64]) {
        let (memory, at) = self.place(at);
        let mut bytes = vec![0; out.len() * 8];
        if memory.peek(at, &mut bytes).is_err() {
            // This read creates pages.
            memory.read(at, &mut bytes);
        }
        for (word, bytes) in out.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
        }
    }
}
