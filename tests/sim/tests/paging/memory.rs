//! The memory of a modelled program, page by page, with the contents that the program must read.

use aquifer_fabric::sim::Rng;
use aquifer_pager::{PAGE_BYTES, PageNumber};

/// The first page, a little below the end of a leaf of the page table, so that ranges cross leaves.
pub const BASE: PageNumber = 512 * 77 - 24;

/// The contents of a present page.
#[derive(Clone, Copy, Debug)]
pub struct ModelFrame {
    /// The number that stands for the bytes; see [`encode`].
    pub stamp: u64,
    /// Not shared with a relative since a fork.
    pub is_exclusive: bool,
    /// In use by a device: the kernel does not move it.
    pub is_pinned: bool,
    /// After `MADV_FREE`: the kernel may drop the page until it is written.
    pub is_lazy: bool,
    /// Write-protected: a write is a fault.
    pub is_protected: bool,
}

impl ModelFrame {
    pub const ZERO: Self =
        Self { stamp: 0, is_exclusive: true, is_pinned: false, is_lazy: false, is_protected: false };
}

/// One page of the address space.
#[derive(Clone, Copy, Debug, Default)]
pub struct ModelPage {
    /// The thread that may write the page and change its mapping.
    pub owner: Option<usize>,
    pub is_mapped: bool,
    pub is_registered: bool,
    pub frame: Option<ModelFrame>,
    pub is_poisoned: bool,
    /// The stamp that the program must read.
    pub expected: u64,
    /// Whether zeros may be read as well, after `MADV_FREE` or a fork during `MADV_DONTNEED`.
    pub may_be_zero: bool,
    /// Whether the owner is dropping the page: another thread may read the old bytes or zeros.
    pub is_being_dropped: bool,
    /// Whether the program has pinned the page, which then stays present.
    pub is_kept: bool,
    /// Whether the program got SIGBUS here: it must not read the page successfully any more.
    pub is_dead: bool,
}

impl ModelPage {
    pub fn mapped_by(owner: usize, registered: bool) -> Self {
        Self { owner: Some(owner), is_mapped: true, is_registered: registered, ..Self::default() }
    }

    /// Changes the page as `MADV_DONTNEED` does.
    pub fn drop_content(&mut self) {
        *self = Self {
            owner: self.owner,
            is_mapped: self.is_mapped,
            is_registered: self.is_registered,
            ..Self::default()
        };
    }
}

/// The index of a page in the vectors of the model.
pub fn index(page: PageNumber) -> usize {
    usize::try_from(page - BASE).expect("few pages")
}

/// The page at an index.
pub fn number(index: usize) -> PageNumber {
    BASE + index as u64
}

fn word(stamp: u64, at: u64) -> u64 {
    (stamp ^ at << 48).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The bytes for a number: zeros for 0, otherwise different in every word.
pub fn encode(stamp: u64) -> [u8; PAGE_BYTES] {
    let mut bytes = [0; PAGE_BYTES];
    if stamp != 0 {
        for (at, place) in (0..).zip(bytes.chunks_exact_mut(8)) {
            let word = if at == 0 { stamp } else { word(stamp, at) };
            place.copy_from_slice(&word.to_le_bytes());
        }
    }
    bytes
}

/// The number for a page's bytes; `None` if [`encode`] did not make them.
pub fn decode(bytes: &[u8]) -> Option<u64> {
    let mut words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes")));
    let stamp = words.next()?;
    let good = (1..).zip(words).all(|(at, found)| found == if stamp == 0 { 0 } else { word(stamp, at) });
    good.then_some(stamp)
}

/// A run of at most `max` indices for which `fits` returns true, near a random index.
pub fn random_run(
    rng: &mut Rng,
    len: usize,
    max: usize,
    fits: impl Fn(usize) -> bool,
) -> Option<(usize, usize)> {
    let start = rng.index(len);
    let first = (start..len).chain(0..start).find(|at| fits(*at))?;
    let mut end = first + 1;
    let want = 1 + rng.index(max);
    while end < len && end - first < want && fits(end) {
        end += 1;
    }
    Some((first, end))
}
