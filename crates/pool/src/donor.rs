//! The owner's side: memory laid out as a pool and opened to the cluster.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_fabric::{Access, Memory, Region, Scope, Target, TargetError, WindowSpec};

use crate::client::NodeId;
use crate::error::FormatError;
use crate::layout::Layout;
use crate::op::WordAt;
use crate::size::{CHUNK_BYTES, SECTION_BYTES, SECTION_SPANS, SPAN_CHUNKS};
use crate::word::{SectionWord, SpanState, SpanWord};

/// A node's memory, lent.
#[derive(Debug)]
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
        let word = |at| self.memory.atomic_u64(offset(self.layout.word_at(at))).load(Relaxed);
        let free_of = |section: u32| {
            let states = SectionWord(word(WordAt::Section(section)));
            let empty: u64 = states.spans_in(SpanState::Empty).map(|_| u64::from(SPAN_CHUNKS)).sum();
            let open = states.spans_in(SpanState::Partial).chain(states.spans_in(SpanState::Contended));
            let span = |index: u8| SpanWord(word(WordAt::Span(section * SECTION_SPANS + u32::from(index))));
            empty + open.map(|index| u64::from(span(index).free_chunks())).sum::<u64>()
        };
        (0..self.layout.sections()).map(free_of).sum::<u64>() * CHUNK_BYTES
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

/// Lend `data_bytes`, rounded down to whole sections, as node `id`: create the memory, register it, bind a window for
/// each section, and write the format, its header last.
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
    let region = target.register(Arc::clone(&memory), Access::ALL, Scope::Anyone)?;
    for section in 0..layout.sections() {
        let start = region.base + layout.section_data_at(section);
        let range = start..start + SECTION_BYTES;
        let key = target.bind(&WindowSpec { range, access: Access::READ_WRITE, scope: Scope::Anyone })?;
        // Until windows come in full each entry of a section opens the section; the spare key is 0, none.
        for entry in layout.key_entries(section) {
            memory.write(offset(entry), &u64::from(key.0).to_le_bytes());
        }
    }
    memory.write(0, &layout.encode());
    Ok(Donation { layout, memory, region })
}

/// An offset into memory that was created with a length that fits.
fn offset(at: u64) -> usize {
    usize::try_from(at).expect("an offset into memory that is mapped")
}
