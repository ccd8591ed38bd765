//! Client of the one-sided array, which has an entry with the owner for each 4 KiB: a state machine
//! for the cost model and for real memory.

use aquifer_pool::SizeClass;
use aquifer_pool::size::SECTION_CHUNKS;

/// Least number of entries of one READ.
const READ_MIN: u32 = 64;
/// Most entries of one READ.
pub const READ_MAX: u32 = SECTION_CHUNKS;

/// An operation on entries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Touch {
    /// A WRITE that makes an entry free.
    Clear {
        /// The entry.
        entry: u32,
    },
    /// A READ of neighbouring entries, at most [`READ_MAX`].
    Read {
        /// The first entry.
        first: u32,
        /// Number of entries.
        count: u32,
    },
    /// A CAS of an entry from free to this host.
    Claim {
        /// The entry.
        entry: u32,
        /// The new owner.
        host: u16,
    },
}

/// Neighbouring entries that a client owns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Held {
    /// The node.
    pub node: usize,
    /// The first entry.
    pub first: u32,
    /// The number of entries, as a size class.
    pub class: SizeClass,
}

/// A client with one allocation or free at a time. The driver does the operations in
/// [`ArrayClient::touches`] and passes the results to [`ArrayClient::complete`] until that is done.
#[derive(Debug)]
pub struct ArrayClient {
    host: u16,
    /// Owners of each node's entries, as far as this client knows.
    views: Vec<Vec<u16>>,
    cursor: u32,
    /// The entries of the current allocation.
    now: Option<Held>,
    touches: Vec<Touch>,
    /// Entries claimed in a lost race, which are freed with the next attempt.
    got: Vec<u32>,
    /// Whether the known owners were discarded once for this allocation.
    has_forgotten: bool,
}

impl ArrayClient {
    /// A client that assumes all entries of `nodes` nodes to be free.
    pub fn new(host: u16, sections: u32, nodes: usize, seed: u64) -> Self {
        let entries = sections * SECTION_CHUNKS;
        let mixed = (seed ^ u64::from(host)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        // Each client starts at another entry.
        let cursor = u32::try_from(mixed % u64::from(entries)).unwrap_or(0);
        let views = vec![vec![0; entries as usize]; nodes];
        Self { host, views, cursor, now: None, touches: Vec::new(), got: Vec::new(), has_forgotten: false }
    }

    /// The operations to do next, with one doorbell.
    pub fn touches(&self) -> &[Touch] {
        &self.touches
    }

    /// Starts an allocation; returns false if this client knows no free entries.
    pub fn start_allocation(&mut self, node: usize, class: SizeClass) -> bool {
        self.has_forgotten = false;
        let first = self.find(node, class);
        self.touches.clear();
        self.now = first.map(|first| Held { node, first, class });
        self.attempt();
        first.is_some()
    }

    /// Starts a free.
    pub fn start_free(&mut self, held: Held) {
        self.touches.clear();
        self.now = None;
        for entry in held.first..held.first + held.class.chunks() {
            self.touches.push(Touch::Clear { entry });
            self.views[held.node][entry as usize] = 0;
        }
    }

    /// Processes the results: the entries that READs returned and the values that CASes found, in
    /// order.
    ///
    /// # Errors
    /// If the array is full.
    pub fn complete(&mut self, results: &[u16]) -> Result<ArrayProgress, String> {
        let Some(Held { node, first, class }) = self.now else { return Ok(ArrayProgress::Freed) };
        let mut results = results.iter().copied();
        let mut has_lost = false;
        let view = &mut self.views[node];
        self.got.clear();
        for touch in &self.touches {
            match *touch {
                Touch::Clear { .. } => {}
                Touch::Read { first, count } => {
                    let near = &mut view[first as usize..][..count as usize];
                    near.iter_mut().zip(&mut results).for_each(|(owner, found)| *owner = found);
                }
                Touch::Claim { entry, host } => {
                    let found = results.next().unwrap_or(0);
                    has_lost |= found != 0;
                    view[entry as usize] = if found == 0 { host } else { found };
                    if found == 0 {
                        self.got.push(entry);
                    }
                }
            }
        }
        if !has_lost {
            return Ok(ArrayProgress::Allocated(Held { node, first, class }));
        }
        let next = self.find(node, class).ok_or("the array is full")?;
        self.retry(node, next, class);
        Ok(ArrayProgress::LostRace)
    }

    /// Frees the claimed entries, reads the present owners, and claims other entries.
    fn retry(&mut self, node: usize, first: u32, class: SizeClass) {
        self.touches.clear();
        for entry in self.got.drain(..) {
            self.touches.push(Touch::Clear { entry });
            self.views[node][entry as usize] = 0;
        }
        let entries = u32::try_from(self.views[node].len()).unwrap_or(u32::MAX);
        let count = READ_MIN.max(class.chunks()).min(entries - first);
        self.touches.push(Touch::Read { first, count });
        self.now = Some(Held { node, first, class });
        self.attempt();
    }

    fn attempt(&mut self) {
        let Some(Held { first, class, .. }) = self.now else { return };
        let host = self.host;
        self.touches.extend((first..first + class.chunks()).map(|entry| Touch::Claim { entry, host }));
    }

    /// The next entries that are free as far as this client knows. If there are none, other clients
    /// may have freed some: the known owners are discarded, once for each allocation.
    fn find(&mut self, node: usize, class: SizeClass) -> Option<u32> {
        let found = self.find_known(node, class);
        if found.is_some() || std::mem::replace(&mut self.has_forgotten, true) {
            return found;
        }
        let host = self.host;
        self.views[node].iter_mut().filter(|owner| **owner != host).for_each(|owner| *owner = 0);
        self.find_known(node, class)
    }

    fn find_known(&mut self, node: usize, class: SizeClass) -> Option<u32> {
        let view = &self.views[node];
        let step = class.chunks();
        let runs = u32::try_from(view.len()).unwrap_or(u32::MAX) / step;
        let from = self.cursor / step;
        let is_free = |run: &u32| {
            let first = (run * step) as usize;
            view[first..first + step as usize].iter().all(|owner| *owner == 0)
        };
        let run = (from..runs).chain(0..from.min(runs)).find(is_free)?;
        self.cursor = run * step;
        Some(run * step)
    }
}

/// State of an allocation or free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ArrayProgress {
    /// Another client was faster; there are more operations to do.
    LostRace,
    /// The allocation is complete.
    Allocated(Held),
    /// The free is complete.
    Freed,
}
