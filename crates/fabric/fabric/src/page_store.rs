//! Part of a region whose bytes are not in memory: the owner reads and writes them elsewhere, such
//! as on a disk.

use std::ops::Range;
use std::sync::Arc;

use crate::work::WorkError;

/// Alignment in bytes of the part of a region that is stored elsewhere.
pub const STORED_ALIGN: u64 = 4096;

/// Bytes of a region that are stored elsewhere than in its memory. Any thread of a target calls it,
/// and waits for it.
pub trait PageStore: Send + Sync + std::fmt::Debug {
    /// Reads bytes at `offset` of the region. Bytes that were never written are zeros.
    ///
    /// # Errors
    /// [`WorkError::Storage`] if the bytes cannot be read, or are not those that were written;
    /// [`WorkError::Misaligned`] if the store has no access of that alignment.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), WorkError>;

    /// Writes bytes at `offset` of the region, and may change `bytes` meanwhile. After an error
    /// other than [`WorkError::Misaligned`] the range may be unreadable.
    ///
    /// # Errors
    /// [`WorkError::Storage`] if the bytes cannot be written; [`WorkError::Misaligned`] if the
    /// store has no access of that alignment.
    fn write(&self, offset: u64, bytes: &mut [u8]) -> Result<(), WorkError>;

    /// Clears a range of the region, of multiples of [`STORED_ALIGN`]: it reads as zeros. No access
    /// may be in flight.
    ///
    /// # Panics
    /// If the range is not stored here.
    fn clear(&self, range: Range<u64>);
}

/// The part of a region that is stored elsewhere.
#[derive(Clone, Debug)]
pub struct StoredPages {
    /// Offsets in the region, multiples of [`STORED_ALIGN`].
    pub range: Range<u64>,
    /// The bytes.
    pub store: Arc<dyn PageStore>,
}

impl StoredPages {
    /// Whether the range is aligned and inside a region of `len` bytes.
    pub(crate) fn fits(&self, len: u64) -> bool {
        let Range { start, end } = self.range;
        start.is_multiple_of(STORED_ALIGN) && end.is_multiple_of(STORED_ALIGN) && start < end && end <= len
    }

    /// The store, if any of `len` bytes at `offset` of the region are stored elsewhere.
    ///
    /// # Errors
    /// [`WorkError::RemoteAccess`] if only a part of them is.
    pub(crate) fn of(&self, offset: u64, len: u64) -> Result<Option<&Arc<dyn PageStore>>, WorkError> {
        let Range { start, end } = self.range;
        let until = offset.checked_add(len).ok_or(WorkError::RemoteAccess)?;
        if until <= start || offset >= end {
            return Ok(None);
        }
        if offset >= start && until <= end { Ok(Some(&self.store)) } else { Err(WorkError::RemoteAccess) }
    }
}
