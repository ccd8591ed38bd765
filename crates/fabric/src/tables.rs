//! Tables of a target with real memory: regions, keys, and fences.

use std::collections::HashMap;
use std::sync::Arc;

use crate::Memory;
use crate::control::ControlMemory;
use crate::handshake::RefusalReason;
use crate::key_table::{KeyTable, PlacedTable};
use crate::keys::{AddressSpace, KeyGrant, KeySlots, admits, split};
use crate::memory::u64_from;
use crate::target::{Access, Host, Identity, Region, Scope, TargetError, WindowSpec};
use crate::work::Key;

/// A registered region.
#[derive(Debug)]
pub struct RegisteredRegion {
    /// Its memory.
    pub memory: Arc<Memory>,
    scope: Scope,
    region: Region,
    /// Its key table, if it has one.
    pub table: Option<PlacedTable>,
}

/// The tables of one target, which its owner locks.
#[derive(Debug)]
pub struct TargetTables {
    /// The regions by index.
    pub regions: Vec<RegisteredRegion>,
    space: AddressSpace,
    keys: KeySlots,
    fenced: HashMap<Host, u64>,
}

impl TargetTables {
    /// Empty tables with room for the given numbers of regions and windows. `secret` makes keys
    /// hard to guess.
    pub fn new(regions_max: usize, windows_max: usize, secret: u64) -> Self {
        Self {
            regions: Vec::new(),
            space: AddressSpace::default(),
            keys: KeySlots::new(regions_max, windows_max, secret),
            fenced: HashMap::new(),
        }
    }

    /// Registers a region, under `key` if one is given. The own key of a region with a key table
    /// opens only the part before the table's data.
    pub fn register(
        &mut self,
        control: &ControlMemory,
        memory: Arc<Memory>,
        access: Access,
        scope: Scope,
        table: Option<KeyTable>,
        key: Option<Key>,
    ) -> Result<Region, TargetError> {
        let len = u64_from(memory.len());
        if let Some(table) = &table {
            PlacedTable::at(0, 0, table).check(len)?;
        }
        let (index, key) = self.keys.allocate_region(key)?;
        let range = self.space.place(len);
        let region = Region { base: range.start, len, key };
        // Only keys of the table open its data.
        let opened = table.as_ref().map_or(len, |table| table.data.start);
        control.bind(key, &KeyGrant { base: region.base, len: opened, access, scope, region: index });
        let table = table.map(|table| {
            control.publish_table(index, &table);
            PlacedTable::at(index, region.base, &table)
        });
        self.regions.push(RegisteredRegion { memory, scope, region: region.clone(), table });
        Ok(region)
    }

    /// The range that a key of a key table opens to `who` at an address.
    pub fn table_grant(&self, who: Identity, key: Key, addr: u64) -> Option<KeyGrant> {
        let is_of_it =
            |registered: &&RegisteredRegion| registered.table.as_ref().is_some_and(|table| table.holds(addr));
        let registered = self.regions.iter().find(is_of_it)?;
        registered.table.as_ref()?.grant(&registered.memory, who, key, addr)
    }

    /// The index and the first address of the region that contains a range.
    pub fn region_of(&self, addr: u64, len: u64) -> Option<(usize, u64)> {
        let holds = |registered: &RegisteredRegion| {
            let Region { base, len: bytes, .. } = registered.region;
            addr >= base && addr - base <= bytes && len <= bytes - (addr - base)
        };
        let region = self.regions.iter().position(holds)?;
        Some((region, self.regions[region].region.base))
    }

    /// Binds a window.
    pub fn bind(&mut self, control: &ControlMemory, window: &WindowSpec) -> Result<Key, TargetError> {
        let grant = self.space.grant(window)?;
        let key = self.keys.allocate_window()?;
        control.bind(key, &grant);
        Ok(key)
    }

    /// Releases the slot of a key that is invalidated and drained.
    pub fn release_key(&mut self, key: Key) {
        self.keys.release(split(key).0);
    }

    /// Fences a host up to an epoch. A fence is never lowered.
    pub fn fence(&mut self, host: Host, epoch: u64) {
        let last = self.fenced.entry(host).or_insert(epoch);
        *last = epoch.max(*last);
    }

    /// Whether an identity has a fenced epoch of its host.
    pub fn is_fenced(&self, who: Identity) -> bool {
        self.fenced.get(&who.host).is_some_and(|epoch| who.epoch <= *epoch)
    }

    /// The reason to refuse an endpoint, if there is one.
    pub fn refusal(&self, who: Identity) -> Option<RefusalReason> {
        let fenced = *self.fenced.get(&who.host).filter(|_| self.is_fenced(who))?;
        Some(RefusalReason::Fenced { host: who.host, fenced, epoch: who.epoch })
    }

    /// The regions as one endpoint may see them: keys that are not for it are zero.
    pub fn visible_regions(&self, who: Identity) -> Vec<Region> {
        let announced = |registered: &RegisteredRegion| {
            let key = if admits(registered.scope, who) { registered.region.key } else { Key(0) };
            Region { key, ..registered.region.clone() }
        };
        self.regions.iter().map(announced).collect()
    }
}
