//! The node's side of the pool: creates the region, opens it to hosts, clears and releases memory.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use aquifer_fabric::{
    Access, Key, KeyEntry, Memory, PageStore, Region, Registration, Scope, StoredPages, Target, TargetError,
    Tenant,
};

use crate::client::{Extent, NodeId};
use crate::error::FormatError;
use crate::figures::NodeFigures;
use crate::layout::{HEADER_BYTES, Layout, NodeClass};
use crate::op::WordAt;
use crate::size::{CHUNK_BYTES, SECTION_BYTES, SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS, SizeClass};
use crate::word::{AlignedRun, SectionWord, SpanState, SpanWord};

/// The bytes of a cleared chunk.
static ZEROS: [u8; 4096] = [0; 4096];
const _: () = assert!(ZEROS.len() as u64 == CHUNK_BYTES);

/// The region of a node, laid out as a pool and registered with the fabric.
///
/// Hosts change the metadata at any time, so each result may be out of date at once.
#[derive(Clone, Debug)]
pub struct NodeMemory {
    /// The offsets of all parts of the region.
    pub layout: Layout,
    /// The memory.
    pub memory: Arc<Memory>,
    /// The address, length and key under which hosts access the region.
    pub region: Region,
    /// The data of a disk node, which are not in the memory.
    store: Option<Arc<dyn PageStore>>,
}

/// Creates the store for the data of a disk node, from the layout of its region.
pub type CreateStore<'a> = &'a dyn Fn(&Layout) -> std::io::Result<Arc<dyn PageStore>>;

impl NodeMemory {
    /// Lends `data_bytes`, rounded down to whole sections, as node `id`.
    ///
    /// Creates the memory, registers it with its table of keys, and writes the format, the header
    /// last.
    ///
    /// # Errors
    /// If the size is not allowed, if there is no memory, or if the target is at a limit.
    pub fn create(target: &dyn Target, id: NodeId, data_bytes: u64) -> Result<Self, NodeMemoryError> {
        Self::create_resizable(target, id, data_bytes, data_bytes, None)
    }

    /// Lends `data_bytes`, which may be 0, of a region for `bytes_max`. The other sections are
    /// offline.
    ///
    /// An offline section that was never lent takes 136 bytes of metadata. A section that goes
    /// offline later keeps all of its metadata.
    ///
    /// `store` is called for a disk node, whose data are not in the memory.
    ///
    /// # Errors
    /// The errors of [`Self::create`]; if `data_bytes` is more than `bytes_max`; the error of
    /// `store`.
    pub fn create_resizable(
        target: &dyn Target,
        id: NodeId,
        data_bytes: u64,
        bytes_max: u64,
        store: Option<CreateStore<'_>>,
    ) -> Result<Self, NodeMemoryError> {
        let size = |cause| NodeMemoryError::Size { bytes: bytes_max, cause };
        let class = if store.is_some() { NodeClass::Disk } else { NodeClass::Memory };
        let layout = Layout::for_bytes(id.0, bytes_max).map_err(size)?.of_class(class);
        let above_max = NodeMemoryError::AboveMax { bytes: data_bytes, bytes_max };
        let lent = u32::try_from(data_bytes / SECTION_BYTES).map_err(|_| above_max)?;
        if lent > layout.sections() {
            return Err(NodeMemoryError::AboveMax { bytes: data_bytes, bytes_max });
        }
        let bytes = layout.region_bytes();
        let len = usize::try_from(bytes).map_err(|_| size(FormatError::Sections { sections: u64::MAX }))?;
        let memory = Memory::create("aquifer-pool", len)
            .map(Arc::new)
            .map_err(|cause| NodeMemoryError::Memory { bytes, cause })?;
        let store = store.map(|create| create(&layout)).transpose().map_err(NodeMemoryError::Store)?;
        let region = target.register_as(registration(&memory, &layout, store.clone()))?;
        for section in lent..layout.sections() {
            let at = layout.word_at(WordAt::Section(section));
            memory.atomic_u64(offset(at)).store(SectionWord::OFFLINE.0, SeqCst);
        }
        memory.write(0, &layout.encode());
        Ok(Self { layout, memory, region, store })
    }

