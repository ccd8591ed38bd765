//! The allowance of a run: the pool memory that it may allocate beside other runs.

/// The pool memory that a run may allocate.
///
/// Computed by the caller of a sender, which knows the other runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Allowance {
    /// Bytes that the run may allocate.
    pub bytes_max: u64,
    /// Total bytes on all nodes that the run must leave free for others.
    pub leave_free: u64,
}

impl Allowance {
    /// No limit.
    pub const ALL: Self = Self { bytes_max: u64::MAX, leave_free: 0 };

    /// Subtracts allocated bytes.
    pub(crate) fn spend(&mut self, bytes: u64) {
        self.bytes_max = self.bytes_max.saturating_sub(bytes);
    }
}
