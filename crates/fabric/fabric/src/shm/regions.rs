//! The regions that an endpoint has mapped. The endpoint requests the memory of a region from the
//! target at the first use, and unmaps it when the region is removed.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::handshake::{self, RegionRequest, ShmRegion, ShmUnits};
use super::socket;
use crate::Memory;
use crate::control::ControlMemory;
use crate::key_table::PlacedTable;
use crate::keys::{KeyGrant, Right};
use crate::memory::u64_from;
use crate::target::Identity;
use crate::unit_map::{RegionMemory, UnitMap};
use crate::work::{RemoteAddr, WorkError};

/// Bound of the regions that one endpoint has mapped. Above it, the region that was mapped first is
/// unmapped. A process may have 65,530 mappings.
const MAPPED_MAX: usize = 1024;

/// A mapped region.
#[derive(Debug)]
pub(super) struct MappedRegion {
    pub base: u64,
    pub memory: RegionMemory,
    table: Option<PlacedTable>,
    serial: u64,
}

/// The cause why an access cannot be done now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum AccessFault {
    Error(WorkError),
    /// The key opens a region, or perhaps opens one, that is not mapped as the access needs it.
    Unmapped(RemoteAddr),
}

impl From<WorkError> for AccessFault {
    fn from(error: WorkError) -> Self {
        Self::Error(error)
    }
}

/// The mapped regions of one endpoint.
#[derive(Debug, Default)]
pub(super) struct MappedRegions {
    /// The mapped regions by slot.
    slots: Vec<Option<Box<MappedRegion>>>,
    /// The mapped slots, in the order of mapping.
    mapped: VecDeque<usize>,
    /// The ranges of the key tables: first address, end, and slot; sorted.
    tables: Vec<(u64, u64, usize)>,
    /// The number of removals of regions that the endpoint has processed.
    removals: u64,
}

impl MappedRegions {
    /// Unmaps regions that were removed. Must be called after `active` was made odd and before any
    /// access.
    #[inline]
    pub fn forget_removed(&mut self, control: &ControlMemory) {
        let removals = control.removals();
        if removals != self.removals {
            self.removals = removals;
            let slots = &self.slots;
            let is_current = |slot: &usize| {
                slots[*slot].as_ref().is_some_and(|region| region.serial == control.serial(*slot))
            };
            let (stay, leave): (VecDeque<_>, VecDeque<_>) =
                self.mapped.iter().partition(|slot| is_current(slot));
            self.mapped = stay;
            leave.into_iter().for_each(|slot| self.unmap(slot));
        }
    }

    fn unmap(&mut self, slot: usize) {
        self.slots[slot] = None;
        self.tables.retain(|(.., of)| *of != slot);
    }

    /// The region and the offset in it of `len` bytes at a remote address, if the key opens them.
    #[inline]
    pub fn find(
        &self,
        control: &ControlMemory,
        who: Identity,
        remote: RemoteAddr,
        len: u64,
        right: Right,
    ) -> Result<(&MappedRegion, u64), AccessFault> {
        let grant = if remote.key.is_table_key() {
            self.table_grant(who, remote)?
        } else {
            control.lookup(remote.key).ok_or(WorkError::RemoteAccess)?
        };
        grant.check(who, right, remote.addr, len)?;
        let region = self.slots.get(grant.region).and_then(Option::as_deref);
        let region = region.filter(|found| right == Right::Read || found.memory.memory.is_writable());
        let region = region.ok_or(AccessFault::Unmapped(remote))?;
        // Control memory is shared, so its contents are checked against our own mapping, too.
        let offset = remote.addr.checked_sub(region.base).ok_or(WorkError::RemoteAccess)?;
        Ok((region, offset))
    }

