//! The schemes of the paper: the ids of objects, and the sizes of their headers (Table 3).

use super::id_mode::IdMode;

/// A scheme.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Scheme {
    /// Name of the scheme's column.
    pub name: &'static str,
    /// How objects get their ids.
    pub mode: IdMode,
    /// Whether blocks are merged at all.
    pub merges: bool,
    /// Whether a block may be split over two.
    pub may_split: bool,
    /// Bits of an object's header, without lock and version: all but Mesh need these.
    pub header_bits: u32,
}

/// The home block address that CoRM stores with each object (§4.4.1).
const HOME_BITS: u32 = 28;

const fn random(name: &'static str, bits: u8) -> Scheme {
    let header_bits = HOME_BITS + bits as u32;
    Scheme { name, mode: IdMode::Random { bits }, merges: true, may_split: false, header_bits }
}

/// No compaction.
pub const NONE: Scheme =
    Scheme { name: "none", mode: IdMode::Numbers, merges: false, may_split: false, header_bits: 0 };
/// Mesh: objects keep their offsets, and there are no headers.
pub const MESH: Scheme =
    Scheme { name: "Mesh", mode: IdMode::Offsets, merges: true, may_split: false, header_bits: 0 };
/// CoRM without ids.
pub const CORM_0: Scheme = Scheme { name: "CoRM-0", header_bits: HOME_BITS, ..MESH };
/// CoRM with ids of 8, 12 and 16 bits.
pub const CORM_8: Scheme = random("CoRM-8", 8);
pub const CORM_12: Scheme = random("CoRM-12", 12);
pub const CORM_16: Scheme = random("CoRM-16", 16);
/// Aquifer: object numbers, and whole blocks only.
pub const NUMBERS: Scheme = Scheme {
    name: "Aquifer",
    mode: IdMode::Numbers,
    merges: true,
    may_split: false,
    header_bits: aquifer_objects::header::NUMBER_BITS,
};
/// Aquifer: blocks that fit into no other one are split over two.
pub const SPLIT: Scheme = Scheme { name: "Aquifer, split", may_split: true, ..NUMBERS };

/// All schemes.
pub const ALL: [Scheme; 8] = [NONE, MESH, CORM_0, CORM_8, CORM_12, CORM_16, NUMBERS, SPLIT];

impl Scheme {
    /// Bytes of an object's slot, with its header.
    pub fn slot_bytes(self, object_bytes: u32) -> f64 {
        f64::from(object_bytes) + f64::from(self.header_bits) / 8.0
    }
}
