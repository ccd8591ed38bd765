//! The limit on the memory of segments that each user has on a host.

use std::collections::BTreeMap;
use std::sync::Arc;

use aquifer_fabric::Memory;
use parking_lot::Mutex;

use super::SegmentError;

/// Size in bytes up to which the caller frees memory itself. Larger memory is freed by another
/// thread, because other users may wait for the caller.
const INLINE_BYTES_MAX: u64 = 16 << 20;

/// The charged bytes, by the owner of the user's id.
#[derive(Debug)]
pub(super) struct HeldBytes {
    of_owners: Mutex<BTreeMap<u32, u64>>,
    /// Maximum of bytes for one owner.
    max: u64,
}

impl HeldBytes {
    /// Creates the accounts with a limit for each owner; no owner has memory.
    pub fn new(max: u64) -> Arc<Self> {
        Arc::new(Self { of_owners: Mutex::default(), max })
    }

    /// Charges memory to its owner.
    ///
    /// # Errors
    /// If the owner's memory would exceed the limit.
    pub fn charge(&self, owner: u32, bytes: u64) -> Result<(), SegmentError> {
        let mut of_owners = self.of_owners.lock();
        let held = of_owners.get(&owner).copied().unwrap_or_default();
        let next = held.checked_add(bytes).filter(|next| *next <= self.max);
        of_owners.insert(owner, next.ok_or(SegmentError::Limit { limit: self.max })?);
        Ok(())
    }

    /// Charges recovered memory to its owner, regardless of the limit.
    pub fn charge_always(&self, owner: u32, bytes: u64) {
        *self.of_owners.lock().entry(owner).or_default() += bytes;
    }

    /// Ends the charge of memory that does not exist any more.
    pub fn release(&self, owner: u32, bytes: u64) {
        let mut of_owners = self.of_owners.lock();
        let left = of_owners.get(&owner).map_or(0, |held| held.saturating_sub(bytes));
        if left == 0 {
            of_owners.remove(&owner)
        } else {
            of_owners.insert(owner, left)
        };
    }

    /// Frees memory as [`Self::free`] does, in another thread if it has more than
    /// [`INLINE_BYTES_MAX`] bytes.
    pub fn free_in_background(self: &Arc<Self>, owner: u32, data: &Arc<Memory>) {
        let (held, memory) = (Arc::clone(self), Arc::clone(data));
        let work = move || held.free(owner, &memory);
        if data.len() as u64 <= INLINE_BYTES_MAX {
            return work();
        }
        let thread = std::thread::Builder::new().name("segment-free".into());
        if thread.spawn(work).is_err() {
            self.free(owner, data);
        }
    }

    /// Returns memory to the system, and then ends its charge. The program and connections to other
    /// hosts may still have the memory's descriptor or a mapping: they read zeros.
    pub fn free(&self, owner: u32, memory: &Memory) {
        match memory.punch(0, memory.len()) {
            Ok(()) => self.release(owner, memory.len() as u64),
            Err(error) => {
                tracing::error!(
                    uid = owner,
                    %error,
                    "cannot free a segment's memory; it stays charged to its user until the agent restarts"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_cannot_exceed_the_limit() {
        let held = HeldBytes::new(10);
        held.charge(1, 4).unwrap();
        held.charge(1, 6).unwrap();
        assert!(held.charge(1, 1).is_err());
        assert!(held.charge(1, u64::MAX).is_err());
        held.charge(2, 10).unwrap();
        held.release(1, 4);
        held.charge(1, 4).unwrap();
        held.charge_always(1, 100);
        held.release(1, 100);
        assert!(held.charge(1, 1).is_err());
    }

    #[test]
    fn freed_memory_is_returned_although_it_has_other_references() {
        for len in [4096, usize::try_from(INLINE_BYTES_MAX).unwrap() + 4096] {
            let held = HeldBytes::new(len as u64);
            held.charge(1, len as u64).unwrap();
            let memory = Arc::new(Memory::create("segment", len).unwrap());
            memory.write(len - 1, &[1]);
            held.free_in_background(1, &memory);
            while held.charge(1, len as u64).is_err() {
                std::thread::yield_now();
            }
            assert_eq!(memory.allocated_bytes().unwrap(), 0);
        }
    }
}
