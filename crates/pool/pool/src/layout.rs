//! The layout of a node's region, and the header page that describes it.

use aquifer_fabric::KeyTable;
use aquifer_fabric::key_table::{ROW_BYTES, ROW_ENTRIES};

use crate::error::FormatError;
use crate::mutation::Mutation;
use crate::op::WordAt;
use crate::size::{CHUNK_BYTES, SECTION_BYTES, SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS};

#[cfg(target_endian = "big")]
compile_error!("the pool compares and swaps little-endian words in memory: it needs a little-endian machine");

/// The first eight bytes of a region.
pub const MAGIC: [u8; 8] = *b"AQFRPOOL";
/// The version of the format that this code writes, and the only one that it reads.
pub const VERSION: u32 = 3;
/// Bytes of the header page.
pub const HEADER_BYTES: usize = 4096;
/// Most sections of a region: 1 TiB of data.
pub const SECTIONS_MAX: u32 = 1 << 19;
/// Entries of a section in `keys[]`, and in `logs[]`: 1 for the section, 15 unused, 16 for its
/// spans, 512 for its chunks.
pub const SECTION_ENTRIES: u32 = 16 + SECTION_SPANS + SECTION_CHUNKS;
/// Bytes of a section's entries in `keys[]`.
const KEYS_BYTES: u64 = SECTION_ENTRIES as u64 * KEY_ENTRY_BYTES;
/// Bytes of a section's entries in `logs[]`.
const LOGS_BYTES: u64 = SECTION_ENTRIES as u64 * LOG_ENTRY_BYTES;
const _: () = assert!(SECTION_ENTRIES as u64 == ROW_ENTRIES && SECTION_BYTES == ROW_BYTES);
/// Bytes of an entry in `keys[]`: a key and an owner.
pub const KEY_ENTRY_BYTES: u64 = 8;
/// Bytes of an entry in `logs[]`: a record and a number.
pub const LOG_ENTRY_BYTES: u64 = 8;

/// Bytes of the header page that are used; the rest is zero.
const USED: usize = 84;
/// Offset of the node's class in the header page: 0 memory, 1 disk.
const CLASS_AT: usize = 36;
/// Offset of the checksum in the header page.
const CHECKSUM_AT: usize = 80;

/// The layout of a node's region: offsets of all parts, from the region's start.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Layout {
    node: u16,
    sections: u32,
    class: NodeClass,
}

/// The class of a node: where its data are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum NodeClass {
    /// In its machine's memory.
    #[default]
    Memory,
    /// On a disk, which is slower, and has no atomics.
    Disk,
}

impl Layout {
    /// Creates the layout of a region with this number of sections.
    ///
    /// # Errors
    /// If there is no section, or more than [`SECTIONS_MAX`].
    pub fn new(node: u16, sections: u32) -> Result<Self, FormatError> {
        if sections == 0 || sections > SECTIONS_MAX {
            return Err(FormatError::Sections { sections: sections.into() });
        }
        Ok(Self { node, sections, class: NodeClass::Memory })
    }

    /// Creates the layout of a region for `data_bytes`, rounded down to whole sections.
    ///
    /// # Errors
    /// If `data_bytes` is less than a section, or more than [`SECTIONS_MAX`] sections.
    pub fn for_bytes(node: u16, data_bytes: u64) -> Result<Self, FormatError> {
        let sections = data_bytes / SECTION_BYTES;
        Self::new(node, u32::try_from(sections).map_err(|_| FormatError::Sections { sections })?)
    }

    /// Changes the class of the node.
    #[must_use]
    pub const fn of_class(self, class: NodeClass) -> Self {
        Self { class, ..self }
    }

    /// The node's class.
    #[must_use]
    pub const fn class(&self) -> NodeClass {
        self.class
    }

    /// The node's number.
    #[must_use]
    pub const fn node(&self) -> u16 {
        self.node
    }

    /// The number of sections.
    #[must_use]
    pub const fn sections(&self) -> u32 {
        self.sections
    }

    /// The number of spans.
    #[must_use]
    pub const fn spans(&self) -> u32 {
        self.sections * SECTION_SPANS
    }