    /// Registers memory that outlived the node's process, under the `key` that it had then.
    ///
    /// The memory is not changed, so hosts keep their extents. `store` has the data of a disk node.
    ///
    /// # Errors
    /// If the memory is not of that node and in this format, or if the target is at a limit.
    pub fn reopen(
        target: &dyn Target,
        id: NodeId,
        memory: Arc<Memory>,
        key: Key,
        store: Option<Arc<dyn PageStore>>,
    ) -> Result<Self, NodeMemoryError> {
        let found = u64::try_from(memory.len()).unwrap_or(u64::MAX);
        let too_short = |needed| NodeMemoryError::Kept(FormatError::TooShort { needed, found });
        if memory.len() < HEADER_BYTES {
            return Err(too_short(HEADER_BYTES as u64));
        }
        let mut page = [0; HEADER_BYTES];
        memory.read(0, &mut page);
        let layout = Layout::decode(&page).map_err(NodeMemoryError::Kept)?;
        if layout.node() != id.0 {
            return Err(NodeMemoryError::Kept(FormatError::OtherNode { found: layout.node() }));
        }
        if layout.region_bytes() > found {
            return Err(too_short(layout.region_bytes()));
        }
        if (layout.class() == NodeClass::Disk) != store.is_some() {
            return Err(NodeMemoryError::Kept(FormatError::OtherClass));
        }
        let new = registration(&memory, &layout, store.clone());
        let region = target.register_as(Registration { key: Some(key), ..new })?;
        Ok(Self { layout, memory, region, store })
    }

    /// Writes the node's figures, which hosts READ.
    pub fn write_figures(&self, figures: NodeFigures) {
        for (index, word) in figures.encode().into_iter().enumerate() {
            self.memory.atomic_u64(offset(self.layout.figures_at()) + index * 8).store(word, SeqCst);
        }
    }

    /// Bytes of free chunks, counted as a client counts them: without spans that are being opened
    /// or closed.
    ///
    /// Reads a word for each section and for each open span.
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

    /// Bytes of the sections that are not offline.
    #[must_use]
    pub fn lent_bytes(&self) -> u64 {
        let lent = (0..self.layout.sections()).filter(|section| !self.is_offline(*section));
        lent.count() as u64 * SECTION_BYTES
    }

    /// The largest group of free spans of a section that all have been used since they were last
    /// cleared.
    ///
    /// To be allocated by [`crate::op::AllocOp::of_group`], which checks that the group is still
    /// free.
    #[must_use]
    pub fn find_uncleared(&self, section: u32) -> Option<AlignedRun> {
        let states = SectionWord(self.word(WordAt::Section(section)));
        if states.empty_spans() == 0 {
            // Reading entries that were never touched would allocate their pages.
            return None;
        }
        let first = section * SECTION_SPANS;
        let is_used = |place: u32| !KeyEntry(self.word(WordAt::span_key(first + place))).is_unowned();
        let used =
            (0..SECTION_SPANS).filter(|place| is_used(*place)).fold(0, |used, place| used | 1 << place);
        (0..=4).rev().find_map(|order| states.find_among(order, used))
    }

    /// A group of 2^`order` free spans of a section. With `in_use`, only if a host has another part
    /// of the section.
    #[must_use]
    pub fn find_free(&self, section: u32, order: u8, in_use: bool) -> Option<AlignedRun> {
        let word = SectionWord(self.section_word(section));
        if in_use && word.bits() == 0 { None } else { word.find(order) }
    }

    /// The spans of a section that are not free, with their owners. The node itself, and heaps, own
    /// spans without a tenant.
    pub fn used_spans(&self, section: u32) -> impl Iterator<Item = (u32, Option<Tenant>)> {
        let free = SectionWord(self.section_word(section)).empty_spans();
        let spans = (0..SECTION_SPANS).filter(move |place| free & 1 << place == 0);
        spans.map(move |place| {
            let span = section * SECTION_SPANS + place;
            (span, KeyEntry(self.word(WordAt::span_key(span))).tenant())
        })
    }

