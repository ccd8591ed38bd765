//! The owner's side: memory laid out as a pool and opened to the cluster.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use aquifer_fabric::{Access, Key, KeyEntry, Memory, Region, Scope, Target, TargetError};

use crate::client::{Extent, NodeId};
use crate::error::FormatError;
use crate::layout::{HEADER_BYTES, Layout};
use crate::op::WordAt;
use crate::size::{CHUNK_BYTES, SECTION_BYTES, SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS, SizeClass};
use crate::word::{Run, SectionWord, SpanState, SpanWord};

/// A chunk that is clear.
static ZEROS: [u8; 4096] = [0; 4096];
const _: () = assert!(ZEROS.len() as u64 == CHUNK_BYTES);

/// A node's memory, lent.
#[derive(Clone, Debug)]
pub struct Donation {
    /// Where everything lies.
    pub layout: Layout,
    /// The memory.
    pub memory: Arc<Memory>,
    /// As its peers know it.
    pub region: Region,
}

impl Donation {
    /// Bytes that nobody has, as a client would find them: those of spans that are being opened or closed do not count. It reads a word
    /// for each section, and one for each span that is open, while hosts change them: a figure, and no promise.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        let free_of = |section: u32| {
            let states = SectionWord(self.word(WordAt::Section(section)));
            let empty: u64 = states.spans_in(SpanState::Empty).map(|_| u64::from(SPAN_CHUNKS)).sum();
            let open = states.spans_in(SpanState::Partial).chain(states.spans_in(SpanState::Contended));
            let span =
                |index: u8| SpanWord(self.word(WordAt::Span(section * SECTION_SPANS + u32::from(index))));
            empty + open.map(|index| u64::from(span(index).free_chunks())).sum::<u64>()
        };
        (0..self.layout.sections()).map(free_of).sum::<u64>() * CHUNK_BYTES
    }
}

impl Donation {
    /// The largest group of a section's spans that are all free, and were all used since they were cleared. Hosts may change them
    /// meanwhile: a guess, to be taken by [`crate::op::AllocOp::of_group`].
    #[must_use]
    pub fn uncleared(&self, section: u32) -> Option<Run> {
        let states = SectionWord(self.word(WordAt::Section(section)));
        if states.empty_spans() == 0 {
            // To look at metadata that nobody has touched would cost memory.
            return None;
        }
        let first = section * SECTION_SPANS;
        let is_used = |place: u32| !KeyEntry(self.word(WordAt::span_key(first + place))).is_nobodys();
        let used =
            (0..SECTION_SPANS).filter(|place| is_used(*place)).fold(0, |used, place| used | 1 << place);
        (0..=4).rev().find_map(|order| states.find_among(order, used))
    }

    /// A section's word, as it is now.
    #[must_use]
    pub fn section_word(&self, section: u32) -> u64 {
        self.word(WordAt::Section(section))
    }

    /// Of what the node has taken to clear it, strike out all keys that may be left. Then who got at it by one must be expelled ([`Target::expel`]).
    ///
    /// # Panics
    /// If it is no extent of this memory.
    pub fn shut(&self, taken: &Extent) {
        let (chunk, class) = (self.chunk_of(taken), taken.class);
        let strike = |at| {
            let entry = KeyEntry(self.word(at)).without_key();
            self.memory.atomic_u64(offset(self.layout.word_at(at))).store(entry.0, SeqCst);
        };
        Self::entries_of(chunk, class).for_each(strike);
    }

    /// Clear that. Nobody may have got in since.
    ///
    /// # Panics
    /// If it is no extent of this memory.
    pub fn clear(&self, taken: &Extent) {
        let (chunk, class) = (self.chunk_of(taken), taken.class);
        // Written, not punched out: devices keep the pages that they once were given.
        for chunk in chunk..chunk + class.chunks() {
            self.memory.write(offset(self.layout.chunk_data_at(chunk)), &ZEROS);
        }
        self.disown(chunk, class);
    }