    /// The number of chunks.
    #[must_use]
    pub const fn chunks(&self) -> u32 {
        self.sections * SECTION_CHUNKS
    }

    /// Offset of `sections[]`.
    const fn sections_at(&self) -> u64 {
        HEADER_BYTES as u64
    }

    /// Offset of `spans[]`.
    const fn spans_at(&self) -> u64 {
        page_up(self.sections_at() + self.sections as u64 * 8)
    }

    /// Offset of `keys[]`.
    const fn keys_at(&self) -> u64 {
        page_up(self.spans_at() + self.spans() as u64 * 8)
    }

    /// Offset of `logs[]`.
    const fn logs_at(&self) -> u64 {
        page_up(self.keys_at() + self.sections as u64 * KEYS_BYTES)
    }

    /// Offset of the data, a multiple of a section.
    #[must_use]
    pub const fn data_at(&self) -> u64 {
        let end = self.logs_at() + self.sections as u64 * LOGS_BYTES;
        end.next_multiple_of(SECTION_BYTES)
    }

    /// Bytes of the whole region.
    #[must_use]
    pub const fn region_bytes(&self) -> u64 {
        self.data_at() + self.data_bytes()
    }

    /// Bytes of the data.
    #[must_use]
    pub const fn data_bytes(&self) -> u64 {
        self.sections as u64 * SECTION_BYTES
    }

    /// Offset of a control word, or of an entry in `logs[]` or `keys[]`.
    #[must_use]
    pub const fn word_at(&self, at: WordAt) -> u64 {
        match at {
            WordAt::Section(index) => self.sections_at() + index as u64 * 8,
            WordAt::Span(index) => self.spans_at() + index as u64 * 8,
            WordAt::Log(index) => self.logs_at() + index as u64 * LOG_ENTRY_BYTES,
            WordAt::Key(index) => self.keys_at() + index as u64 * KEY_ENTRY_BYTES,
        }
    }

    /// Offset of the node's figures: the entries of `logs[]` behind that of the first section,
    /// which have no other use.
    #[must_use]
    pub const fn figures_at(&self) -> u64 {
        self.logs_at() + LOG_ENTRY_BYTES
    }

    /// The place of the key table, for the fabric.
    #[must_use]
    pub const fn key_table(&self) -> KeyTable {
        KeyTable { entries_at: self.keys_at(), data: self.data_at()..self.region_bytes() }
    }

    /// Offset of a section's data.
    #[must_use]
    pub const fn section_data_at(&self, section: u32) -> u64 {
        self.data_at() + section as u64 * SECTION_BYTES
    }

    /// Offset of a chunk's data.
    #[must_use]
    pub const fn chunk_data_at(&self, chunk: u32) -> u64 {
        self.data_at() + chunk as u64 * CHUNK_BYTES
    }

    /// The chunk that begins at an offset; `None` if no chunk does.
    #[must_use]
    pub fn chunk_of(&self, offset: u64) -> Option<u32> {
        let inside = offset.checked_sub(self.data_at())?;
        if inside % CHUNK_BYTES != 0 {
            return None;
        }
        u32::try_from(inside / CHUNK_BYTES).ok().filter(|&chunk| chunk < self.chunks())
    }

