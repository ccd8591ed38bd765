//! Clears memory that was used and is free again, so that other tenants than its last may have it.
//!
//! The node does with its own memory what a host does: it takes a group of free spans, by the same operations over the same fabric. When nobody can
//! get at it any more it is cleared and given back, nobody's. Its last tenant may have been faster, and takes it as it is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use aquifer_fabric::tcp::{ClusterKey, ConnectOptions};
use aquifer_fabric::{EndpointError, Host, Identity, Reach, Target, Tenant};
use aquifer_pool::{Donation, NodeId, PoolClient, PoolError};

use crate::shutdown::Shutdown;

/// How often to look. What has been left alone from one look to the next is cleared: whoever goes on taking and giving back keeps its own.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Nobody's user id.
const NOBODY: Tenant = Tenant(u32::MAX);

/// Where the node reaches itself.
#[derive(Debug)]
pub(crate) struct Own {
    pub reach: Reach,
    pub key: Option<ClusterKey>,
}

/// The thread that clears. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Clearer {
    stop: Shutdown,
    thread: Option<JoinHandle<()>>,
}

impl Clearer {
    /// Start it. `cleared_bytes` counts what it clears.
    pub fn start(
        own: Own,
        donation: Donation,
        target: Arc<dyn Target>,
        cleared_bytes: Arc<AtomicU64>,
    ) -> std::io::Result<Self> {
        let stop = Shutdown::new();
        let clearing = Clearing {
            seen: vec![Seen::default(); donation.layout.sections() as usize],
            own,
            donation,
            target,
            pool: None,
            cleared_bytes,
        };
        let asked = stop.clone();
        let thread =
            std::thread::Builder::new().name("clearer".into()).spawn(move || clearing.run(&asked))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Clearer {
    fn drop(&mut self) {
        self.stop.request();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            debug_assert!(ended.is_ok(), "the thread that clears memory panicked");
        }
    }
}

/// A section as it was at the last look.
#[derive(Clone, Copy, Default)]
struct Seen {
    word: u64,
    /// There was nothing to be cleared in it, and there is not as long as its word stays so.
    is_clear: bool,
}

struct Clearing {
    own: Own,
    donation: Donation,
    target: Arc<dyn Target>,
    pool: Option<PoolClient>,
    seen: Vec<Seen>,
    cleared_bytes: Arc<AtomicU64>,
}

impl Clearing {
    fn run(mut self, stop: &Shutdown) {
        while !stop.wait(LOOK_EVERY) {
            if let Err(error) = self.look(stop) {
                // It is done with another connection, at the next look.
                tracing::debug!(%error, "memory is not cleared");
                self.pool = None;
            }
        }
    }

    fn look(&mut self, stop: &Shutdown) -> Result<(), ClearError> {
        for section in 0..self.donation.layout.sections() {
            let word = self.donation.section_word(section);
            let seen = &mut self.seen[section as usize];
            if seen.word != word {
                *seen = Seen { word, is_clear: false };
                continue;
            }
            if seen.is_clear {
                continue;
            }
            seen.is_clear = self.donation.uncleared(section).is_none();
            while self.clear_some(section)? && !stop.is_requested() {}
        }
        Ok(())
    }

    /// Clear one group of a section; whether there was one.
    fn clear_some(&mut self, section: u32) -> Result<bool, ClearError> {
        let Some(group) = self.donation.uncleared(section) else { return Ok(false) };
        let node = NodeId(self.donation.layout.node());
        let pool = match &mut self.pool {
            Some(pool) => pool,
            none => none.insert(connect(&self.own, node)?),
        };
        let Some(taken) = pool.take_to_clear(node, section, group)? else { return Ok(false) };
        self.target.expel(taken.addr..taken.addr + taken.class.bytes());
        self.donation.clear(&taken);
        pool.free(taken)?;
        self.cleared_bytes.fetch_add(taken.class.bytes(), Relaxed);
        Ok(true)
    }
}

fn connect(own: &Own, node: NodeId) -> Result<PoolClient, ClearError> {
    let who = Identity { host: Host::NODE, epoch: 1, tenant: NOBODY };
    let endpoint = own.reach.connect(who, own.key.as_ref(), &ConnectOptions::default())?;
    let mut pool = PoolClient::new(who.host, who.tenant);
    pool.add_node(node, endpoint)?;
    Ok(pool)
}

/// Why nothing is cleared.
#[derive(Debug, thiserror::Error)]
enum ClearError {
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    #[error(transparent)]
    Pool(#[from] PoolError),
}
