//! The owner's side: memory laid out as a pool and opened to the cluster.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use aquifer_fabric::{Access, KeyEntry, Memory, Region, Scope, Target, TargetError};

use crate::cache::place_in_section;
use crate::client::{Extent, NodeId};
use crate::error::FormatError;
use crate::layout::Layout;
use crate::op::WordAt;
use crate::size::{CHUNK_BYTES, SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS, SizeClass};
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
    /// The largest group of a section's spans that are all free and of which some were used since they were cleared. Hosts may change them
    /// meanwhile: a guess, to be taken by [`crate::op::AllocOp::clearing`].
    #[must_use]
    pub fn uncleared(&self, section: u32) -> Option<Run> {
        let states = SectionWord(self.word(WordAt::Section(section)));
        let first = section * SECTION_SPANS;
        let is_used = |span: &u32| !KeyEntry(self.word(WordAt::span_key(*span))).is_nobodys();
        let mut used =
            (first..first + SECTION_SPANS).filter(is_used).map(|span| Run::single(place_in_section(span)));
        let used = used.rfind(|span| states.all(*span, SpanState::Empty))?;
        let around = |order: u8| Run::new(used.first() >> order << order, order);
        (0..=4).rev().filter_map(around).find(|group| states.all(*group, SpanState::Empty))
    }

    /// A section's word, as it is now.
    #[must_use]
    pub fn section_word(&self, section: u32) -> u64 {
        self.word(WordAt::Section(section))
    }

    /// Clear what the node has taken for that: nobody else may have it. Who had got at it by a key must be out before ([`Target::expel`]).
    ///
    /// # Panics
    /// If it is no extent of this memory.
    pub fn clear(&self, taken: &Extent) {
        let chunk = taken.addr.checked_sub(self.region.base).and_then(|offset| self.layout.chunk_of(offset));
        let (chunk, class) = (chunk.expect("an extent of this memory"), taken.class);
        // Written, not punched out: devices keep the pages that they once were given.
        for chunk in chunk..chunk + class.chunks() {
            self.memory.write(offset(self.layout.chunk_data_at(chunk)), &ZEROS);
        }
        self.disown(chunk, class);
    }

    /// Of that, the part in the metadata: it is nobody's, and no key opens it.
    pub fn disown(&self, chunk: u32, class: SizeClass) {
        let put = |at| self.memory.atomic_u64(offset(self.layout.word_at(at))).store(0, SeqCst);
        (chunk..chunk + class.chunks()).for_each(|chunk| put(WordAt::chunk_key(chunk)));
        let spans = chunk / SPAN_CHUNKS..(chunk + class.chunks()) / SPAN_CHUNKS;
        spans.for_each(|span| put(WordAt::span_key(span)));
        if class == SizeClass::SECTION {
            put(WordAt::section_key(chunk / SECTION_CHUNKS));
        }
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
    /// The system has none.
    #[error("cannot have {bytes} bytes of memory: {cause}: lend less, or stop something else")]
    Memory {
        /// What was asked for, with the metadata.
        bytes: u64,
        /// What the system said.
        cause: std::io::Error,
    },
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
    let size = |cause| DonateError::Size { bytes: data_bytes, cause };
    let layout = Layout::for_bytes(id.0, data_bytes).map_err(size)?;
    let bytes = layout.region_bytes();
    let len = usize::try_from(bytes).map_err(|_| size(FormatError::Sections { sections: u64::MAX }))?;
    let memory = Memory::create("aquifer-pool", len)
        .map(Arc::new)
        .map_err(|cause| DonateError::Memory { bytes, cause })?;
    let lent = Arc::clone(&memory);
    let region = target.register_with(lent, Access::ALL, Scope::Anyone, Some(layout.key_table()))?;
    memory.write(0, &layout.encode());
    Ok(Donation { layout, memory, region })
}

/// An offset into memory that was created with a length that fits.
fn offset(at: u64) -> usize {
    usize::try_from(at).expect("an offset into memory that is mapped")
}
