//! Report on a heap for operators.

use serde::{Deserialize, Serialize};

/// The state of a heap.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct HeapReport {
    /// The node.
    pub node: u16,
    /// The user.
    pub tenant: u32,
    /// The most memory that the heap's blocks may take.
    pub limit_bytes: u64,
    /// Bytes of all blocks.
    pub held_bytes: u64,
    /// Bytes of the slots in use, headers included.
    pub live_bytes: u64,
    /// Number of objects.
    pub objects: u64,
    /// Memory that the objects take, by the system's count.
    pub allocated_bytes: u64,
    /// Memory that names and records take, by the system's count.
    pub table_bytes: u64,
    /// Addresses of blocks in use.
    pub addresses: u64,
    /// Merges since the service was started.
    pub merges: u64,
    /// Pointers that were corrected since the service was started.
    pub corrections: u64,
    /// The size classes that have objects.
    pub classes: Vec<ClassReport>,
}

/// The state of a size class.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ClassReport {
    /// Bytes of a slot, the header included.
    pub slot_bytes: u32,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Bytes of the class's blocks.
    pub held_bytes: u64,
    /// Number of objects.
    pub objects: u64,
    /// Whether many objects were allocated or freed in the last second. Then the class is compacted
    /// only when its blocks take twice as much as its objects.
    #[serde(rename = "hot")]
    pub is_hot: bool,
}
