//! What a run may allocate of the pool beside other runs.

/// What a run may allocate.
///
/// The caller of a sender knows the other runs. The pager only keeps to what it is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Allowance {
    /// Bytes that it may allocate.
    pub bytes_max: u64,
    /// Bytes on all nodes together that it must leave free for others.
    pub leave_free: u64,
}

impl Allowance {
    /// All that there is.
    pub const ALL: Self = Self { bytes_max: u64::MAX, leave_free: 0 };

    /// Subtracts what was allocated.
    pub(crate) fn spend(&mut self, bytes: u64) {
        self.bytes_max = self.bytes_max.saturating_sub(bytes);
    }
}
