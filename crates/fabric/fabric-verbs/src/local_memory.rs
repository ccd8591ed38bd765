//! Local memory, registered part by part when it is used.
//!
//! Registration pins pages, whether they were touched or not. A host's mempool can be much larger
//! than the part in use, so a part of a memory is registered when work first names it. The limit of
//! locked memory is checked for the whole memory beforehand: work that fails later for this reason
//! would look like a failure of its node.

use std::io;
use std::sync::Arc;

use super::sys::device::Device;
use super::sys::queue_pair::LocalPiece;
use super::sys::registration::{Registration, RegistrationUse};
use aquifer_fabric::Memory;
use aquifer_fabric::memory::u64_from;
use aquifer_fabric::work::{EndpointError, Limits, LocalKey, LocalSlice, WorkError};

/// Alignment of parts in bytes. A part is longer by the longest transfer, so every slice lies in
/// one part.
const PART_BYTES: usize = 64 << 20;

#[derive(Debug)]
struct RegisteredMemory {
    memory: Arc<Memory>,
    parts: Vec<Option<Registration>>,
}

/// The memories of one endpoint.
#[derive(Debug)]
pub(super) struct RegisteredMemories {
    device: &'static Device,
    limits: Limits,
    list: Vec<RegisteredMemory>,
}

impl RegisteredMemories {
    pub fn new(device: &'static Device, limits: Limits) -> Self {
        Self { device, limits, list: Vec::new() }
    }

    pub fn add(&mut self, memory: Arc<Memory>) -> Result<LocalKey, EndpointError> {
        let limit = self.limits.local_regions_max;
        if self.list.len() >= limit {
            return Err(EndpointError::TooManyLocal { limit });
        }
        let bytes = memory.len();
        let refused = |source| EndpointError::Local { bytes, source };
        let others: usize = self.list.iter().map(|local| local.memory.len()).sum();
        if !may_lock(others + bytes) {
            return Err(refused(io::ErrorKind::OutOfMemory.into()));
        }
        let mut parts: Vec<_> = (0..bytes.div_ceil(PART_BYTES)).map(|_| None).collect();
        if let [only] = &mut parts[..] {
            *only = Some(register(self.device, &memory, 0, 0).map_err(refused)?);
        }
        self.list.push(RegisteredMemory { memory, parts });
        Ok(LocalKey(u32::try_from(self.list.len()).expect("bounded by the limit")))
    }

    fn find(&mut self, slice: LocalSlice) -> Result<(&mut RegisteredMemory, usize, usize), WorkError> {
        let at = (slice.key.0 as usize).checked_sub(1).ok_or(WorkError::LocalAccess)?;
        let local = self.list.get_mut(at).ok_or(WorkError::LocalAccess)?;
        let (offset, len) = (slice.offset, u64::from(slice.len));
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= u64_from(local.memory.len()));
        if !is_inside {
            return Err(WorkError::LocalAccess);
        }
        let offset = usize::try_from(offset).map_err(|_| WorkError::LocalAccess)?;
        Ok((local, offset, slice.len as usize))
    }

    /// Copies the bytes of a slice.
    pub fn bytes(&mut self, slice: LocalSlice) -> Result<Vec<u8>, WorkError> {
        let limit = self.limits.message_bytes_max as usize;
        let (local, offset, len) = self.find(slice)?;
        let mut bytes = vec![0; len.min(limit)];
        local.memory.read(offset, &mut bytes);
        Ok(bytes)
    }

    /// A slice as the device addresses it. Registers the part if necessary.
    pub fn piece(&mut self, slice: LocalSlice) -> Result<LocalPiece, WorkError> {
        let (device, longest) = (self.device, self.limits.transfer_bytes_max as usize);
        let (local, offset, _) = self.find(slice)?;
        let base = u64_from(local.memory.as_ptr().addr());
        let addr = base + u64_from(offset);
        if slice.len == 0 {
            return Ok(LocalPiece { addr, len: 0, key: 0 });
        }
        let part = offset / PART_BYTES;
        if local.parts[part].is_none() {
            let made = register(device, &local.memory, part, longest).inspect_err(|error| {
                tracing::warn!(
                    %error,
                    "cannot register local memory; raise the limit of locked memory (ulimit -l)"
                );
            });
            local.parts[part] = Some(made.map_err(|_| WorkError::LocalAccess)?);
        }
        let key = local.parts[part].as_ref().map_or(0, Registration::local_key);
        Ok(LocalPiece { addr, len: slice.len, key })
    }
}

/// Whether this process may lock this much memory.
fn may_lock(bytes: usize) -> bool {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    let is_free = rustix::thread::capabilities(None)
        .is_ok_and(|sets| sets.effective.contains(rustix::thread::CapabilitySet::IPC_LOCK));
    is_free || limit.is_none_or(|limit| u64_from(bytes) <= limit)
}

fn register(
    device: &'static Device,
    memory: &Arc<Memory>,
    part: usize,
    longest: usize,
) -> io::Result<Registration> {
    memory.pin();
    let start = part * PART_BYTES;
    let end = (start + PART_BYTES + longest).min(memory.len());
    let base = u64_from(memory.as_ptr().addr() + start);
    Registration::new(device, Arc::clone(memory), start..end, base, RegistrationUse::Local)
}
