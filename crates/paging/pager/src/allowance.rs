//! The allowance of a run: the pool memory that it may allocate beside other runs.

use aquifer_pool::NodeClass;

/// The pool memory that a run may allocate.
///
/// Computed by the caller of a sender, which knows the other runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Allowance {
    /// Bytes that the run may allocate.
    pub bytes_max: u64,
    /// Total bytes on all memory nodes that the run must leave free for others.
    pub leave_free: u64,
    /// Total bytes on all disk nodes that the run must leave free for others.
    pub leave_free_on_disk: u64,
}

impl Allowance {
    /// No limit.
    pub const ALL: Self = Self { bytes_max: u64::MAX, leave_free: 0, leave_free_on_disk: 0 };

    /// Total bytes on all nodes of a class that the run must leave free for others.
    pub(crate) const fn leave_free_on(&self, class: NodeClass) -> u64 {
        match class {
            NodeClass::Memory => self.leave_free,
            NodeClass::Disk => self.leave_free_on_disk,
        }
    }

    /// Subtracts allocated bytes.
    pub(crate) fn spend(&mut self, bytes: u64) {
        self.bytes_max = self.bytes_max.saturating_sub(bytes);
    }
}