    /// Encodes the header page.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut page = [0; HEADER_BYTES];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            page[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&MAGIC);
        put(&VERSION.to_le_bytes());
        put(&u32::try_from(HEADER_BYTES).unwrap_or(u32::MAX).to_le_bytes());
        put(&u32::from(self.node).to_le_bytes());
        put(&u32::try_from(CHUNK_BYTES).unwrap_or(u32::MAX).to_le_bytes());
        put(&SPAN_CHUNKS.to_le_bytes());
        put(&SECTION_SPANS.to_le_bytes());
        put(&self.sections.to_le_bytes());
        put(&u32::from(self.class == NodeClass::Disk).to_le_bytes());
        for offset in [self.sections_at(), self.spans_at(), self.keys_at(), self.logs_at(), self.data_at()] {
            put(&offset.to_le_bytes());
        }
        let sum = checksum(&page);
        page[CHECKSUM_AT..USED].copy_from_slice(&sum.to_le_bytes());
        page
    }

    /// Decodes the header page of a region, which another process wrote.
    ///
    /// # Errors
    /// If a byte of the page differs from the bytes that this version writes.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let page: &[u8; HEADER_BYTES] = bytes
            .get(..HEADER_BYTES)
            .and_then(|page| page.try_into().ok())
            .ok_or(FormatError::Cut { bytes: bytes.len() })?;
        if page[..8] != MAGIC {
            return Err(FormatError::Magic);
        }
        let version = u32_at(page, 8);
        if version != VERSION {
            return Err(FormatError::Version { version });
        }
        if u32_at(page, CHECKSUM_AT) != checksum(page) {
            return Err(FormatError::Checksum);
        }
        let node = u32_at(page, 16);
        let node = u16::try_from(node).map_err(|_| FormatError::Node { node })?;
        let class = if u32_at(page, CLASS_AT) == 1 { NodeClass::Disk } else { NodeClass::Memory };
        let layout = Self::new(node, u32_at(page, 32))?.of_class(class);
        // All other fields, and the zeros behind them, follow from these three.
        match layout.encode().iter().zip(page).position(|(expected, found)| expected != found) {
            Some(40..CHECKSUM_AT) if Mutation::TrustOffsets.is_active() => Ok(layout),
            None => Ok(layout),
            Some(at) => Err(FormatError::Unknown { at }),
        }
    }
}

/// Rounds an offset up to a page.
const fn page_up(offset: u64) -> u64 {
    offset.next_multiple_of(CHUNK_BYTES)
}

/// Reads a little-endian integer of the header page.
fn u32_at(page: &[u8; HEADER_BYTES], at: usize) -> u32 {
    u32::from_le_bytes([page[at], page[at + 1], page[at + 2], page[at + 3]])
}

/// CRC32C of the header page with its checksum field as zero.
fn checksum(page: &[u8; HEADER_BYTES]) -> u32 {
    let mut page = *page;
    page[CHECKSUM_AT..USED].fill(0);
    let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &page);
    u32::try_from(sum).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_hold_from_one_to_the_most_sections() {
        assert!(matches!(Layout::new(1, 0), Err(FormatError::Sections { sections: 0 })));
        assert!(Layout::new(1, 1).is_ok());
        assert!(Layout::new(1, SECTIONS_MAX).is_ok());
        assert!(matches!(Layout::new(1, SECTIONS_MAX + 1), Err(FormatError::Sections { .. })));
        assert!(matches!(
            Layout::for_bytes(1, SECTION_BYTES - 1),
            Err(FormatError::Sections { sections: 0 })
        ));
        assert!(matches!(Layout::for_bytes(1, u64::MAX), Err(FormatError::Sections { .. })));
        assert_eq!(Layout::for_bytes(1, 3 * SECTION_BYTES - 1), Layout::new(1, 2));
    }

    #[test]
    fn parts_do_not_overlap() {
        for sections in [1, 2, 511, 512, 513, SECTIONS_MAX] {
            let layout = Layout::new(7, sections).expect("an allowed number of sections");
            let last_section = layout.word_at(WordAt::Section(sections - 1)) + 8;
            let last_span = layout.word_at(WordAt::Span(layout.spans() - 1)) + 8;
            let last_key = layout.word_at(WordAt::section_key(sections - 1)) + KEYS_BYTES;
            assert!(layout.sections_at() >= 4096 && last_section <= layout.spans_at());
            assert!(last_span <= layout.keys_at() && last_key <= layout.logs_at());
            assert!(layout.logs_at() + u64::from(sections) * LOGS_BYTES <= layout.data_at());
            assert_eq!(layout.data_at() % SECTION_BYTES, 0);
            assert_eq!(layout.chunk_of(layout.data_at()), Some(0));
            assert_eq!(layout.chunk_of(layout.region_bytes() - CHUNK_BYTES), Some(layout.chunks() - 1));
            assert_eq!(layout.chunk_of(layout.region_bytes()), None);
            assert_eq!(layout.chunk_of(layout.data_at() - CHUNK_BYTES), None);
            assert_eq!(layout.chunk_of(layout.data_at() + 1), None);
        }
    }
}