    /// Give the pages of a section that the node has taken back to the system: it is clear when it is touched again. Nobody may have got in since it was shut.
    ///
    /// # Errors
    /// If the system refuses; nothing has changed then.
    ///
    /// # Panics
    /// If it is no section of this memory.
    pub fn release(&self, taken: &Extent) -> std::io::Result<()> {
        let chunk = self.chunk_of(taken);
        assert_eq!(taken.class, SizeClass::SECTION, "only whole sections are not lent");
        self.memory.punch(offset(self.layout.chunk_data_at(chunk)), offset(SECTION_BYTES))?;
        self.disown(chunk, taken.class);
        Ok(())
    }

    /// A section of which the node has taken everything, as it was granted it.
    #[must_use]
    pub fn section(&self, section: u32) -> Extent {
        let addr = self.region.base + self.layout.chunk_data_at(section * SECTION_CHUNKS);
        Extent { node: NodeId(self.layout.node()), addr, class: SizeClass::SECTION, key: Key(0) }
    }

    /// Whether nobody has anything in that section, by a look while hosts change it.
    #[must_use]
    pub fn is_free(&self, section: u32) -> bool {
        SectionWord(self.section_word(section)).bits() == 0
    }

    /// Bytes of the sections that the node does not keep to itself, by a look while hosts change them.
    #[must_use]
    pub fn lent_bytes(&self) -> u64 {
        let lent = (0..self.layout.sections()).filter(|section| !self.is_withheld(*section));
        lent.count() as u64 * SECTION_BYTES
    }

    /// Whether the node keeps that section to itself.
    #[must_use]
    pub fn is_withheld(&self, section: u32) -> bool {
        SectionWord(self.section_word(section)).is_withheld()
    }

    fn chunk_of(&self, extent: &Extent) -> u32 {
        let chunk = extent.addr.checked_sub(self.region.base).and_then(|offset| self.layout.chunk_of(offset));
        chunk.expect("an extent of this memory")
    }

    /// The entries of all extents that could begin in whole spans.
    fn entries_of(chunk: u32, class: SizeClass) -> impl Iterator<Item = WordAt> {
        let chunks = (chunk..chunk + class.chunks()).map(WordAt::chunk_key);
        let spans = (chunk / SPAN_CHUNKS..(chunk + class.chunks()) / SPAN_CHUNKS).map(WordAt::span_key);
        let section = (class == SizeClass::SECTION).then_some(WordAt::section_key(chunk / SECTION_CHUNKS));
        chunks.chain(spans).chain(section)
    }

    /// Of that, the part in the metadata: it is nobody's, and no key opens it.
    pub fn disown(&self, chunk: u32, class: SizeClass) {
        let put = |at| self.memory.atomic_u64(offset(self.layout.word_at(at))).store(0, SeqCst);
        Self::entries_of(chunk, class).for_each(put);
    }

    fn word(&self, at: WordAt) -> u64 {
        self.memory.atomic_u64(offset(self.layout.word_at(at))).load(Relaxed)
    }
}

