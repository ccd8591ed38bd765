//! The initiator's end of a simulated connection.

use std::sync::Arc;

use parking_lot::Mutex;

use super::world::FabricWorld;
use crate::Memory;
use crate::target::Region;
use crate::work::{Completion, DrainHandle, Endpoint, EndpointError, Limits, LocalKey, PostError, Work};

/// One connection to a [`super::SimTarget`].
#[derive(Debug)]
pub struct SimEndpoint {
    pub(super) world: Arc<Mutex<FabricWorld>>,
    pub(super) id: usize,
    pub(super) regions: Vec<Region>,
    pub(super) limits: Limits,
}

impl Endpoint for SimEndpoint {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        self.world.lock().post(self.id, batch)
    }

    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let mut world = self.world.lock();
        let link = &world.links[self.id];
        let is_waiting = world.options.step_on_poll && link.done.is_empty() && link.is_busy();
        if is_waiting && world.next_event_ns().is_some_and(|next_ns| next_ns <= world.polled_until_ns) {
            world.step();
        }
        let done = &mut world.links[self.id].done;
        let count = done.len().min(max);
        out.extend(done.drain(..count));
        count
    }

    fn register_local(&mut self, memory: Arc<Memory>) -> Result<LocalKey, EndpointError> {
        let limit = self.limits.local_regions_max;
        self.world.lock().links[self.id].locals.add(memory, limit)
    }

    fn receive(&mut self, out: &mut Vec<u8>) -> bool {
        let message = self.world.lock().links[self.id].inbox.pop_front();
        message.inspect(|message| out.extend_from_slice(message)).is_some()
    }

    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn is_broken(&self) -> bool {
        self.world.lock().links[self.id].is_broken()
    }

    fn drain_handle(&self) -> Option<Box<dyn DrainHandle>> {
        let is_busy = self.world.lock().links[self.id].is_busy();
        is_busy.then(|| {
            Box::new(SimDrain { world: Arc::clone(&self.world), id: self.id }) as Box<dyn DrainHandle>
        })
    }
}

/// Drains operations of a connection whose host's end is gone.
#[derive(Debug)]
struct SimDrain {
    world: Arc<Mutex<FabricWorld>>,
    id: usize,
}

impl DrainHandle for SimDrain {
    fn drain(&mut self) -> Result<(), EndpointError> {
        self.world.lock().drop_strays(self.id)
    }
}

impl Drop for SimEndpoint {
    fn drop(&mut self) {
        self.world.lock().close(self.id);
    }
}