    /// Whether any span of a section is free.
    #[must_use]
    pub fn has_free_spans(&self, section: u32) -> bool {
        SectionWord(self.section_word(section)).empty_spans() != 0
    }

    /// The word of a section.
    #[must_use]
    pub fn section_word(&self, section: u32) -> u64 {
        self.word(WordAt::Section(section))
    }

    /// Whether all spans of a section are free.
    #[must_use]
    pub fn is_section_free(&self, section: u32) -> bool {
        SectionWord(self.section_word(section)).bits() == 0
    }

    /// Whether the node itself has allocated the whole section, so that it does not lend it.
    #[must_use]
    pub fn is_offline(&self, section: u32) -> bool {
        SectionWord(self.section_word(section)).is_offline()
    }

    /// The extent that is a whole section, without a key, as the node allocates it.
    #[must_use]
    pub fn section_extent(&self, section: u32) -> Extent {
        let addr = self.region.base + self.layout.chunk_data_at(section * SECTION_CHUNKS);
        Extent { node: NodeId(self.layout.node()), addr, class: SizeClass::SECTION, key: Key(0) }
    }

    /// Revokes all keys in the entries of an extent that the node has allocated.
    ///
    /// Accesses by these keys may still be in flight. [`Target::expel`] waits for their end.
    ///
    /// # Panics
    /// If it is not an extent of this memory.
    pub fn revoke_keys(&self, extent: &Extent) {
        let (chunk, class) = (self.chunk_of(extent), extent.class);
        let revoke = |at| {
            let entry = KeyEntry(self.word(at)).without_key();
            self.memory.atomic_u64(offset(self.layout.word_at(at))).store(entry.0, SeqCst);
        };
        Self::entries_of(chunk, class).for_each(revoke);
    }

    /// Writes zeros over an extent that the node has allocated, and over its entries in `keys[]`.
    ///
    /// All keys must have been revoked and expelled before.
    ///
    /// # Panics
    /// If it is not an extent of this memory.
    pub fn clear(&self, extent: &Extent) {
        let (chunk, class) = (self.chunk_of(extent), extent.class);
        if self.clear_store(chunk, class) {
            return self.clear_entries(chunk, class);
        }
        // Zeros are written instead of punching a hole: a device keeps the pages that it has
        // pinned.
        for chunk in chunk..chunk + class.chunks() {
            self.memory.write(offset(self.layout.chunk_data_at(chunk)), &ZEROS);
        }
        self.clear_entries(chunk, class);
    }

    /// Returns the pages of whole spans that the node has allocated to the system, and clears their
    /// entries in `keys[]`. The spans read as zeros when they are touched again. The room on the
    /// disk of a disk node stays reserved.
    ///
    /// All keys must have been revoked and expelled before.
    ///
    /// # Errors
    /// If the system refuses. Then nothing has changed.
    ///
    /// # Panics
    /// If the extent is not whole spans of this memory.
    pub fn release_pages(&self, extent: &Extent) -> std::io::Result<()> {
        let chunk = self.chunk_of(extent);
        assert!(!extent.class.is_within_span(), "part of a span is not released");
        if self.clear_store(chunk, extent.class) {
            self.clear_entries(chunk, extent.class);
            return Ok(());
        }
        self.memory.punch(offset(self.layout.chunk_data_at(chunk)), offset(extent.class.bytes()))?;
        self.clear_entries(chunk, extent.class);
        Ok(())
    }

    /// Clears the data of a disk node. Returns false if the data are in memory.
    fn clear_store(&self, chunk: u32, class: SizeClass) -> bool {
        let Some(store) = &self.store else { return false };
        let start = self.layout.chunk_data_at(chunk);
        store.clear(start..start + class.bytes());
        true
    }