/// Why memory could not be lent.
#[derive(Debug, thiserror::Error)]
pub enum DonateError {
    /// Too little or too much.
    #[error("{bytes} bytes cannot be lent: {cause}")]
    Size {
        /// What was asked for.
        bytes: u64,
        /// Why not.
        cause: FormatError,
    },
    /// More than all.
    #[error("{bytes} bytes cannot be lent of at most {bytes_max}")]
    Beyond {
        /// What was asked for.
        bytes: u64,
        /// The most that this node will lend.
        bytes_max: u64,
    },
    /// The system has none.
    #[error("cannot have {bytes} bytes of memory: {cause}: lend less, or stop something else")]
    Memory {
        /// What was asked for, with the metadata.
        bytes: u64,
        /// What the system said.
        cause: std::io::Error,
    },
    /// It was kept from an earlier life of the node, and is not what that can have left.
    #[error("the memory that was kept cannot be lent again: {0}")]
    Kept(#[source] FormatError),
    /// The fabric could not register it.
    #[error("cannot open the memory to the cluster: {0}")]
    Target(#[from] TargetError),
}

/// Lend `data_bytes`, rounded down to whole sections, as node `id`: create the memory, register it with its table of keys, and write the
/// format, its header last.
///
/// # Errors
/// If the size is unfit, or there is no memory, or the target is at a limit.
pub fn donate(target: &dyn Target, id: NodeId, data_bytes: u64) -> Result<Donation, DonateError> {
    donate_of(target, id, data_bytes, data_bytes)
}

/// Lend `data_bytes`, which may be none, of `bytes_max`: the sections after them are withheld, and may be lent later. They take no memory until then, but for 136 bytes each of the metadata; of those that are withdrawn later all of the metadata stays.
///
/// # Errors
/// As for [`donate`]; more than `bytes_max` cannot be lent.
pub fn donate_of(
    target: &dyn Target,
    id: NodeId,
    data_bytes: u64,
    bytes_max: u64,
) -> Result<Donation, DonateError> {
    let size = |cause| DonateError::Size { bytes: bytes_max, cause };
    let layout = Layout::for_bytes(id.0, bytes_max).map_err(size)?;
    let beyond = DonateError::Beyond { bytes: data_bytes, bytes_max };
    let lent = u32::try_from(data_bytes / SECTION_BYTES).map_err(|_| beyond)?;
    if lent > layout.sections() {
        return Err(DonateError::Beyond { bytes: data_bytes, bytes_max });
    }
    let bytes = layout.region_bytes();
    let len = usize::try_from(bytes).map_err(|_| size(FormatError::Sections { sections: u64::MAX }))?;
    let memory = Memory::create("aquifer-pool", len)
        .map(Arc::new)
        .map_err(|cause| DonateError::Memory { bytes, cause })?;
    let shared = Arc::clone(&memory);
    let region = target.register_with(shared, Access::ALL, Scope::Anyone, Some(layout.key_table()), None)?;
    for section in lent..layout.sections() {
        let at = layout.word_at(WordAt::Section(section));
        memory.atomic_u64(offset(at)).store(SectionWord::WITHHELD.0, SeqCst);
    }
    memory.write(0, &layout.encode());
    Ok(Donation { layout, memory, region })
}

/// Lend memory again that was kept when the node's process ended, under the `key` that it had: whoever has something there goes on. Nothing in it is changed.
///
/// # Errors
/// If it is not the memory of that node, in this format; if the target is at a limit.
pub fn donate_again(
    target: &dyn Target,
    id: NodeId,
    memory: Arc<Memory>,
    key: Key,
) -> Result<Donation, DonateError> {
    let found = u64::try_from(memory.len()).unwrap_or(u64::MAX);
    let too_short = |needed| DonateError::Kept(FormatError::TooShort { needed, found });
    if memory.len() < HEADER_BYTES {
        return Err(too_short(HEADER_BYTES as u64));
    }
    let mut page = [0; HEADER_BYTES];
    memory.read(0, &mut page);
    let layout = Layout::open(&page).map_err(DonateError::Kept)?;
    if layout.node() != id.0 {
        return Err(DonateError::Kept(FormatError::OtherNode { found: layout.node() }));
    }
    if layout.region_bytes() > found {
        return Err(too_short(layout.region_bytes()));
    }
    let shared = Arc::clone(&memory);
    let region =
        target.register_with(shared, Access::ALL, Scope::Anyone, Some(layout.key_table()), Some(key))?;
    Ok(Donation { layout, memory, region })
}

/// An offset into memory that was created with a length that fits.
fn offset(at: u64) -> usize {
    usize::try_from(at).expect("an offset into memory that is mapped")
}
