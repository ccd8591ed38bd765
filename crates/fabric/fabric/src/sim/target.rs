//! The owner's end of a simulated node.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::SimNodeId;
use super::world::{FabricWorld, SimNode, SimRegion};
use crate::key_table::PlacedTable;
use crate::keys::split;
use crate::registration::Registration;
use crate::target::{EndpointNumber, Host, Region, Sender, Target, TargetError, WindowSpec};
use crate::unit_map::RegionMemory;
use crate::work::Key;

/// A memory node of a [`super::SimFabric`].
#[derive(Clone, Debug)]
pub struct SimTarget {
    pub(super) world: Arc<Mutex<FabricWorld>>,
    pub(super) node: SimNodeId,
}

impl SimTarget {
    /// The node's number in the fabric.
    #[must_use]
    pub fn node(&self) -> SimNodeId {
        self.node
    }

    fn register(&self, new: Registration) -> Result<Region, TargetError> {
        let len = new.check()?;
        self.with(|node| {
            let (slot, region, grant) = new.place(len, &mut node.keys, &mut node.space)?;
            node.grants.insert(region.key, grant);
            let Registration { memory, map, stored, scope, table, .. } = new;
            let table = table.map(|table| PlacedTable::at(slot, region.base, &table));
            let memory = RegionMemory { memory, map, stored };
            node.regions.insert(slot, SimRegion { memory, scope, region: region.clone(), table });
            Ok(region)
        })
    }

    fn with<T>(&self, action: impl FnOnce(&mut SimNode) -> T) -> T {
        let mut world: MutexGuard<'_, FabricWorld> = self.world.lock();
        action(&mut world.nodes[self.node.0])
    }
}

impl Target for SimTarget {
    fn register_as(&self, new: Registration) -> Result<Region, TargetError> {
        self.register(new)
    }

    fn deregister(&self, region: Key) -> Result<(), TargetError> {
        self.with(|node| {
            let (slot, _) = split(region);
            let registered = node.regions.get(&slot).filter(|registered| registered.region.key == region);
            let base = registered.ok_or(TargetError::NoSuchKey(region))?.region.base;
            node.regions.remove(&slot);
            node.space.remove(base);
            let removed = node.grants.extract_if(|_, grant| grant.region == slot);
            let mut removed: Vec<Key> = removed.map(|(key, _)| key).collect();
            // The order of free slots must not depend on that of the map.
            removed.sort_unstable();
            removed.into_iter().for_each(|key| node.keys.release_window(key));
            node.keys.release_region(slot);
            Ok(())
        })
    }

    fn bind(&self, window: &WindowSpec) -> Result<Key, TargetError> {
        self.with(|node| {
            let grant = node.space.grant(window)?;
            let memory = node.regions.get(&grant.region).map(|registered| &registered.memory.memory);
            let is_changed = window.access.write || window.access.atomic;
            if is_changed && memory.is_none_or(|memory| !memory.is_writable()) {
                return Err(TargetError::ReadOnly);
            }
            let key = node.keys.allocate_window()?;
            node.grants.insert(key, grant);
            Ok(key)
        })
    }

    fn invalidate(&self, key: Key) -> Result<(), TargetError> {
        self.with(|node| {
            node.grants.remove(&key).ok_or(TargetError::NoSuchKey(key))?;
            node.keys.release_window(key);
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

    fn receive(&self, out: &mut Vec<u8>) -> Option<Sender> {
        let mut world = self.world.lock();
        let (id, message) = world.nodes[self.node.0].inbox.pop_front()?;
        let link = &mut world.links[id];
        link.waiting_at_node -= 1;
        out.extend_from_slice(&message);
        Some(Sender { who: link.who, endpoint: EndpointNumber(id as u64) })
    }

    /// Plays events until there is a message, for at most `timeout` of virtual time.
    fn wait(&self, timeout: Duration) {
        let mut world = self.world.lock();
        let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        let until_ns = world.now_ns.saturating_add(timeout_ns);
        while world.nodes[self.node.0].inbox.is_empty() {
            if world.next_event_ns().is_none_or(|next| next > until_ns) {
                if until_ns != u64::MAX {
                    world.now_ns = until_ns;
                }
                return;
            }
            world.step();
        }
    }

    fn reply(&self, to: EndpointNumber, message: &[u8]) -> bool {
        let mut world = self.world.lock();
        let id = usize::try_from(to.0).ok().filter(|id| *id < world.links.len());
        id.is_some_and(|id| world.send_to(self.node, id, message))
    }

    fn send(&self, to: Host, message: &[u8]) -> usize {
        self.world.lock().send(self.node, to, message)
    }

    fn endpoints(&self) -> usize {
        self.world.lock().links.iter().filter(|link| link.node == self.node && !link.closed).count()
    }
}