    /// Clears the entries in `keys[]` of an extent of whole spans: no tenant owns them, and no key
    /// opens them.
    pub fn clear_entries(&self, chunk: u32, class: SizeClass) {
        let put = |at| self.memory.atomic_u64(offset(self.layout.word_at(at))).store(0, SeqCst);
        Self::entries_of(chunk, class).for_each(put);
    }

    /// The spans of an extent of whole spans.
    ///
    /// # Panics
    /// If it is not an extent of this memory.
    #[must_use]
    pub fn spans_of(&self, extent: &Extent) -> Range<u32> {
        let first = self.chunk_of(extent) / SPAN_CHUNKS;
        first..first + extent.class.chunks() / SPAN_CHUNKS
    }

    /// The section of an extent.
    ///
    /// # Panics
    /// If it is not an extent of this memory.
    #[must_use]
    pub fn section_of(&self, extent: &Extent) -> u32 {
        self.chunk_of(extent) / SECTION_CHUNKS
    }

    fn chunk_of(&self, extent: &Extent) -> u32 {
        let chunk = extent.addr.checked_sub(self.region.base).and_then(|offset| self.layout.chunk_of(offset));
        chunk.expect("an extent of this memory")
    }

    /// The entries in `keys[]` of all extents that could begin within these whole spans.
    fn entries_of(chunk: u32, class: SizeClass) -> impl Iterator<Item = WordAt> {
        let chunks = (chunk..chunk + class.chunks()).map(WordAt::chunk_key);
        let spans = (chunk / SPAN_CHUNKS..(chunk + class.chunks()) / SPAN_CHUNKS).map(WordAt::span_key);
        let section = (class == SizeClass::SECTION).then_some(WordAt::section_key(chunk / SECTION_CHUNKS));
        chunks.chain(spans).chain(section)
    }

    fn word(&self, at: WordAt) -> u64 {
        self.memory.atomic_u64(offset(self.layout.word_at(at))).load(Relaxed)
    }
}

/// The registration of a node's memory under a new key.
fn registration(memory: &Arc<Memory>, layout: &Layout, store: Option<Arc<dyn PageStore>>) -> Registration {
    let table = Some(layout.key_table());
    let stored = store.map(|store| StoredPages { range: layout.data_at()..layout.region_bytes(), store });
    Registration { table, stored, ..Registration::plain(Arc::clone(memory), Access::ALL, Scope::Anyone) }
}

/// Why memory could not be lent.
#[derive(Debug, thiserror::Error)]
pub enum NodeMemoryError {
    /// The size is not allowed by the format.
    #[error("{bytes} bytes cannot be lent: {cause}")]
    Size {
        /// Bytes requested.
        bytes: u64,
        /// The reason.
        cause: FormatError,
    },
    /// More bytes are to be lent than the region has room for.
    #[error("{bytes} bytes cannot be lent: the most is {bytes_max} bytes")]
    AboveMax {
        /// Bytes requested.
        bytes: u64,
        /// Most bytes that the region has room for.
        bytes_max: u64,
    },
    /// The system did not provide the memory.
    #[error("cannot allocate {bytes} bytes of memory: {cause}: lend less, or stop other programs")]
    Memory {
        /// Bytes requested, metadata included.
        bytes: u64,
        /// The error of the system.
        cause: std::io::Error,
    },
    /// The store for the data of a disk node could not be created.
    #[error("cannot reserve room on the disk: {0}")]
    Store(#[source] std::io::Error),
    /// The memory that was kept from the node's previous process is not this node's memory.
    #[error("the memory that was kept cannot be lent again: {0}")]
    Kept(#[source] FormatError),
    /// The fabric could not register the memory.
    #[error("cannot open the memory to the cluster: {0}")]
    Target(#[from] TargetError),
}

/// An offset into memory that was created with a length that fits.
fn offset(at: u64) -> usize {
    usize::try_from(at).expect("an offset into memory that is mapped")
}
