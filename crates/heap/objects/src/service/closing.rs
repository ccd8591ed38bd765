//! Closing of heaps that programs of this machine fill with zeros: a program maps the memory of its
//! heap, and the system allocates a page for each read where the heap has none.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};

use aquifer_fabric::{Key, Region, Tenant};
use parking_lot::Mutex;

use super::HeapService;
use super::tenant_heap::TenantHeap;

/// Users whose heaps are closed, and heaps that are about to end.
#[derive(Debug, Default)]
pub(super) struct Closing {
    tenants: Mutex<BTreeSet<Tenant>>,
    /// Heaps that a request may still use.
    heaps: Mutex<Vec<Arc<Mutex<TenantHeap>>>>,
    /// The regions of heaps that could not be opened.
    unused: Mutex<Vec<Registered>>,
}

/// Regions of a heap at the targets.
#[derive(Debug, Default)]
pub(super) struct Registered {
    pub regions: Vec<Region>,
    /// The regions at the device that serves reads.
    pub on_device: Vec<Region>,
}

impl Closing {
    /// Whether the heap of a user was closed.
    pub fn is_closed(&self, tenant: Tenant) -> bool {
        self.tenants.lock().contains(&tenant)
    }

    /// Keeps the regions of a heap that could not be opened for [`HeapService::deregister_unused`].
    /// The thread that answers requests must not wait for its target.
    pub fn add_regions(&self, registered: Registered) {
        self.unused.lock().push(registered);
    }

    /// Allows a user to open a heap again.
    pub fn reopen(&self, tenant: Tenant) {
        self.tenants.lock().remove(&tenant);
    }

    /// Ends the heaps that no request uses any more. To be called often.
    pub fn end_unused(&self) {
        let mut heaps = self.heaps.lock();
        for heap in std::mem::take(&mut *heaps) {
            match Arc::try_unwrap(heap) {
                Ok(heap) => {
                    if let Err(error) = heap.into_inner().end() {
                        tracing::warn!(%error, "cannot empty the memory of a closed heap");
                    }
                }
                Err(heap) => heaps.push(heap),
            }
        }
    }
}

impl HeapService {
    /// Deregisters the regions of heaps that could not be opened. To be called often.
    pub(super) fn deregister_unused(&self) {
        let target = self.target.get().and_then(Weak::upgrade);
        let device = self.devices.get().and_then(|devices| devices.target.upgrade());
        for Registered { regions, on_device } in std::mem::take(&mut *self.closing.unused.lock()) {
            let of_target = regions.iter().zip(std::iter::repeat(&target));
            for (region, target) in of_target.chain(on_device.iter().zip(std::iter::repeat(&device))) {
                let Some(target) = target else { continue };
                if let Err(error) = target.deregister(region.key) {
                    tracing::warn!(%error, "cannot deregister the memory of a heap that was not opened");
                }
            }
        }
    }

    /// Closes the heap of a tenant: its objects are lost, and an operator must open another one.
    /// This service does not use its number again, and the objects of a later heap have later
    /// numbers, so no old pointer names one of them.
    pub(super) fn close(&self, tenant: Tenant) {
        let mut heaps = self.heaps.lock();
        let Some(heap) = heaps.remove(&tenant) else { return };
        self.closing.tenants.lock().insert(tenant);
        drop(heaps);
        let (number, regions) = {
            let heap = heap.lock();
            (heap.number, heap.regions.clone())
        };
        tracing::error!(
            node = self.node,
            uid = tenant.0,
            "closed a heap: its programs kept filling more memory than its limit; its objects are lost"
        );
        if let Some(target) = self.target.get().and_then(Weak::upgrade) {
            for region in regions {
                if let Err(error) = target.deregister(Key(region.key)) {
                    tracing::warn!(%error, "cannot deregister the memory of a closed heap");
                }
            }
        }
        if let Some(keeper) = &self.keeper {
            keeper.release(number);
        }
        self.closing.heaps.lock().push(heap);
    }
}
