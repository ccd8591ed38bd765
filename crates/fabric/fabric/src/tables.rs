//! Tables of a target with real memory: regions, keys, and fences.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use crate::control::ControlMemory;
use crate::handshake::RefusalReason;
use crate::key_table::PlacedTable;
use crate::keys::{AddressSpace, KeyGrant, KeySlots, admits, split};
use crate::limits::ANNOUNCED_MAX;
use crate::registration::Registration;
use crate::target::{Host, Identity, Region, Scope, TargetError, WindowSpec};
use crate::unit_map::RegionMemory;
use crate::work::Key;

/// A registered region.
#[derive(Debug)]
pub struct RegisteredRegion {
    /// The region's memory.
    pub memory: RegionMemory,
    scope: Scope,
    /// The region as announced to its owner.
    pub region: Region,
    /// The region's key table, if it has one.
    pub table: Option<PlacedTable>,
    /// The windows in the region.
    windows: HashSet<Key>,
    /// The serial number of the registration.
    pub serial: u64,
}

/// A region that is being removed. Accesses to it may be in flight.
#[derive(Debug)]
pub struct RemovedRegion {
    /// The region's slot.
    pub slot: usize,
    registered: RegisteredRegion,
}

impl RemovedRegion {
    /// The region as announced to its owner.
    pub fn region(&self) -> &Region {
        &self.registered.region
    }

    /// The keys of the windows that were in the region.
    pub fn windows(&self) -> impl Iterator<Item = Key> {
        self.registered.windows.iter().copied()
    }
}

/// A set of regions, each with its base and its slot.
type Announced = BTreeSet<(u64, usize)>;

/// The tables of one target, which its owner locks.
#[derive(Debug)]
pub struct TargetTables {
    /// The regions by slot.
    pub regions: BTreeMap<usize, RegisteredRegion>,
    space: AddressSpace,
    keys: KeySlots,
    /// The region of each window.
    windows: HashMap<Key, usize>,
    /// The regions by the scope of their own keys.
    by_scope: HashMap<Scope, Announced>,
    /// The regions with key tables, which any endpoint may use.
    with_tables: Announced,
    last_serial: u64,
    fenced: HashMap<Host, u64>,
}

impl TargetTables {
    /// Creates tables with room for the given numbers of regions and windows. `secret` makes keys
    /// hard to guess.
    pub fn new(regions_max: usize, windows_max: usize, secret: u64) -> Self {
        Self {
            regions: BTreeMap::new(),
            space: AddressSpace::default(),
            keys: KeySlots::new(regions_max, windows_max, secret),
            windows: HashMap::new(),
            by_scope: HashMap::new(),
            with_tables: Announced::new(),
            last_serial: 0,
            fenced: HashMap::new(),
        }
    }

    /// Registers a region. Returns its slot as well.
    pub fn register(
        &mut self,
        control: &ControlMemory,
        new: Registration,
    ) -> Result<(usize, Region), TargetError> {
        let len = new.check()?;
        let (slot, region, grant) = new.place(len, &mut self.keys, &mut self.space)?;
        self.last_serial += 1;
        let serial = self.last_serial;
        control.publish_region(slot, serial, new.table.as_ref());
        control.bind(region.key, &grant);
        let Registration { memory, map, stored, scope, .. } = new;
        let table = new.table.map(|table| PlacedTable::at(slot, region.base, &table));
        self.by_scope.entry(scope).or_default().insert((region.base, slot));
        if table.is_some() {
            self.with_tables.insert((region.base, slot));
        }
        let memory = RegionMemory { memory, map, stored };
        let windows = HashSet::new();
        let registered = RegisteredRegion { memory, scope, region: region.clone(), table, windows, serial };
        self.regions.insert(slot, registered);
        Ok((slot, region))
    }

