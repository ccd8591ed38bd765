//! Local memory of endpoints whose work is done by this process.

use std::sync::Arc;

use crate::Memory;
use crate::work::{EndpointError, LocalKey, LocalSlice};

/// Registered local memories. Their keys count from one.
#[derive(Debug, Default)]
pub(crate) struct LocalMemories(Vec<Arc<Memory>>);

impl LocalMemories {
    /// Adds a memory, if it is writable and there are fewer than `limit`.
    pub fn add(&mut self, memory: Arc<Memory>, limit: usize) -> Result<LocalKey, EndpointError> {
        if !memory.is_writable() {
            return Err(EndpointError::ReadOnlyLocal);
        }
        let full = EndpointError::TooManyLocal { limit };
        if self.0.len() >= limit {
            return Err(full);
        }
        self.0.push(memory);
        u32::try_from(self.0.len()).map(LocalKey).map_err(|_| full)
    }

    /// The memory of a slice, and the offset of the slice in it; `None` if the slice is not inside.
    #[inline]
    pub fn find(&self, slice: LocalSlice) -> Option<(&Memory, usize)> {
        let memory = self.0.get((slice.key.0 as usize).checked_sub(1)?)?;
        Some((memory, memory.offset(slice.offset, u64::from(slice.len))?))
    }

    /// The first byte of a slice; `None` if it is not inside its memory.
    #[inline]
    pub fn pointer(&self, slice: LocalSlice) -> Option<*mut u8> {
        let memory = self.0.get((slice.key.0 as usize).checked_sub(1)?)?;
        memory.pointer(slice.offset, u64::from(slice.len))
    }

    /// All memories, in the order of their keys.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Memory>> {
        self.0.iter()
    }
}