    /// The range that a key of a key table opens at an address.
    #[inline]
    fn table_grant(&self, who: Identity, remote: RemoteAddr) -> Result<KeyGrant, AccessFault> {
        let at = self.tables.partition_point(|(start, ..)| *start <= remote.addr).checked_sub(1);
        let found = at.map(|at| self.tables[at]).filter(|(_, end, _)| remote.addr < *end);
        let (.., slot) = found.ok_or(AccessFault::Unmapped(remote))?;
        let region = self.slots[slot].as_ref().ok_or(AccessFault::Unmapped(remote))?;
        let grant = region
            .table
            .as_ref()
            .and_then(|table| table.grant(&region.memory.memory, who, remote.key, remote.addr));
        Ok(grant.ok_or(WorkError::RemoteAccess)?)
    }

    /// Requests the region in which the key opens the address from the target, and maps it.
    /// `active` must be even: the target may wait for it before it answers.
    pub fn request(
        &mut self,
        control: &ControlMemory,
        socket: &OwnedFd,
        remote: RemoteAddr,
    ) -> Result<(), WorkError> {
        let RemoteAddr { key, addr } = remote;
        let answer = socket::send(socket, &handshake::encode_request(RegionRequest { key, addr }), &[])
            .and_then(|()| socket::receive(socket));
        let (bytes, fds) = answer.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => WorkError::Timeout,
            _ => WorkError::PeerGone,
        })?;
        if bytes.is_empty() {
            return Err(WorkError::PeerGone);
        }
        let refused = |error: String| {
            tracing::warn!(error, "cannot map a region of a shared-memory target");
            WorkError::PeerGone
        };
        let region = handshake::parse_region(&bytes).map_err(|error| refused(error.to_string()))?;
        let region = region.ok_or(WorkError::RemoteAccess)?;
        let mapped = open(control, &region, fds).map_err(|error| refused(error.to_string()))?;
        self.insert(region.slot as usize, mapped);
        Ok(())
    }

    fn insert(&mut self, slot: usize, region: MappedRegion) {
        if slot >= self.slots.len() {
            self.slots.resize_with(slot + 1, || None);
        }
        self.unmap(slot);
        self.mapped.retain(|other| *other != slot);
        if self.mapped.len() >= MAPPED_MAX
            && let Some(first) = self.mapped.pop_front()
        {
            self.unmap(first);
        }
        if let Some(PlacedTable { base, table, .. }) = &region.table {
            self.tables.push((base + table.data.start, base + table.data.end, slot));
            self.tables.sort_unstable();
        }
        self.slots[slot] = Some(Box::new(region));
        self.mapped.push_back(slot);
    }
}

/// Maps the memory of a region.
fn open(control: &ControlMemory, region: &ShmRegion, fds: Vec<OwnedFd>) -> io::Result<MappedRegion> {
    let mut fds = fds.into_iter();
    let mut map = |len: u64, is_writable| {
        let fd = fds.next().ok_or_else(|| io::Error::other("a region came with too few descriptors"))?;
        let len = usize::try_from(len).map_err(io::Error::other)?;
        let map = if is_writable { Memory::from_fd } else { Memory::from_fd_read_only };
        // Initiators pass no memory on, and may have many endpoints.
        map(fd, len).map(Memory::without_fd)
    };
    let memory = Arc::new(map(region.memory_len, region.is_writable)?);
    let units = region.units.map(|units| -> io::Result<UnitMap> {
        let ShmUnits { words_len, words_at, units, unit_bytes } = units;
        let at = usize::try_from(words_at).map_err(io::Error::other)?;
        Ok(UnitMap { words: Arc::new(map(words_len, false)?), at, units, unit_bytes })
    });
    let units = units.transpose()?;
    if units.as_ref().is_some_and(|map| map.addresses() != Some(region.len)) {
        return Err(io::Error::other("the translation table does not fit its region"));
    }
    let ShmRegion { slot, serial, base, .. } = *region;
    let table = control.table(slot as usize).map(|table| PlacedTable::at(slot as usize, base, &table));
    let table = table.filter(|_| control.serial(slot as usize) == serial);
    if let Some(table) = &table {
        table.check(u64_from(memory.len())).map_err(io::Error::other)?;
    }
    Ok(MappedRegion { base, memory: RegionMemory { memory, map: units, stored: None }, table, serial })
}
