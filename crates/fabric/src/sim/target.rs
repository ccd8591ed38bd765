//! The owner's end of a simulated node.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use super::world::{FabricWorld, SimNode, SimRegion};
use super::{SimNodeId, lock};
use crate::Memory;
use crate::key_table::{KeyTable, PlacedTable};
use crate::keys::{KeyGrant, split};
use crate::memory::u64_from;
use crate::target::{Access, Host, Identity, Region, Scope, Target, TargetError, WindowSpec};
use crate::work::Key;

/// A memory node of a [`super::SimFabric`].
#[derive(Clone, Debug)]
pub struct SimTarget {
    pub(super) world: Arc<Mutex<FabricWorld>>,
    pub(super) node: SimNodeId,
}

impl SimTarget {
    /// Its number in the fabric.
    #[must_use]
    pub fn node(&self) -> SimNodeId {
        self.node
    }

    fn with<T>(&self, action: impl FnOnce(&mut SimNode) -> T) -> T {
        let mut world: MutexGuard<'_, FabricWorld> = lock(&self.world);
        action(&mut world.nodes[self.node.0])
    }
}

impl Target for SimTarget {
    fn register_with(
        &self,
        memory: Arc<Memory>,
        access: Access,
        scope: Scope,
        table: Option<KeyTable>,
        key: Option<Key>,
    ) -> Result<Region, TargetError> {
        self.with(|node| {
            let len = u64_from(memory.len());
            if let Some(table) = &table {
                PlacedTable::at(0, 0, table).check(len)?;
            }
            let (index, key) = node.keys.allocate_region(key)?;
            let range = node.space.place(len);
            let region = Region { base: range.start, len, key };
            let opened = table.as_ref().map_or(len, |table| table.data.start);
            let grant = KeyGrant { base: region.base, len: opened, access, scope, region: index };
            node.grants.insert(key, grant);
            let table = table.map(|table| PlacedTable::at(index, region.base, &table));
            node.regions.push(SimRegion { memory, scope, region: region.clone(), table });
            Ok(region)
        })
    }

    fn bind(&self, window: &WindowSpec) -> Result<Key, TargetError> {
        self.with(|node| {
            let grant = node.space.grant(window)?;
            let key = node.keys.allocate_window()?;
            node.grants.insert(key, grant);
            Ok(key)
        })
    }

    fn invalidate(&self, key: Key) -> Result<(), TargetError> {
        self.with(|node| {
            node.grants.remove(&key).ok_or(TargetError::NoSuchKey(key))?;
            node.keys.release(split(key).0);
            Ok(())
        })
    }

    /// An operation that reaches a simulated node is done at once, so none is in flight.
    fn expel(&self, _range: Range<u64>) {}

    fn fence(&self, host: Host, epoch: u64) {
        self.with(|node| {
            let last = node.fenced.entry(host).or_insert(epoch);
            *last = epoch.max(*last);
        });
    }

    fn receive(&self, out: &mut Vec<u8>) -> Option<Identity> {
        let mut world = lock(&self.world);
        let (link, message) = world.nodes[self.node.0].inbox.pop_front()?;
        let link = &mut world.links[link];
        link.waiting_at_node -= 1;
        out.extend_from_slice(&message);
        Some(link.who)
    }

    fn send(&self, to: Host, message: &[u8]) -> usize {
        lock(&self.world).send(self.node, to, message)
    }

    fn endpoints(&self) -> usize {
        lock(&self.world).links.iter().filter(|link| link.node == self.node && !link.closed).count()
    }
}
