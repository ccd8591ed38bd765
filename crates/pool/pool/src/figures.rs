//! Figures of a node: how much it lends, how much of that is free, and what it recalls. The node
//! writes them into its region, and each host READs them about once a second.
//!
//! Format: `docs/formats/pool.md`, "Figures".

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::RwLock;

use crate::client::{Extent, NodeId};
use crate::layout::Layout;

/// Bytes of the figures.
pub const FIGURES_BYTES: usize = WORDS * 8;
/// Number of words of the figures; the last one is the checksum.
const WORDS: usize = 5;
/// Entries of a section in `logs[]` that have no other use.
const UNUSED_ENTRIES: usize = 15;
const _: () = assert!(WORDS <= UNUSED_ENTRIES);

/// The figures of a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NodeFigures {
    /// Bytes that hosts can allocate.
    pub free_bytes: u64,
    /// Bytes that the node lends: free or in use.
    pub lent_bytes: u64,
    /// Bytes that the node recalls: lent memory that it wants back, and that is in use. 0 if it
    /// recalls nothing.
    pub recalled_bytes: u64,
    /// The first section that the node recalls. Hosts move what they have there and behind it.
    /// Without meaning if the node recalls nothing.
    pub first_recalled: u32,
}

impl NodeFigures {
    /// Encodes the figures as the words that hosts READ.
    #[must_use]
    pub fn encode(self) -> [u64; WORDS] {
        let values = [self.free_bytes, self.lent_bytes, self.recalled_bytes, u64::from(self.first_recalled)];
        [values[0], values[1], values[2], values[3], checksum(&values)]
    }

    /// Decodes the figures that a READ returned; `None` if the node was writing them, or has
    /// written none yet.
    #[must_use]
    pub fn decode(bytes: &[u8; FIGURES_BYTES]) -> Option<Self> {
        let mut words = [0; WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().ok()?);
        }
        let [free_bytes, lent_bytes, recalled_bytes, first_recalled, sum] = words;
        let is_whole = sum == checksum(&[free_bytes, lent_bytes, recalled_bytes, first_recalled]);
        let first_recalled = u32::try_from(first_recalled).ok()?;
        is_whole.then_some(Self { free_bytes, lent_bytes, recalled_bytes, first_recalled })
    }

    /// Whether the node recalls memory.
    #[must_use]
    pub const fn recalls_memory(&self) -> bool {
        self.recalled_bytes > 0
    }
}

/// CRC32C of the values.
fn checksum(values: &[u64; WORDS - 1]) -> u64 {
    let mut bytes = [0; (WORDS - 1) * 8];
    for (place, value) in bytes.chunks_exact_mut(8).zip(values) {
        place.copy_from_slice(&value.to_le_bytes());
    }
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &bytes)
}

/// Memory that a node recalls: all behind an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecalledMemory {
    /// The node.
    pub node: NodeId,
    /// The address in the node's region.
    pub from: u64,
}

impl RecalledMemory {
    /// The memory that a node recalls by its figures; `None` if it recalls nothing. `base` is the
    /// address of the node's region.
    pub(crate) fn of(node: NodeId, figures: &NodeFigures, base: u64, layout: &Layout) -> Option<Self> {
        let first = figures.first_recalled.min(layout.sections());
        figures.recalls_memory().then(|| Self { node, from: base + layout.section_data_at(first) })
    }

    /// Whether the node recalls an extent.
    #[must_use]
    pub fn includes(&self, extent: &Extent) -> bool {
        extent.node == self.node && extent.addr >= self.from
    }
}

/// The latest figures of all nodes, as a host has read them.
#[derive(Debug, Default)]
pub struct FigureTable {
    nodes: RwLock<BTreeMap<NodeId, ReadFigures>>,
    /// Number of figures that were set so far.
    reads: AtomicU64,
}

/// Figures with the number of times that they were read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadFigures {
    /// The figures.
    pub figures: NodeFigures,
    /// The number of the read. It differs from that of all earlier figures of the node.
    pub read: u64,
}

impl FigureTable {
    /// Records figures that were just read.
    pub fn set(&self, node: NodeId, figures: NodeFigures) {
        let read = self.reads.fetch_add(1, Relaxed) + 1;
        self.nodes.write().insert(node, ReadFigures { figures, read });
    }

    /// Forgets the figures of a node that does not answer.
    pub fn forget(&self, node: NodeId) {
        self.nodes.write().remove(&node);
    }

    /// The latest figures of a node; `None` if they are not known.
    #[must_use]
    pub fn get(&self, node: NodeId) -> Option<ReadFigures> {
        self.nodes.read().get(&node).copied()
    }

    /// The latest figures of all nodes.
    #[must_use]
    pub fn all(&self) -> Vec<(NodeId, NodeFigures)> {
        self.nodes.read().iter().map(|(node, read)| (*node, read.figures)).collect()
    }
}

#[cfg(test)]
mod tests {
    use aquifer_fabric::Key;

    use super::*;
    use crate::size::{SECTION_BYTES, SizeClass};

    const FIGURES: NodeFigures =
        NodeFigures { free_bytes: 4096, lent_bytes: 8 << 20, recalled_bytes: 2 << 20, first_recalled: 3 };

    fn bytes_of(words: [u64; WORDS]) -> [u8; FIGURES_BYTES] {
        let mut bytes = [0; FIGURES_BYTES];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn figures_are_decoded_only_if_they_are_whole() {
        let bytes = bytes_of(FIGURES.encode());
        assert_eq!(NodeFigures::decode(&bytes), Some(FIGURES));
        assert_eq!(NodeFigures::decode(&[0; FIGURES_BYTES]), None, "nothing was written yet");
        for at in 0..FIGURES_BYTES * 8 {
            let mut torn = bytes;
            torn[at / 8] ^= 1 << (at % 8);
            assert_eq!(NodeFigures::decode(&torn), None, "bit {at}");
        }
    }

    #[test]
    fn a_node_recalls_the_memory_from_a_section_on() {
        let layout = Layout::new(7, 8).unwrap();
        let base = 1 << 40;
        let recalled = RecalledMemory::of(NodeId(7), &FIGURES, base, &layout).unwrap();
        let extent = |node, section: u32| Extent {
            node: NodeId(node),
            addr: base + layout.section_data_at(section),
            class: SizeClass::SECTION,
            key: Key(1),
        };
        assert!(recalled.includes(&extent(7, 3)) && recalled.includes(&extent(7, 7)));
        assert!(!recalled.includes(&extent(7, 2)) && !recalled.includes(&extent(6, 3)));
        let last = Extent { addr: recalled.from - SECTION_BYTES / 2, ..extent(7, 3) };
        assert!(!recalled.includes(&last));
        let nothing = NodeFigures { recalled_bytes: 0, ..FIGURES };
        assert_eq!(RecalledMemory::of(NodeId(7), &nothing, base, &layout), None);
    }

    #[test]
    fn each_read_has_another_number() {
        let table = FigureTable::default();
        assert_eq!(table.get(NodeId(1)), None);
        table.set(NodeId(1), FIGURES);
        let first = table.get(NodeId(1)).unwrap();
        table.set(NodeId(1), FIGURES);
        let second = table.get(NodeId(1)).unwrap();
        assert!(first.figures == second.figures && first.read != second.read);
        table.forget(NodeId(1));
        assert_eq!(table.get(NodeId(1)), None);
        table.set(NodeId(1), FIGURES);
        assert!(table.get(NodeId(1)).unwrap().read > second.read);
    }
}