    /// Removes the region that was registered under this key, and unbinds all its keys. Drain
    /// afterwards, and then call [`Self::end_deregister`].
    pub fn begin_deregister(
        &mut self,
        control: &ControlMemory,
        key: Key,
    ) -> Result<RemovedRegion, TargetError> {
        let (slot, _) = split(key);
        let no_such_key = TargetError::NoSuchKey(key);
        let registered = match self.regions.entry(slot) {
            Entry::Occupied(entry) if entry.get().region.key == key => entry.remove(),
            _ => return Err(no_such_key),
        };
        let place = (registered.region.base, slot);
        self.space.remove(registered.region.base);
        self.with_tables.remove(&place);
        if let Some(regions) = self.by_scope.get_mut(&registered.scope) {
            regions.remove(&place);
            if regions.is_empty() {
                self.by_scope.remove(&registered.scope);
            }
        }
        for window in &registered.windows {
            self.windows.remove(window);
            control.unbind(*window);
        }
        control.unbind(key);
        control.remove_region(slot);
        Ok(RemovedRegion { slot, registered })
    }

    /// Releases the slots of a removed region. No access to it may be in flight.
    pub fn end_deregister(&mut self, removed: RemovedRegion) {
        removed.windows().for_each(|window| self.keys.release_window(window));
        self.keys.release_region(removed.slot);
    }

    /// The range that a key of a key table opens to an endpoint at an address.
    pub fn table_grant(&self, who: Identity, key: Key, addr: u64) -> Option<KeyGrant> {
        let (slot, _) = self.space.find(addr, 0)?;
        let registered = self.regions.get(&slot)?;
        registered.table.as_ref()?.grant(&registered.memory.memory, who, key, addr)
    }

    /// The slot and the first address of the region that contains a range.
    pub fn region_of(&self, addr: u64, len: u64) -> Option<(usize, u64)> {
        self.space.find(addr, len)
    }

    /// Binds a window.
    pub fn bind(&mut self, control: &ControlMemory, window: &WindowSpec) -> Result<Key, TargetError> {
        let grant = self.space.grant(window)?;
        let registered = self.regions.get_mut(&grant.region);
        let is_changed = window.access.write || window.access.atomic;
        let registered = registered.filter(|found| !is_changed || found.memory.memory.is_writable());
        let registered = registered.ok_or(TargetError::ReadOnly)?;
        let key = self.keys.allocate_window()?;
        registered.windows.insert(key);
        self.windows.insert(key, grant.region);
        control.bind(key, &grant);
        Ok(key)
    }

    /// Unbinds a key. Drain afterwards, and then call [`Self::end_invalidate`].
    pub fn begin_invalidate(&mut self, control: &ControlMemory, key: Key) -> Result<(), TargetError> {
        if !control.unbind(key) {
            return Err(TargetError::NoSuchKey(key));
        }
        let region = self.windows.remove(&key);
        if let Some(registered) = region.and_then(|region| self.regions.get_mut(&region)) {
            registered.windows.remove(&key);
        }
        Ok(())
    }

    /// Releases the slot of a key that is unbound and drained. The slot of a region stays in use.
    pub fn end_invalidate(&mut self, key: Key) {
        self.keys.release_window(key);
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

    /// The regions that are announced to an endpoint, in the order of their addresses: those whose
    /// own key is for it, and those with key tables. If there are more than [`ANNOUNCED_MAX`], the
    /// first are announced. A key that is not for the endpoint is zero.
    pub fn visible_regions(&self, who: Identity) -> Vec<Region> {
        let scopes = [Scope::Anyone, Scope::Tenant(who.tenant), Scope::Host(who.host)];
        let own = scopes.iter().filter_map(|scope| self.by_scope.get(scope));
        let first = own.chain([&self.with_tables]).flat_map(|regions| regions.iter().take(ANNOUNCED_MAX));
        let places: Announced = first.copied().collect();
        let registered = places.iter().filter_map(|(_, slot)| self.regions.get(slot));
        let announced = registered.map(|RegisteredRegion { scope, region, .. }| {
            let key = if admits(*scope, who) { region.key } else { Key(0) };
            Region { key, ..region.clone() }
        });
        announced.take(ANNOUNCED_MAX).collect()
    }
}
